"""The matrices of a layer: from a state dict or from safetensors files, whole or one rank's share of the heads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from .config import MlaConfig
from .rope import interleaved

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SCALE = "_scale_inv"  # behind the name of a weight in e4m3: that of its scales, one per block
_BLOCK = 128  # rows and columns
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Shard:
    """Which heads are held: those of one of `world` ranks, in order."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise ValueError(f"rank is {self.rank} of {self.world}; supported: 0 to world - 1")

    def heads(self, config: MlaConfig) -> slice:
        """The heads of this rank. ValueError if ranks cannot have as many each."""
        count, left = divmod(config.num_attention_heads, self.world)
        if left:
            raise ValueError(f"{config.num_attention_heads} heads on {self.world} ranks; supported: a divisor of the number of heads")
        return slice(self.rank * count, (self.rank + 1) * count)


@dataclass(frozen=True)
class MlaWeights:
    """Matrices as torch.nn.functional.linear takes them, [out, in], of one dtype and device; heads: those held.

    q_a, q_a_norm: [q_lora_rank, hidden] and [q_lora_rank], None without q_lora_rank
    q_b: [heads * 192, q_lora_rank or hidden], of each head 128 columns without position and 64 rotary ones
    kv_a, kv_a_norm: [576, hidden], 512 latent and 64 rotary columns, and [512]
    kv_b: [heads * 256, 512], of each head 128 columns of keys and 128 of values
    o: [hidden, heads * 128]

    Rotary columns 2i and 2i + 1 are a pair, however a checkpoint has them.
    """

    q_a: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor
    o: torch.Tensor

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor], config: MlaConfig, *, shard: Shard | None = None, prefix: str = "") -> MlaWeights:
        """From a state dict with Hugging Face's names behind a prefix, such as "model.layers.0.self_attn."; other names are not looked at.

        Weights in e4m3 with fp32 scales (`weight_scale_inv`, one for 128 rows and columns) are widened to bf16. With a shard, o's product
        with this rank's heads is a partial sum: the sum over the ranks is the layer's output. ValueError if a weight is missing or has
        another shape than the config says.
        """
        held = (Shard() if shard is None else shard).heads(config)
        read = {name: _read(tensors, prefix, name, shape) for name, shape in _shapes(config).items()}
        by_head = {name: read[name].unflatten(0, (config.num_attention_heads, -1)) for name in (_query_name(config), "kv_b_proj")}
        q_b, kv_a = by_head[_query_name(config)][held], read["kv_a_proj_with_mqa"]
        if not config.rope_interleave:
            q_b = torch.cat((q_b[:, : config.qk_nope_head_dim], interleaved(q_b[:, config.qk_nope_head_dim :])), dim=1)
            kv_a = torch.cat((kv_a[: config.kv_lora_rank], interleaved(kv_a[config.kv_lora_rank :])))
        return MlaWeights(
            q_a=read.get("q_a_proj"),
            q_a_norm=read.get("q_a_layernorm"),
            q_b=_own(q_b.flatten(0, 1)),
            kv_a=_own(kv_a),
            kv_a_norm=read["kv_a_layernorm"],
            kv_b=_own(by_head["kv_b_proj"][held].flatten(0, 1)),
            o=_own(read["o_proj"].unflatten(1, (config.num_attention_heads, -1))[:, held].flatten(1)),
        )

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> MlaWeights:
        """The same on another device or in another dtype."""
        weights: dict[str, Any] = {
            field.name: None if weight is None else weight.to(device=device, dtype=dtype)
            for field in fields(self)
            for weight in (getattr(self, field.name),)
        }
        return MlaWeights(**weights)

    def heads(self, config: MlaConfig) -> int:
        """The heads held."""
        return self.q_b.shape[0] // config.query_columns


def load_weights(
    path: str | Path,
    layer: int,
    config: MlaConfig,
    *,
    shard: Shard | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> MlaWeights:
    """The attention weights of a model's layer, from a .safetensors file or from the folder of a checkpoint; as from_tensors.

    Needs the safetensors package: ModuleNotFoundError without it. FileNotFoundError if path has no such files.
    """
    try:
        from safetensors import safe_open
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "load_weights reads .safetensors files with the package safetensors, which is not installed: pip install 'cute-mla[weights]'",
            name="safetensors",
        ) from error
    prefix = f"model.layers.{layer}.self_attn."
    tensors: dict[str, torch.Tensor] = {}
    for file in _files(Path(path), prefix):
        with safe_open(file, framework="pt") as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys() if name.startswith(prefix)}  # noqa: SIM118  # no mapping
    return MlaWeights.from_tensors(tensors, config, shard=shard, prefix=prefix).to(device, dtype)


def _files(path: Path, prefix: str) -> list[Path]:
    """The files that hold what begins with a prefix."""
    if not path.is_dir():
        return [path]
    index = path / _INDEX
    if not index.is_file():
        return [path / _SINGLE]
    places = json.loads(index.read_text())["weight_map"]
    return sorted({path / file for name, file in places.items() if name.startswith(prefix)})


def _query_name(config: MlaConfig) -> str:
    return "q_proj" if config.q_lora_rank is None else "q_b_proj"


def _shapes(config: MlaConfig) -> dict[str, tuple[int, ...]]:
    """What a checkpoint has, by name."""
    heads, latent = config.num_attention_heads, config.kv_lora_rank
    query_inputs = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        _query_name(config): (heads * config.query_columns, query_inputs),
        "kv_a_proj_with_mqa": (latent + config.qk_rope_head_dim, config.hidden_size),
        "kv_a_layernorm": (latent,),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
        "o_proj": (config.hidden_size, heads * config.v_head_dim),
    }
    if config.q_lora_rank is not None:
        shapes |= {"q_a_proj": (config.q_lora_rank, config.hidden_size), "q_a_layernorm": (config.q_lora_rank,)}
    return shapes


def _read(tensors: Mapping[str, torch.Tensor], prefix: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """One weight of a checkpoint, in a float type of 16 or 32 bits. ValueError if it is missing or not what it should be."""
    full = f"{prefix}{name}.weight"
    if full not in tensors:
        raise ValueError(f"there is no {full}; supported: a checkpoint with all weights of the layer's attention")
    weight = tensors[full]
    if weight.shape != shape:
        raise ValueError(f"{full} has shape {list(weight.shape)}; supported with this config: {list(shape)}")
    if weight.dtype == torch.float8_e4m3fn:
        return _widened(full, weight, tensors.get(full + _SCALE))
    if weight.dtype not in _FLOATS:
        raise ValueError(f"{full} has dtype {weight.dtype}; supported: {', '.join(map(str, (*_FLOATS, torch.float8_e4m3fn)))}")
    return weight


def _widened(name: str, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Values times the scales of their blocks, in fp32, rounded once to bf16."""
    expected = [-(-size // _BLOCK) for size in weight.shape]
    if scales is None or list(scales.shape) != expected:
        got = None if scales is None else list(scales.shape)
        raise ValueError(f"{name}{_SCALE} has shape {got}; supported beside a weight in e4m3 of {list(weight.shape)}: {expected}")
    rows, columns = weight.shape
    spread = scales.float().repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    return (weight.float() * spread).to(torch.bfloat16)


def _own(weight: torch.Tensor) -> torch.Tensor:
    """Contiguous, in storage that holds no more."""
    return weight.clone(memory_format=torch.contiguous_format)
