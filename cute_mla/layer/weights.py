"""Matrices of a layer from a state dict or from safetensors files, of all heads or of one rank's heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from ..ops.arguments import check_integer
from ..ops.tensor_spec import record_repr
from .checkpoint import listed, read_attention
from .config import MlaConfig
from .rope import halved, interleaved

ALPHA = "rotary_emb.alpha"  # of a model, whose layers share it
_SCALES = ("weight_scale_inv", "weight_scale")  # names of the scales of an e4m3 weight
_UNUSED = ("activation_scale", "input_scale")  # of products in e4m3; the layer rounds no activations
_IGNORED = ("rotary_emb.inv_freq", "k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale")  # the scales: of caches in e4m3
_BY_HEAD = {"q_b", "kv_b", "gate", "sinks", "q_scale", "q_scale_bias"}  # whose rows are those of heads
_FP32 = ("sinks", "q_scale", "q_scale_bias", "alpha")  # in any case
_BLOCK = 128  # rows and columns that share a scale
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_SCALE_DTYPES = (*_FLOATS, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class Shard:
    """The heads of one of `world` ranks; ranks have consecutive heads."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        check_integer("world", self.world, 1)
        check_integer("rank", self.rank, 0, self.world - 1)

    def heads(self, config: MlaConfig) -> slice:
        """Return the heads of this rank. Raise ValueError if the heads do not divide evenly."""
        count, left = divmod(config.num_attention_heads, self.world)
        if left:
            raise ValueError(f"{config.num_attention_heads} heads on {self.world} ranks; supported: a divisor of the number of heads")
        return slice(self.rank * count, (self.rank + 1) * count)


@dataclass(frozen=True)
class MlaWeights:
    """Matrices [out, in], as torch.nn.functional.linear takes them, of one dtype and device. heads: the heads of the shard.

    q_a, q_a_norm: [q_lora_rank, hidden] and [q_lora_rank], None without q_lora_rank
    q_b: [heads * (nope + rotary), q_lora_rank or hidden], per head columns without rotary embedding, then rotary columns
    kv_a, kv_a_norm: [latent + rotary, hidden], and [latent]; None with borrowed latents
    kv_b: [heads * (nope + v), latent], per head columns of keys, then columns of values
    o: [hidden, heads * v]
    q_a_bias, kv_a_bias, o_bias: [q_lora_rank], [latent + rotary], [hidden]; None without attention_bias. Only the first shard has o_bias
    gate: [heads, hidden] or [heads * v, hidden], None without output_gate. sinks: [heads], fp32 in any case, None without attention_sinks
    q_scale, q_scale_bias: [heads], fp32 in any case, None without softmax_scaling. alpha: [rotary / 2], fp32 in any case, of all layers of
    a model the same; None without learned_frequencies. rotary_norm: [rotary], None without it in the config

    nope, rotary, latent and v are the config's qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank and v_head_dim.

    Rotary columns 2i and 2i + 1 are a pair, whatever the order in the checkpoint.
    """

    q_a: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q_b: torch.Tensor
    kv_a: torch.Tensor | None
    kv_a_norm: torch.Tensor | None
    kv_b: torch.Tensor
    o: torch.Tensor
    q_a_bias: torch.Tensor | None = None
    kv_a_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    q_scale_bias: torch.Tensor | None = None
    alpha: torch.Tensor | None = None
    rotary_norm: torch.Tensor | None = None

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor], config: MlaConfig, *, shard: Shard | None = None, prefix: str = "") -> MlaWeights:
        """Read a state dict with Hugging Face's names behind a prefix, such as "model.layers.0.self_attn."; other names are ignored.

        e4m3 weights are dequantised to bf16 by their scales, `weight_scale_inv` or `weight_scale`: one per 128 rows and 128 columns, or one
        for all, in a float dtype or float8_e8m0fnu. With a shard, o times this rank's heads is a partial sum; the sum over the ranks is the
        layer's output. Raises ValueError if a weight is missing, if its shape does not match the config, and for tensors behind the prefix
        that the layer does not use; the indexer's are IndexerWeights'.
        """
        config.check_one_layer()
        shard = Shard() if shard is None else shard
        held = shard.heads(config)
        names = _names(config, tensors, prefix)
        shapes = _shapes(config)
        read = {name: read_weight(tensors, prefix + name, shapes[field]) for field, name in names.items()}
        check_names(tensors, prefix, read, _IGNORED if config.indexer is None else (*_IGNORED, "indexer."))
        weights = {field: read[name] for field, name in names.items()}
        if not config.rope_interleave:
            _reorder(weights, config, interleaved)
        for field in _BY_HEAD & weights.keys():
            weights[field] = copy_contiguous(weights[field].unflatten(0, (config.num_attention_heads, -1))[held].flatten(0, 1))
        weights["o"] = copy_contiguous(weights["o"].unflatten(1, (config.num_attention_heads, -1))[:, held].flatten(1))
        if shard.rank:
            weights.pop("o_bias", None)
        weights |= {field: weights[field].float() for field in _FP32 if field in weights}
        return MlaWeights(**{field.name: weights.get(field.name) for field in fields(MlaWeights)})  # type: ignore[arg-type]

    def to_tensors(self, config: MlaConfig) -> dict[str, torch.Tensor]:
        """Return the weights of a layer with all heads under Hugging Face's names, in the order of rows that from_tensors reads."""
        weights = {field.name: weight for field in fields(self) for weight in (getattr(self, field.name),) if weight is not None}
        if not config.rope_interleave:
            _reorder(weights, config, halved)
        names = _names(config, {}, "")
        return {full_name(names[field]): weight for field, weight in weights.items()}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MlaWeights:
        """Return the weights on another device or in another dtype."""
        weights: dict[str, Any] = {
            field.name: None if weight is None else weight.to(device=device, dtype=None if field.name in _FP32 else dtype)
            for field in fields(self)
            for weight in (getattr(self, field.name),)
        }
        return MlaWeights(**weights)

    def heads(self, config: MlaConfig) -> int:
        """Return the number of heads of the shard."""
        return self.q_b.shape[0] // config.query_columns

    __repr__ = record_repr


def load_weights(
    path: str | Path,
    layer: int,
    config: MlaConfig,
    *,
    shard: Shard | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> MlaWeights:
    """Read the attention weights of a layer from a .safetensors file or from the folder of a checkpoint, as MlaWeights.from_tensors.

    Each tensor comes from the file that the index of the folder names. In the checkpoint of a multimodal model, names may begin with
    language_model.model or model.language_model. Raises ModuleNotFoundError without the safetensors package, FileNotFoundError if path has
    no .safetensors file or the index names one that is missing, and ValueError also for a damaged file or index.
    """
    config = config.of_layer(layer)
    tensors, prefix = read_attention(path, layer, (ALPHA,) if config.learned_frequencies else ())
    return MlaWeights.from_tensors(tensors, config, shard=shard, prefix=prefix).to(device, dtype)


def _names(config: MlaConfig, tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, str]:
    """Return the checkpoint's name of each field that the config has. With sinks the gate is Hy4's, unless the tensors have the other."""
    names = {"q_b": "q_proj"}
    if config.q_lora_rank is not None:
        names = {"q_b": "q_b_proj", "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm"}
    if config.latents != "borrowed":
        names |= {"kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm"}
    names |= {"kv_b": "kv_b_proj", "o": "o_proj"}
    if config.softmax_scaling:
        names |= {"q_scale": "softmax_scaling.scale", "q_scale_bias": "softmax_scaling.bias"}
    if config.learned_frequencies:
        names["alpha"] = ALPHA
    if config.rotary_norm:
        names["rotary_norm"] = "k_rope_only_layernorm"
    if config.attention_bias:
        names |= {f"{field}_bias": f"{names[field]}.bias" for field in ("q_a", "kv_a", "o") if field in names}
    if config.output_gate is not None:
        names["gate"] = "gate_proj" if config.attention_sinks and f"{prefix}g_proj.weight" not in tensors else "g_proj"
    return names | ({"sinks": "sinks"} if config.attention_sinks else {})


def _shapes(config: MlaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each field in a checkpoint, of all heads."""
    heads, latent, hidden = config.num_attention_heads, config.kv_lora_rank, config.hidden_size
    rank = hidden if config.q_lora_rank is None else config.q_lora_rank
    keys = latent + config.qk_rope_head_dim
    shapes: dict[str, tuple[int, ...]] = {"q_a": (rank, hidden), "q_a_norm": (rank,), "q_a_bias": (rank,)}
    shapes |= {"q_b": (heads * config.query_columns, rank), "kv_a": (keys, hidden), "kv_a_bias": (keys,), "kv_a_norm": (latent,)}
    shapes |= {"kv_b": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent), "o": (hidden, heads * config.v_head_dim)}
    gates = heads if config.output_gate == "head" else heads * config.v_head_dim
    shapes["rotary_norm"] = (config.qk_rope_head_dim,)
    shapes |= {"alpha": (config.qk_rope_head_dim // 2,), "q_scale": (heads,), "q_scale_bias": (heads,)}
    return shapes | {"o_bias": (hidden,), "gate": (gates, hidden), "sinks": (heads,)}


def _reorder(weights: dict[str, torch.Tensor], config: MlaConfig, order: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Reorder the rows of rotary columns in the weights of all heads that have them."""
    q_b = weights["q_b"].unflatten(0, (config.num_attention_heads, -1))
    weights["q_b"] = _with_rotary(q_b, config.qk_nope_head_dim, order).flatten(0, 1)
    if "kv_a" in weights:
        weights["kv_a"] = _with_rotary(weights["kv_a"], config.kv_lora_rank, order)
    if "kv_a_bias" in weights:
        weights["kv_a_bias"] = _with_rotary(weights["kv_a_bias"].unsqueeze(1), config.kv_lora_rank, order).squeeze(1)


def _with_rotary(rows: torch.Tensor, plain: int, order: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return rows [.., rows, columns], those behind the plain ones reordered."""
    return torch.cat((rows[..., :plain, :], order(rows[..., plain:, :])), dim=-2)


def full_name(name: str) -> str:
    """Return the name of a tensor in a state dict: a matrix or a norm is a `weight`, others are parameters of their own."""
    return name if name.endswith((".bias", "sinks", ".scale", ".alpha", "_compress_ape", "_compress_gate")) else f"{name}.weight"


def check_names(tensors: Mapping[str, torch.Tensor], prefix: str, read: Iterable[str], ignored: Iterable[str] = ()) -> None:
    """Raise ValueError for tensors behind a prefix that nobody reads. read: names of read_weight; ignored: what other names begin with."""
    ends = (".weight", *(f".{scale}" for scale in (*_SCALES, *_UNUSED)))
    known = {prefix + name + end for name in read for end in (ends if full_name(name) != name else ("",))}
    others = tuple(prefix + name for name in ignored)
    extra = [name for name in tensors if name.startswith(prefix) and name not in known and not name.startswith(others)]
    if extra:
        raise ValueError(f"the layer has no use for {listed(extra)}; supported with this config: {', '.join(read)}")


def read_weight(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a weight of a checkpoint, or a bias by a name with ".bias" at its end, or sinks, in a 16-bit or 32-bit float dtype.

    Raises ValueError for a missing weight, wrong shape or dtype, and for scales of a weight that is not in e4m3.
    """
    full = full_name(name)
    if full not in tensors:
        raise ValueError(f"there is no {full}; supported: a checkpoint with all weights of the layer's attention")
    weight = tensors[full]
    if weight.shape != shape:
        raise ValueError(f"{full} has shape {list(weight.shape)}; supported with this config: {list(shape)}")
    scales = {scale: tensors[scale] for scale in (f"{name}.{suffix}" for suffix in _SCALES) if scale in tensors}
    if weight.dtype == torch.float8_e4m3fn:
        return _dequantise(full, weight, scales)
    if weight.dtype not in _FLOATS:
        raise ValueError(f"{full} has dtype {weight.dtype}; supported: {', '.join(map(str, (*_FLOATS, torch.float8_e4m3fn)))}")
    if scales:
        raise ValueError(f"{full} has dtype {weight.dtype} and {' and '.join(scales)}; supported with scales: {torch.float8_e4m3fn}")
    return weight


def _dequantise(name: str, weight: torch.Tensor, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Multiply e4m3 values by the scales of their blocks, or by the one scale of all, in fp32, rounded once to bf16."""
    blocks = [-(-size // _BLOCK) for size in weight.shape]
    if len(given) != 1:
        raise ValueError(f"{name} is in e4m3 with {' and '.join(given) or 'no scales'}; supported: {' or '.join(_SCALES)}")
    ((scale_name, scales),) = given.items()
    if scales.dtype not in _SCALE_DTYPES:
        raise ValueError(
            f"{scale_name} has dtype {scales.dtype}; supported: {', '.join(map(str, _SCALE_DTYPES))}. Bytes that are exponents are read by "
            ".view(torch.float8_e8m0fnu)"
        )
    spread = scales.float()
    if spread.numel() == 1:
        spread = spread.reshape(())
    elif list(spread.shape) != blocks:
        raise ValueError(
            f"{scale_name} has shape {list(spread.shape)}; supported beside {list(weight.shape)} in e4m3: {blocks} or one scale"
        )
    else:
        for dim, size in enumerate(weight.shape):
            spread = spread.repeat_interleave(_BLOCK, dim).narrow(dim, 0, size)
    return (weight.float() * spread).to(torch.bfloat16)


def copy_contiguous(weight: torch.Tensor) -> torch.Tensor:
    """Copy a weight to contiguous storage of its own, so that slices do not keep the checkpoint alive."""
    return weight.clone(memory_format=torch.contiguous_format)
