"""Table of models with Multi-head Latent Attention: their columns, and what serves them, as is_supported and the layer answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cute_mla.spec.kernel_ops import ARCHS_OF

HEADS = (
    *("model", "heads", "columns of a key", "columns of a head", "dense decode", "sparse decode", "prefill", "sparse prefill", "layer"),
    "evidence",
)
# What is compared: with transformers' own module, layer or function; with a reference, vLLM's layer over the kernels. SIZES: nothing is
LAYER, FUNCTION, ENGINE, SIZES = "layer", "`attn_implementation`", "vLLM", "dimensions"
_NONE = "–"  # what a model has no use for


@dataclass(frozen=True)
class Model:
    """A model, with the sizes of its configuration under Hugging Face's names.

    qk_nope_head_dim, v_head_dim: None where keys are values, and prefill has no heads of its own. formats: of its caches that engines use,
    none if they are bf16 without a name here; extra_formats: those beside the first. topk: keys that its indexer chooses; None without one.
    keys: further keys of its configuration that concern attention. evidence: LAYER, FUNCTION and ENGINE, or SIZES.
    """

    name: str
    num_attention_heads: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int | None = 128
    v_head_dim: int | None = 128
    formats: tuple[str, ...] = ("latent", "fp8_576")
    extra_formats: tuple[str, ...] = ()
    topk: int | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    evidence: str = LAYER

    @property
    def d_qk(self) -> int:
        """Return the columns of a key in the cache; those of V4 hold its rotary columns."""
        return self.kv_lora_rank + (0 if self.qk_nope_head_dim is None else self.qk_rope_head_dim)

    @property
    def columns(self) -> str:
        """Return the columns of a key, latent and rotary."""
        if self.qk_nope_head_dim is None:
            return f"{self.kv_lora_rank}, of them {self.qk_rope_head_dim} rotary"
        return f"{self.kv_lora_rank} + {self.qk_rope_head_dim}"

    @property
    def head(self) -> tuple[int, int] | None:
        """Return the columns of a head's query and value in prefill, or None."""
        if self.qk_nope_head_dim is None or self.v_head_dim is None:
            return None
        return self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim


_V3_2 = Model("DeepSeek-V3.2", 128, formats=("latent", "fp8_656"), topk=2048)
_V4 = Model("DeepSeek-V4", 64, qk_nope_head_dim=None, v_head_dim=None, formats=("fp8_584",), topk=512, evidence=f"{FUNCTION}, {ENGINE}")
_NOPE = {"mla_use_nope": True}
_DOTS3 = {"model_type": "dots3_note_text", "q_lora_rank": 1024}

# Sizes by transformers' configuration_*.py and by the models' cards; formats by FlashMLA, vLLM and SGLang (docs/models.md)
MODELS: tuple[Model, ...] = (
    Model("DeepSeek-V2", 128),
    Model("DeepSeek-V2-Lite", 16),
    Model("DeepSeek-V3, V3.1, R1", 128),
    _V3_2,
    _V4,
    replace(_V4, name="DeepSeek-V4.1", formats=("v41", "v41_paged"), extra_formats=("v41_fp4",), evidence=ENGINE),
    Model("Kimi K2", 64),
    Model("Kimi K3", 96, keys={**_NOPE, "mla_use_output_gate": True}, evidence=SIZES),
    Model("Kimi Linear", 32, keys=_NOPE),
    Model("LongCat Flash", 64, keys={"model_type": "longcat_flash", "q_lora_rank": 1536}),
    Model("Ling 3", 32, keys={"model_type": "bailing_hybrid"}),
    Model("A.X-K1", 64),
    Model("A.X-K2-Light", 32, 128, 32, 64, 64, topk=2048, keys={"model_type": "axk2"}, evidence=FUNCTION),
    Model("Youtu", 16),
    replace(
        _V3_2,
        name="Hy4",
        num_attention_heads=32,
        qk_nope_head_dim=192,
        v_head_dim=256,
        keys={"model_type": "hy_v4", "learnable_sink_init": 0.0},
    ),
    replace(_V3_2, name="dots3-note, 13 of 46 layers", keys=_DOTS3, evidence=f"{LAYER}, {ENGINE}"),
    Model(
        *("dots3-note, 33 of 46 layers", 64, 1024, 64, 192, 128),
        formats=("latent_1088",),
        keys={
            **_DOTS3,
            "layer_types": ["sliding_attention"],
            "sliding_window": 512,
            "rope_parameters": {"sliding_attention": {"rope_type": "default"}},
        },
        evidence=f"{LAYER}, {ENGINE}",
    ),
    replace(
        _V3_2,
        name="Mistral Large 4, 54 of 72 layers",
        num_attention_heads=64,
        qk_nope_head_dim=64,
        keys={"model_type": "mistral_large4_text", "rope_parameters": {"rope_type": "default"}, "no_rope_layers": [1]},
    ),
    replace(
        _V3_2,
        name="Mistral Large 4, 18 of 72 layers",
        num_attention_heads=64,
        qk_rope_head_dim=0,
        qk_nope_head_dim=128,
        formats=("latent_512", "nope_528"),
        keys={"model_type": "mistral_large4_text", "rope_parameters": {"rope_type": "default"}, "no_rope_layers": [1]},
    ),
    Model("GLM-4.7-Flash", 20, qk_nope_head_dim=192, v_head_dim=256),
    replace(_V3_2, name="GLM-5, 5.1, 5.2", num_attention_heads=64, qk_nope_head_dim=192, v_head_dim=256),
    Model("GLM-5.3-Flash", 64, 512, 0, 256, 256, formats=("latent_512", "nope_528"), topk=2048),
    Model("Mistral Small 4", 32, 256, 64, 64, 128, formats=("latent_320",)),
    Model("MiniCPM3", 40, 256, 32, 64, 64, formats=("latent",), evidence=SIZES),
)


def served_models() -> list[tuple[str, ...]]:
    """Return a row of the table for each model, with a cell for each of HEADS."""
    return [_row(model) for model in MODELS]


def _row(model: Model) -> tuple[str, ...]:
    sparse = model.topk is not None
    return (
        model.name,
        str(model.num_attention_heads),
        model.columns,
        _NONE if model.head is None else "q, k {}; v {}".format(*model.head),
        _NONE if model.head is None else _decode("dense_decode", model),
        _decode("sparse_decode", model) if sparse else _NONE,
        _prefill(model),
        _sparse_prefill(model) if sparse else _NONE,
        _layer(model),
        model.evidence,
    )


def _decode(op: str, model: Model) -> str:
    """Return the names of the cache formats that an op reads for a model, or why it reads none."""
    features: dict[str, Any] = {"h_q": model.num_attention_heads, "head_dim": model.d_qk, "head_dim_v": model.kv_lora_rank}
    refused = _refusal(op, **features)
    if refused is not None:
        return f"not served: {refused}"
    reads = _served(op, model.formats, features, "kv_format")
    if not model.formats:
        return "bf16"
    if not reads:
        return f"not served: its formats are {', '.join(model.formats)}"
    extra = _served(op, model.extra_formats, {**features, "kv_format": reads[0], "extra_cache": True}, "extra_kv_format")
    return ", ".join(_code(reads)) + (f"; beside `{reads[0]}` also {', '.join(_code(extra))}" if extra else "")


def _served(op: str, formats: Iterable[str], features: dict[str, Any], argument: str) -> list[str]:
    return [name for name in formats if _refusal(op, **{**features, argument: name}) is None]


def _prefill(model: Model) -> str:
    """Return the gradients of the prefill that serves a model, or why none does."""
    if model.head is None:
        return _NONE
    features = {"head_dim": model.head[0], "head_dim_v": model.head[1]}
    refused = _refusal("dense_prefill", **features)
    if refused is not None:
        return f"not served: {refused}"
    return "with gradients" if _refusal("dense_prefill_backward", **features) is None else "without gradients"


def _layer(model: Model) -> str:
    """Return whether the layer has a model's attention, or why not."""
    from cute_mla.layer import MlaConfig

    if model.head is None:
        return "not served: keys are values"
    names = ("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    sizes = {name: getattr(model, name) for name in names}
    try:
        MlaConfig.from_hugging_face({"hidden_size": 1, "q_lora_rank": None, **sizes, **model.keys})
    except ValueError as error:
        return f"not served: {str(error).partition(';')[0]}"
    return "yes" if model.topk is None else "yes, with indexer"


def _sparse_prefill(model: Model) -> str:
    refused = _refusal("sparse_prefill", h_q=model.num_attention_heads, head_dim=model.d_qk, head_dim_v=model.kv_lora_rank)
    return "yes" if refused is None else f"not served: {refused}"


def _refusal(op: str, **features: Any) -> str | None:
    """Return why bf16 calls with these features are not supported on Hopper or Blackwell, None if they are on both."""
    from cute_mla.api import is_supported

    answers = {is_supported(op, arch.name, dtype="bf16", **features) for arch in ARCHS_OF["dense_prefill_backward"]}
    return next((reason for supported, reason in sorted(answers) if not supported), None)


def _code(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def markdown() -> str:
    """Return the table, as docs/models.md has it."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (HEADS, ["---"] * len(HEADS), *served_models()))
