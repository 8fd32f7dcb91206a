"""Checkpoint that is converted: its configuration and its weights, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import torch

from ..layer.checkpoint import MAX_LAYERS, Entry, listed, read_headers, read_json, read_tensors, tensor_files
from ..layer.config import Llama3Scaling
from ..ops.arguments import check_integer, is_number, short_repr
from ..spec.mla import D_ROPE

HEAD_DIMS = (D_ROPE, 2 * D_ROPE)
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}  # as safetensors names them

_MODELS = ("llama", "qwen2", "mistral")
_QK_NORM = "normalises queries and keys of each head, which no latent can absorb"
_REFUSED = {
    "qwen3": _QK_NORM,
    "olmo2": _QK_NORM,
    "gemma3": _QK_NORM,
    "gemma3_text": _QK_NORM,
    "gemma2": "has sliding windows and soft caps",
}
_PROJECTIONS = ("q", "k", "v", "o")


@dataclass(frozen=True)
class SourceConfig:
    """Configuration of a Llama, Qwen2 or Mistral model, with the names of Hugging Face configs.

    rope_scaling: None or that of Llama 3.1. biases: of the projections "q", "k", "v" and "o", those with a bias.
    passed_on: further keys, which the converted configuration repeats.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    tie_word_embeddings: bool
    biases: tuple[str, ...]
    passed_on: Mapping[str, Any]

    @staticmethod
    def from_hugging_face(config: Mapping[str, Any]) -> SourceConfig:
        """Read a model's config.json. Raise ValueError if it is of a model that cannot be converted, with the reason."""
        if not isinstance(config, Mapping):
            raise ValueError(f"config is {short_repr(config)}; supported: a mapping, as in config.json")
        kind = config.get("model_type")
        _check_supported(kind, config)
        sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings")
        missing = [name for name in (*sizes, "rms_norm_eps") if name not in config]
        if missing:
            raise ValueError(f"the config has no {', '.join(missing)}; supported: the configs of {', '.join(_MODELS)}")
        read = {name: check_integer(name, config[name], 1, MAX_LAYERS if name == "num_hidden_layers" else None) for name in sizes}
        heads = read["num_attention_heads"]
        kv_heads = check_integer("num_key_value_heads", config.get("num_key_value_heads") or heads, 1, heads)
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads is {heads} with num_key_value_heads {kv_heads}; supported: a multiple of them")
        head_dim = config.get("head_dim") or read["hidden_size"] // heads
        if head_dim not in HEAD_DIMS:
            raise ValueError(
                f"head_dim is {short_repr(head_dim)}; supported: {' and '.join(map(str, HEAD_DIMS))}, whose frequencies are those of the "
                f"{D_ROPE // 2} pairs of DeepSeek's rotary key"
            )
        theta, scaling = _rope(config)
        biases = {"llama": _PROJECTIONS if config.get("attention_bias") else (), "qwen2": ("q", "k", "v")}
        return SourceConfig(
            **read,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive("rms_norm_eps", config["rms_norm_eps"]),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            biases=biases.get(str(kind), ()),
            passed_on={name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config},
        )

    @property
    def pairs(self) -> int:
        """Return the pairs of columns of a head that its rotary embedding turns."""
        return self.head_dim // 2

    @property
    def group(self) -> int:
        """Return the query heads of each KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight of a layer, by its name behind "model.layers.N."."""
        hidden, inner = self.hidden_size, self.intermediate_size
        rows = {"q": self.num_attention_heads * self.head_dim, "k": self.num_key_value_heads * self.head_dim}
        rows |= {"v": rows["k"], "o": hidden}
        columns = {"q": hidden, "k": hidden, "v": hidden, "o": rows["q"]}
        return {
            **{f"self_attn.{name}_proj.weight": (rows[name], columns[name]) for name in _PROJECTIONS},
            **{f"self_attn.{name}_proj.bias": (rows[name],) for name in self.biases},
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }

    def outer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each weight outside the layers, by its full name."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes


@dataclass(frozen=True)
class SourceCheckpoint:
    """Folder of a checkpoint in safetensors, whose weights have been compared with its configuration."""

    folder: Path
    config: SourceConfig
    entries: Mapping[str, Entry]

    @staticmethod
    def open(folder: str | Path) -> SourceCheckpoint:
        """Read config.json and the headers of the weights.

        Raises ValueError if the model cannot be converted, a weight is missing, unknown or of another shape or dtype, or a file is damaged;
        FileNotFoundError if there is no config.json or a file of weights is missing; ModuleNotFoundError without the safetensors package.
        """
        folder = Path(folder)
        config = SourceConfig.from_hugging_face(read_json(folder / "config.json"))
        entries = read_headers(tensor_files(folder))
        _check_weights(config, entries)
        return SourceCheckpoint(folder, config, entries)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Return the widest dtype of the weights."""
        return reduce(torch.promote_types, (FLOATS[entry.dtype] for entry in self.entries.values()))

    @property
    def files(self) -> list[Path]:
        """Return the files of the weights, sorted."""
        return sorted({entry.file for entry in self.entries.values()})

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Return the weights of a layer, by their names behind "model.layers.N."."""
        prefix = f"model.layers.{index}."
        read = self._read(prefix + name for name in self.config.layer_shapes())
        return {name.removeprefix(prefix): weight for name, weight in read.items()}

    def outer(self, *names: str) -> dict[str, torch.Tensor]:
        """Return weights outside the layers, by their full names; without names, all."""
        return self._read(names or self.config.outer_shapes())

    def _read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        read = read_tensors({name: entry.file for name, entry in self.entries.items()}, names)
        bad = [name for name, weight in read.items() if not bool(torch.isfinite(weight).all())]
        if bad:
            raise ValueError(f"{bad[0]} has values that are not finite; supported: finite weights")
        return read


def _check_supported(kind: Any, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model whose attention or MLP DeepSeek-V3 does not have."""
    if kind not in _MODELS:
        reason = f", which {_REFUSED[kind]}" if isinstance(kind, str) and kind in _REFUSED else ""
        raise ValueError(f"model_type is {short_repr(kind)}{reason}; supported: {', '.join(_MODELS)}")
    if config.get("quantization_config"):
        raise ValueError("the config has a quantization_config; supported: weights in bf16, fp16 or fp32")
    windowed = config.get("sliding_window") is not None and (kind == "mistral" or bool(config.get("use_sliding_window")))
    kinds = config.get("layer_types") or []
    if windowed or not isinstance(kinds, list | tuple) or any(each != "full_attention" for each in kinds):
        raise ValueError(f"the model has a sliding_window of {config.get('sliding_window')}; supported: attention to all keys")
    if config.get("mlp_bias"):
        raise ValueError(f"mlp_bias is {config['mlp_bias']!r}; supported: False, because the MLP of DeepSeek-V3 has no biases")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {config['hidden_act']!r}; supported: 'silu'")


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """Return rope_theta and the scaling of frequencies. Raise ValueError for other types than default and llama3."""
    newer = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or newer
    for name, value in (("rope_parameters", newer), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {short_repr(value)}; supported: a mapping, as in config.json")
    theta = _positive("rope_theta", config.get("rope_theta", newer.get("rope_theta", 10_000.0)))
    partial = config.get("partial_rotary_factor", newer.get("partial_rotary_factor", 1.0))
    if partial != 1:
        raise ValueError(f"partial_rotary_factor is {short_repr(partial)}; supported: 1")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type is {short_repr(kind)}; supported: default and llama3, which depend on a pair's frequency alone")
    return theta, Llama3Scaling.from_hugging_face(scaling)


def _positive(name: str, value: Any) -> float:
    if not is_number(value) or not 0 < float(value) < float("inf"):
        raise ValueError(f"{name} is {short_repr(value)}; supported: a positive finite number")
    return float(value)


def _check_weights(config: SourceConfig, entries: Mapping[str, Entry]) -> None:
    """Raise ValueError unless the checkpoint has exactly the weights of the configuration, in floats."""
    layers = range(config.num_hidden_layers)
    expected = {
        **config.outer_shapes(),
        **{f"model.layers.{i}.{name}": shape for i in layers for name, shape in config.layer_shapes().items()},
    }
    missing = [name for name in expected if name not in entries]
    if missing:
        raise ValueError(f"there is no {listed(missing)}; supported: a checkpoint with all weights of its config")
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    extra = [name for name in entries if name not in expected and name not in ignored and not name.endswith(".rotary_emb.inv_freq")]
    if extra:
        normed = any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in extra)
        reason = f"; a model with q_norm and k_norm {_QK_NORM}" if normed else ""
        raise ValueError(f"the config knows no {listed(extra)}{reason}; supported: a checkpoint with the weights of its config alone")
    for name, shape in expected.items():
        entry = entries[name]
        if entry.shape != shape:
            raise ValueError(f"{name} has shape {list(entry.shape)}; supported with this config: {list(shape)}")
        if entry.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {entry.dtype}; supported: {', '.join(FLOATS)}")
