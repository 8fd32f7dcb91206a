"""Configuration of an MLA layer: sizes, rotary embedding, scale of the softmax."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..ops.arguments import check_flag, check_integer, is_number, short_repr
from ..spec.dense_prefill import HEAD_DIMS
from ..spec.mla import D_LATENT, D_ROPE, DENSE_DIMS, LATENT_DIMS
from .config_keys import DOTS3, MISTRAL_LARGE_4, check_keys
from .indexer_config import IndexerConfig
from .layer_kinds import check_layers, read_layers
from .window_layers import split_layers

OutputGate = Literal["head", "column"]
Latents = Literal["own", "lent", "borrowed"]

_FLAGS = (
    *("rope_interleave", "attention_bias", "mla_use_nope", "mla_scale_q_lora", "mla_scale_kv_lora", "attention_sinks"),
    *("softmax_scaling", "learned_frequencies", "rotary_norm"),
)
_POSITIVE_INTEGERS = ("hidden_size", "num_attention_heads", "max_position_embeddings")
_YARN_TYPES = ("yarn", "deepseek_yarn")
_LLAMA3 = "llama3"
_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")  # keys of each type; qk_rope_head_dim gives what the last does


@dataclass(frozen=True)
class YarnScaling:
    """YaRN scaling: slow frequencies are divided by `factor`, fast frequencies stay as they are.

    factor: target context length over original_max_position_embeddings.
    beta_fast: frequencies with at least this many turns within the original context stay as they are. beta_slow: frequencies with at most
    this many turns are divided by `factor`.
    mscale: scale of the rotary columns of queries and keys. mscale_all_dim: scale of all columns, applied to the scale of the softmax.
    attention_factor: scale of the rotary columns of queries and keys; None: that of mscale and mscale_all_dim.
    llama_4_scaling_beta: of Mistral's models, whose queries grow with their position: at position p a query is multiplied by
    1 + beta * ln(1 + floor(p / original_max_position_embeddings)) (transformers, modeling_mistral4.py). None: DeepSeek's models.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    llama_4_scaling_beta: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            _check_positive(f"rope_scaling[{name!r}]", getattr(self, name))
        if self.attention_factor is not None:
            _check_positive("rope_scaling['attention_factor']", self.attention_factor)
        for name in ("mscale", "mscale_all_dim", "llama_4_scaling_beta"):
            value = getattr(self, name)
            if name == "llama_4_scaling_beta" and value is None:
                continue
            if not is_number(value) or not 0 <= float(value) < math.inf:
                raise ValueError(f"rope_scaling[{name!r}] is {short_repr(value)}; supported: a number, 0 or more")
        if self.beta_slow >= self.beta_fast:
            raise ValueError(f"rope_scaling has beta_slow {self.beta_slow} and beta_fast {self.beta_fast}; supported: the former less")

    @staticmethod
    def from_hugging_face(scaling: Mapping[str, Any]) -> YarnScaling | None:
        """Read `rope_scaling` of a config; return None if it scales nothing. Raise ValueError if it is not YaRN."""
        kind = _rope_type(_mapping("rope_scaling", scaling))
        if kind == "default":
            _check_known(scaling, _ROPE)
            return None
        if kind not in _YARN_TYPES:
            raise ValueError(f"rope_scaling is of type {kind!r}; supported: {', '.join((*_YARN_TYPES, _LLAMA3))}")
        scaling = {name: value for name, value in scaling.items() if value is not None}
        required = ("factor", "original_max_position_embeddings")
        _check_present("rope_scaling", scaling, required)
        names = (*required, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "llama_4_scaling_beta")
        _check_known(scaling, (*_ROPE, *names, "attention_factor", "max_position_embeddings"))
        yarn = YarnScaling(**{name: scaling[name] for name in names if name in scaling})
        given = scaling.get("attention_factor")
        if given is not None and not {"mscale", "mscale_all_dim"} & scaling.keys():
            return replace(yarn, attention_factor=given)
        if given is not None and not (is_number(given) and math.isclose(given, yarn.rotary_scale, rel_tol=1e-6)):
            raise ValueError(f"rope_scaling['attention_factor'] is {short_repr(given)}; supported: {yarn.rotary_scale}, that of mscale")
        return yarn

    @property
    def rotary_scale(self) -> float:
        """Return the factor of the rotary columns of queries, and of those of keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        return _magnitude(self.factor, self.mscale) / _magnitude(self.factor, self.mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the scale of the softmax."""
        return _magnitude(self.factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of Llama 3.1: frequencies that turn rarely within the original context are divided by `factor`.

    factor: what slow frequencies are divided by. low_freq_factor, high_freq_factor: frequencies with at most the former many turns within
    original_max_position_embeddings are divided, those with at least the latter stay as they are.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            _check_positive(f"rope_scaling[{name!r}]", getattr(self, name))
        if self.low_freq_factor >= self.high_freq_factor:
            given = f"low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}"
            raise ValueError(f"rope_scaling has {given}; supported: the former less")

    @staticmethod
    def from_hugging_face(scaling: Mapping[str, Any]) -> Llama3Scaling:
        """Read `rope_scaling` of a config, of type llama3. Raise ValueError if a value is missing or unsupported."""
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        _check_known(scaling, (*_ROPE, *names))
        _check_present("rope_scaling", scaling, names)
        return Llama3Scaling(**{name: scaling[name] for name in names})

    @property
    def rotary_scale(self) -> float:
        """Return the factor of the rotary columns of queries, and of those of keys: 1."""
        return 1.0

    @property
    def softmax_scale(self) -> float:
        """Return the factor of the scale of the softmax: 1."""
        return 1.0

    def to_hugging_face(self) -> dict[str, Any]:
        """Return the scaling as a config has it."""
        return {"rope_type": "llama3", **asdict(self)}


@dataclass(frozen=True)
class MlaConfig:
    """Configuration of a layer, with the names of Hugging Face configs. of_layer() is that of one layer where the layers of a model differ.

    kv_lora_rank, qk_rope_head_dim: columns of a key in the cache, latent and rotary: 512 and 64, 512 and 0 (no rotary embedding), or 256
    and 64.
    qk_nope_head_dim, v_head_dim: a head's query has qk_nope_head_dim + qk_rope_head_dim columns: 192 or 128 with a v_head_dim of 128, or
    256 with 256.
    max_position_embeddings: longest sequence of the model; positions lie on the device and are not checked against it.
    q_lora_rank: None if one matrix projects queries (DeepSeek-V2-Lite).
    rope_interleave: True if rotary columns 2i and 2i + 1 of a checkpoint are a pair, as in DeepSeek's; False if i and i + 32 are.
    indexer: that of a model with sparse attention; None: every token attends to all keys.
    attention_bias: True if kv_a, o and, with a q_lora_rank, q_a have a bias.
    mla_use_nope: True if the rotary columns are not rotated (Kimi).
    mla_scale_q_lora, mla_scale_kv_lora: True if the root of hidden_size over their rank multiplies queries and latent keys (LongCat).
    output_gate: whether a sigmoid of a projection of the hidden states multiplies the output before o: of each head, or of each column.
    attention_sinks: True if each head has a sink, a logit of one more key whose value is 0 (Hy4).
    softmax_scaling: True if a query at position p of head h is multiplied by scale[h] * ln(p + 1) + bias[h] (Mistral Large 4).
    learned_frequencies: True if the frequencies of RoPE are multiplied by exp(alpha), alpha a weight of the model (LeRoPE).
    no_rope_layers: for each layer of a model 1, or 0 for a layer whose rotary columns are latent ones; () for layers that are all alike.
    kv_source_layers: for each layer of a model the one whose latent keys it attends to; () for its own.
    rotary_norm: True if the rotary columns of keys are normalised before their rotation (dots3-note).
    sliding_window: of one layer: the last keys that a token attends to, its own included; None: all. Such a layer prefills in the absorbed
    form; its keys may have 1,024 latent columns, and its heads any.
    window_layers, window: for each layer of a model 1, or 0 for a layer with the configuration `window` in the place of this one; () and
    None for layers that are all alike.
    latents: of one layer: "lent" to the layers behind it with the same columns, "borrowed" from the last layer before it that lends, which
    then has neither kv_a nor keys of its own in the cache; "own": neither.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int = D_LATENT
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = D_ROPE
    v_head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: YarnScaling | Llama3Scaling | None = None
    rope_interleave: bool = True
    max_position_embeddings: int = 163_840
    indexer: IndexerConfig | None = None
    attention_bias: bool = False
    mla_use_nope: bool = False
    mla_scale_q_lora: bool = False
    mla_scale_kv_lora: bool = False
    output_gate: OutputGate | None = None
    attention_sinks: bool = False
    softmax_scaling: bool = False
    learned_frequencies: bool = False
    no_rope_layers: tuple[int, ...] = ()
    kv_source_layers: tuple[int, ...] = ()
    latents: Latents = "own"
    rotary_norm: bool = False
    sliding_window: int | None = None
    window_layers: tuple[int, ...] = ()
    window: MlaConfig | None = None

    def __post_init__(self) -> None:
        self._check_columns()
        for name in _POSITIVE_INTEGERS:
            check_integer(name, getattr(self, name), 1)
        if self.q_lora_rank is not None:
            check_integer("q_lora_rank", self.q_lora_rank, 1)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if self.mla_scale_q_lora and self.q_lora_rank is None:
            raise ValueError("mla_scale_q_lora is True with q_lora_rank None; supported: False")
        if self.mla_use_nope and self.rope_scaling is not None:
            raise ValueError(f"rope_scaling is {short_repr(self.rope_scaling)} with mla_use_nope; supported: None")
        if self.output_gate not in (None, "head", "column"):
            raise ValueError(f"output_gate is {short_repr(self.output_gate)}; supported: None, 'head', 'column'")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, YarnScaling | Llama3Scaling):
            raise ValueError(f"rope_scaling is {short_repr(self.rope_scaling)}; supported: None, YarnScaling and Llama3Scaling")
        if self.indexer is not None and not isinstance(self.indexer, IndexerConfig):
            raise ValueError(f"indexer is {short_repr(self.indexer)}; supported: None and IndexerConfig")
        for name in ("rms_norm_eps", "rope_theta"):
            _check_positive(name, getattr(self, name))
        if self.latents not in ("own", "lent", "borrowed"):
            raise ValueError(f"latents is {short_repr(self.latents)}; supported: 'own', 'lent', 'borrowed'")
        check_layers(self.no_rope_layers, self.kv_source_layers)
        self._check_windows()
        yarn = self.rope_scaling if 0 in self.no_rope_layers and isinstance(self.rope_scaling, YarnScaling) else None
        if yarn is not None and (yarn.softmax_scale != 1 or yarn.llama_4_scaling_beta):
            raise ValueError(
                f"rope_scaling is {short_repr(yarn)} with layers without RoPE; supported: neither mscale_all_dim nor llama_4_scaling_beta"
            )

    def of_layer(self, layer: int) -> MlaConfig:
        """Return the configuration of one layer of the model; of a model whose layers are alike, or of one layer, this configuration."""
        check_integer("layer", layer, 0)
        if self.window is not None:
            return self.window if self.window_layers[layer : layer + 1] == (1,) else replace(self, window_layers=(), window=None)
        rotary, sources = self.no_rope_layers, self.kv_source_layers
        latents = self.latents
        if layer < len(sources):
            latents = "borrowed" if sources[layer] != layer else "lent" if layer in sources[layer + 1 :] else "own"
        own = replace(self, no_rope_layers=(), kv_source_layers=(), latents=latents)
        if layer >= len(rotary) or rotary[layer]:
            return own
        return replace(own, rope_scaling=None, learned_frequencies=False, qk_nope_head_dim=self.query_columns, qk_rope_head_dim=0)

    def check_one_layer(self) -> None:
        """Raise ValueError if this is the configuration of a model whose layers differ."""
        if self.no_rope_layers or self.kv_source_layers or self.window is not None:
            raise ValueError(
                "the config has no_rope_layers, kv_source_layers or window_layers; supported: that of one layer, config.of_layer(layer)"
            )

    def _check_windows(self) -> None:
        """Raise ValueError for a window beside what it does not go with."""
        if self.rotary_norm and not (self.rope_interleave and self.qk_rope_head_dim):
            raise ValueError("rotary_norm is True; supported: with rope_interleave and rotary columns")
        if not isinstance(self.window, MlaConfig | None):
            raise ValueError(f"window is {short_repr(self.window)}; supported: None and MlaConfig")
        if self.window is not None and (self.no_rope_layers or self.kv_source_layers or self.sliding_window):
            raise ValueError("window is given; supported: without no_rope_layers, kv_source_layers and sliding_window")
        flags = self.window_layers
        if not isinstance(flags, tuple) or (self.window is None) != (1 not in flags) or any(flag not in (0, 1) for flag in flags):
            raise ValueError(f"window_layers is {short_repr(self.window_layers)}; supported: () without window, with it also 1 for layers")
        if self.sliding_window is None:
            return
        check_integer("sliding_window", self.sliding_window, 1)
        others = ("indexer", "attention_sinks", "no_rope_layers", "kv_source_layers")
        given = [name for name in others if getattr(self, name)] + (["latents"] if self.latents != "own" else [])
        if given:
            raise ValueError(f"sliding_window is {self.sliding_window} with {', '.join(given)}; supported: without")

    def _check_columns(self) -> None:
        """Raise ValueError unless kernels have the columns of keys and of heads."""
        latent, rotary, nope, d_v = (
            check_integer(name, getattr(self, name), 0) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        )
        dims_of = LATENT_DIMS if self.sliding_window is None else DENSE_DIMS
        keys = [(dims.latent, dims.rotary) for dims in dims_of.values()]
        if (latent, rotary) not in keys:
            listed = ", ".join(f"{known} with {columns}" for known, columns in keys)
            raise ValueError(f"kv_lora_rank is {latent} with qk_rope_head_dim {rotary}; supported: {listed}")
        heads = {d_qk - rotary: columns for d_qk, columns in HEAD_DIMS.items()}
        if self.sliding_window is None and heads.get(nope) != d_v:
            listed = ", ".join(f"{known} with {columns}" for known, columns in heads.items())
            raise ValueError(f"qk_nope_head_dim is {nope} with v_head_dim {d_v}; supported with qk_rope_head_dim {rotary}: {listed}")
        if not rotary and self.rope_scaling is not None:
            raise ValueError(f"rope_scaling is {short_repr(self.rope_scaling)} with qk_rope_head_dim 0; supported: None")

    @staticmethod
    def from_hugging_face(config: Mapping[str, Any]) -> MlaConfig:
        """Read a model's config.json, or the text_config of a multimodal model's.

        Raises ValueError for keys that may change attention and that the layer does not read, for a model_type that is not known (a config
        without one is taken at its keys), and if a key is missing or has an unsupported value. docs/models.md says which keys these are.
        """
        config = _mapping("config", config)
        if "text_config" in config:
            config = _mapping("text_config", config["text_config"])
        if config.get("model_type") == DOTS3 and "layer_types" in config:
            others, windows, windowed = split_layers(config)
            window = None if windows is None else _read_model(windows, config.get("sliding_window"))
            if others is None and window is not None:
                return window
            read = _read_model({} if others is None else others)
            return read if window is None else replace(read, window_layers=windowed, window=window)
        return _read_model(config)

    @property
    def softmax_scale(self) -> float:
        """Return the scale of the softmax for the columns of decompressed queries, YaRN's factor included."""
        scale = self.query_columns**-0.5
        return scale if self.rope_scaling is None else scale * self.rope_scaling.softmax_scale

    @property
    def scales_by_position(self) -> bool:
        """Return whether queries of attention or of the indexer are multiplied by their position's logarithm."""
        return self.softmax_scaling or (self.indexer is not None and self.indexer.from_hidden)

    @property
    def q_lora_scale(self) -> float:
        """Return what queries are multiplied with before their rotation."""
        return (self.hidden_size / self.q_lora_rank) ** 0.5 if self.mla_scale_q_lora and self.q_lora_rank is not None else 1.0

    @property
    def kv_lora_scale(self) -> float:
        """Return what latent keys are multiplied with behind their norm."""
        return (self.hidden_size / self.kv_lora_rank) ** 0.5 if self.mla_scale_kv_lora else 1.0

    @property
    def query_columns(self) -> int:
        """Return the columns of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def key_columns(self) -> int:
        """Return the columns of a key in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def _read_model(config: Mapping[str, Any], window: int | None = None) -> MlaConfig:
    """Read a configuration whose layers are alike, or differ by lists. window: of its layers."""
    check_keys(config)
    required = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kind = config.get("model_type")
    large_4 = kind == MISTRAL_LARGE_4
    _check_present("the config", config, required if large_4 else (*required, "q_lora_rank"))
    if large_4:  # whose class in transformers has a pattern of layers and a YaRN of its own without these
        given = {name: value for name, value in config.items() if value is not None}
        _check_present("the config", given, ("no_rope_layers", "rope_parameters"))
    nope = _given(config, "mla_use_nope", kind == "kimi_linear")
    theta, scaling = (None, None) if nope else _read_rope(config)
    optional = {
        **{name: config.get(name) for name in ("rms_norm_eps", "max_position_embeddings", "rope_interleave", "attention_bias")},
        "rope_theta": theta,
    }
    read = MlaConfig(
        **{name: config[name] for name in required},
        q_lora_rank=config.get("q_lora_rank"),
        rope_scaling=scaling,
        indexer=IndexerConfig.from_hugging_face(config),
        mla_use_nope=nope,
        mla_scale_q_lora=_given(config, "mla_scale_q_lora", kind in ("longcat_flash", DOTS3)),
        mla_scale_kv_lora=_given(config, "mla_scale_kv_lora", kind in ("longcat_flash", DOTS3)),
        output_gate=_read_gate(config),
        attention_sinks=config.get("learnable_sink_init") is not None,
        softmax_scaling=large_4,
        learned_frequencies=large_4,
        rotary_norm=kind == DOTS3,
        sliding_window=window,
        no_rope_layers=read_layers(config, "no_rope_layers"),
        kv_source_layers=read_layers(config, "kv_source_layers"),
        **{name: value for name, value in optional.items() if value is not None},
    )
    if config.get("qk_head_dim") not in (None, read.query_columns):
        raise ValueError(f"qk_head_dim is {short_repr(config['qk_head_dim'])}; supported with the other columns: {read.query_columns}")
    return read


def _given(config: Mapping[str, Any], name: str, default: bool) -> Any:
    """Return the value of a key, or the default if it is missing or None."""
    return default if config.get(name) is None else config[name]


def _read_gate(config: Mapping[str, Any]) -> OutputGate | None:
    """Return what the gate of the output multiplies: columns in Kimi K3 and Hy4, heads or columns in Ling 3."""
    if config.get("model_type") == DOTS3:
        return "head"
    name = "gated_attention_proj_granularity_type"
    if config.get(name) is not None or config.get("model_type") == "bailing_hybrid":
        gates: dict[Any, OutputGate] = {None: "head", "head_wise": "head", "element_wise": "column"}
        if config.get(name) not in gates:
            raise ValueError(f"{name} is {short_repr(config[name])}; supported: head_wise, element_wise")
        return gates[config.get(name)]
    return "column" if config.get("mla_use_output_gate") or config.get("model_type") == "hy_v4" else None


def _read_rope(config: Mapping[str, Any]) -> tuple[Any, YarnScaling | Llama3Scaling | None]:
    """Return rope_theta, or None, and the scaling of frequencies. Raise ValueError for other types, and if two places differ."""
    places = {name: config[name] for name in ("rope_scaling", "rope_parameters") if config.get(name)}  # the latter in newer configs
    thetas = [place.get("rope_theta") for place in (config, *(_mapping(name, value) for name, value in places.items()))]
    thetas = [theta for theta in thetas if theta is not None]
    read = [_read_scaling(value) for value in places.values() if set(value) - {"rope_theta", "partial_rotary_factor"}]
    for name, values in (("rope_theta", thetas), ("rope_scaling", read)):
        if any(value != values[0] for value in values):
            raise ValueError(f"the config has {' and '.join(map(short_repr, values))} as {name}; supported: one")
    return thetas[0] if thetas else None, read[0] if read else None


def _read_scaling(scaling: Mapping[str, Any]) -> YarnScaling | Llama3Scaling | None:
    """Read rope_scaling or rope_parameters of a config. Raise ValueError for other types than default, YaRN and llama3."""
    return (Llama3Scaling if _rope_type(scaling) == _LLAMA3 else YarnScaling).from_hugging_face(scaling)


def _rope_type(scaling: Mapping[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type", "default"))


def _check_known(scaling: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise ValueError for keys of a scaling that are not read. `truncate` False would leave the ramp of YaRN unrounded."""
    extra = [name for name, value in scaling.items() if name not in known and value is not None and (name, value) != ("truncate", True)]
    if extra:
        given = ", ".join(f"{name} {short_repr(scaling[name])}" for name in extra)
        raise ValueError(f"rope_scaling of type {short_repr(_rope_type(scaling))} has {given}; supported: {', '.join(known)}")


def _magnitude(factor: float, mscale: float) -> float:
    """Return YaRN's attention factor, 0.1 * mscale * ln(factor) + 1 (arXiv 2309.00071, section 3.4; mscale is DeepSeek's)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _check_present(where: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{where} has no {', '.join(missing)}; supported: the configs of DeepSeek-V2 and V3")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {short_repr(value)}; supported: a mapping, as in config.json")
    return value


def _check_positive(name: str, value: Any) -> None:
    if not is_number(value) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} is {short_repr(value)}; supported: a positive finite number")
