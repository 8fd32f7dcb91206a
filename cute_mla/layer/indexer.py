"""The indexer of sparse attention: which keys the tokens of a step attend to (DeepSeek-V3.2, GLM-5, Mistral Large 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import layer_norm, linear

from ..indexer import prepare_index_queries, write_index_cache, write_pooled_index_keys
from ..ops.tensor_spec import record_repr
from ..spec.index_write import Rope
from ..spec.mla import D_LATENT, D_QK, D_ROPE, ceil_div
from ..spec.mqa_logits import COLUMNS, ROW_BYTES
from .checkpoint import read_attention
from .config import MlaConfig
from .index_keys import IndexRows, PooledIndexCache, gather_index_rows
from .rope import Rotation
from .weights import check_names, copy_contiguous, full_name, read_weight

_MATRICES = ("wq_b", "wk", "pool_gate")  # in the dtype of the layer; the others are fp32
_QUERY_NORM_EPS = 1e-6
_PAGE_SIZE = 64  # of keys that are written to be read at once


class IndexQueries(NamedTuple):
    """Queries of the indexer: e4m3 [tokens, heads, 128], and the weights of their heads, scales included, fp32 [tokens, heads]."""

    q: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class IndexerWeights:
    """Matrices [out, in] of an indexer; every rank has all of its heads.

    wq_b: [heads * 128, q_lora_rank], wk: [128, hidden], bf16; fp32 only on the reference path. k_norm, k_norm_bias: [128], weights_proj:
    [heads, hidden], fp32, as they are used. q_norm, q_norm_bias: [hidden], q_scale, q_scale_bias: [heads], fp32; None but with from_hidden,
    where wq_b is [heads * 128, hidden]. pool_gate: [128, hidden], in the dtype of wk, and pool_bias: fp32 [key_pool, 128]; None for a
    key_pool of 1. Columns are in the order of the checkpoint, but with rope_last: rotary ones come first.
    """

    wq_b: torch.Tensor
    wk: torch.Tensor
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    weights_proj: torch.Tensor
    q_norm: torch.Tensor | None = None
    q_norm_bias: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None
    q_scale_bias: torch.Tensor | None = None
    pool_gate: torch.Tensor | None = None
    pool_bias: torch.Tensor | None = None

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor], config: MlaConfig, *, prefix: str = "") -> IndexerWeights:
        """Read a state dict with Hugging Face's names behind a prefix, such as "model.layers.0.self_attn."; other names are ignored.

        e4m3 weights are dequantised as in MlaWeights.from_tensors. Raises ValueError if a weight is missing or its shape does not match
        the config, for other tensors of the indexer, and if the config has no indexer that the layer supports.
        """
        heads, q_columns = supported_indexer(config)
        prefix = f"{prefix}indexer."
        shapes: dict[str, tuple[int, ...]] = {
            "wq_b": (heads * COLUMNS, q_columns),
            "wk": (COLUMNS, config.hidden_size),
            "weights_proj": (heads, config.hidden_size),
            **dict.fromkeys(("k_norm", "k_norm.bias"), (COLUMNS,)),
            **dict.fromkeys(("q_input_norm", "q_input_norm.bias"), (q_columns,)),
            **dict.fromkeys(("softmax_scaling.scale", "softmax_scaling.bias"), (heads,)),
            "index_kpool_compress_gate": (COLUMNS, config.hidden_size),
            "index_kpool_compress_ape": (1 if config.indexer is None else config.indexer.key_pool, COLUMNS),
        }
        names = _names(config)
        check_names(tensors, prefix, names.values())
        weights = {field: copy_contiguous(read_weight(tensors, prefix + name, shapes[name])) for field, name in names.items()}
        weights |= {field: weight.float() for field, weight in weights.items() if field not in _MATRICES}
        read = IndexerWeights(**weights)
        return read._swapped() if config.indexer is not None and config.indexer.rope_last else read

    def to_tensors(self, config: MlaConfig) -> dict[str, torch.Tensor]:
        """Return the weights under Hugging Face's names, as from_tensors reads them."""
        own = self._swapped() if config.indexer is not None and config.indexer.rope_last else self
        return {f"indexer.{full_name(name)}": getattr(own, field) for field, name in _names(config).items()}

    def _swapped(self) -> IndexerWeights:
        """Exchange the first and the last 64 columns of queries and keys, whose products stay the same."""
        names = ("wq_b", "wk", "k_norm", "k_norm_bias")
        return replace(self, **{name: getattr(self, name).unflatten(0, (-1, COLUMNS)).roll(D_ROPE, 1).flatten(0, 1) for name in names})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> IndexerWeights:
        """Return the weights on another device, and wq_b and wk in another dtype; the others stay fp32."""
        weights: dict[str, Any] = {
            field.name: None if weight is None else weight.to(device=device, dtype=dtype if field.name in _MATRICES else None)
            for field in fields(self)
            for weight in (getattr(self, field.name),)
        }
        return IndexerWeights(**weights)

    __repr__ = record_repr


def load_indexer_weights(
    path: str | Path,
    layer: int,
    config: MlaConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> IndexerWeights | None:
    """Read the indexer's weights of a layer as load_weights reads the others; None for a layer without an indexer of its own.

    Raises the errors of load_weights.
    """
    if config.indexer is None or not config.indexer.is_full(layer):
        return None
    config = config.of_layer(layer)
    tensors, prefix = read_attention(path, layer)
    return IndexerWeights.from_tensors(tensors, config, prefix=prefix).to(device, dtype)


def _names(config: MlaConfig) -> dict[str, str]:
    """Return the checkpoint's name of each weight of the config's indexer, by its field."""
    names = {"wq_b": "wq_b", "wk": "wk", "k_norm": "k_norm", "k_norm_bias": "k_norm.bias", "weights_proj": "weights_proj"}
    if config.indexer is not None and config.indexer.from_hidden:
        names |= {"q_norm": "q_input_norm", "q_norm_bias": "q_input_norm.bias"}
        names |= {"q_scale": "softmax_scaling.scale", "q_scale_bias": "softmax_scaling.bias"}
    if config.indexer is not None and config.indexer.key_pool > 1:
        names |= {"pool_gate": "index_kpool_compress_gate", "pool_bias": "index_kpool_compress_ape"}
    return names


class Indexer(torch.nn.Module):
    """Indexer of one layer: projects and quantises its queries and keys.

    weights: parameters hold them, under the names of IndexerWeights; they have no gradients. Raises ValueError if the config has no indexer
    that the layer supports.
    """

    wq_b: torch.Tensor
    wk: torch.Tensor
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    weights_proj: torch.Tensor
    q_norm: torch.Tensor | None
    q_norm_bias: torch.Tensor | None
    q_scale: torch.Tensor | None
    q_scale_bias: torch.Tensor | None
    pool_gate: torch.Tensor | None
    pool_bias: torch.Tensor | None

    def __init__(self, config: MlaConfig, weights: IndexerWeights) -> None:
        super().__init__()
        self.heads, _ = supported_indexer(config)
        interleave = config.indexer is not None and config.indexer.rope_interleave
        self.rope: Rope = "interleaved" if interleave else "half_split"
        self.key_pool = 1 if config.indexer is None else config.indexer.key_pool
        self.norm_eps = 1e-6 if config.indexer is None else config.indexer.norm_eps
        for field in fields(weights):
            weight = getattr(weights, field.name)
            self.register_parameter(field.name, None if weight is None else torch.nn.Parameter(weight, requires_grad=False))

    @property
    def weights(self) -> IndexerWeights:
        """Return the parameters."""
        return IndexerWeights(**{field.name: getattr(self, field.name) for field in fields(IndexerWeights)})

    def extra_repr(self) -> str:
        """Return the sizes of the indexer, for repr()."""
        return f"heads={self.heads}, rope={self.rope!r}"

    @torch.no_grad()
    def keys(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project keys [tokens, 128], which write() takes. hidden: [tokens, hidden_size]."""
        return linear(hidden, self.wk)

    @torch.no_grad()
    def write(self, keys: torch.Tensor, rotation: Rotation, index_cache: torch.Tensor, slots: torch.Tensor) -> None:
        """Normalise, rotate and quantise keys, and write them to their slots in an index cache."""
        norm = self.k_norm.float(), self.k_norm_bias.float()
        write_index_cache(keys, index_cache, slots, *norm, rotation.cos_sin, rope=self.rope, eps=self.norm_eps)

    @torch.no_grad()
    def write_pools(
        self, keys: torch.Tensor, hidden: torch.Tensor, cache: PooledIndexCache, spans: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Normalise keys, and write the pools that tokens complete. spans: cu_seqlens and context_lens, as in write_pooled_index_keys."""
        if self.pool_gate is None or self.pool_bias is None:
            raise ValueError("the indexer has no pool_gate; supported: one of a config with index_kpool")
        norm = self.k_norm.float(), self.k_norm_bias.float()
        pooled = (
            layer_norm(keys.float(), (COLUMNS,), *norm, self.norm_eps),
            linear(hidden, self.pool_gate).float(),
            self.pool_bias.float(),
        )
        write_pooled_index_keys(*pooled, cache.keys, cache.block_table, cache.tail, *spans, tail_rows=cache.tail_rows)

    def rows(self, keys: torch.Tensor, rotation: Rotation) -> IndexRows:
        """Return keys as an index cache would hold them, for all of these tokens."""
        pages = ceil_div(keys.shape[0], _PAGE_SIZE)
        scratch = keys.new_empty((max(pages, 1), _PAGE_SIZE, 1, ROW_BYTES), dtype=torch.uint8)
        slots = torch.arange(keys.shape[0], device=keys.device)
        self.write(keys, rotation, scratch, slots)
        return gather_index_rows(scratch, slots)

    @torch.no_grad()
    def queries(self, hidden: torch.Tensor, latent: torch.Tensor, rotation: Rotation) -> IndexQueries:
        """Return the queries of tokens. hidden: [tokens, hidden_size]; latent: [tokens, q_lora_rank], behind q_a_norm."""
        if self.q_norm is not None and self.q_norm_bias is not None:
            norm = self.q_norm.float(), self.q_norm_bias.float()
            latent = layer_norm(hidden.float(), self.q_norm.shape, *norm, _QUERY_NORM_EPS).to(hidden.dtype)
        projected = linear(latent, self.wq_b).unflatten(1, (self.heads, COLUMNS))
        if self.q_scale is not None and self.q_scale_bias is not None:
            projected = rotation.scale_heads(projected, self.q_scale, self.q_scale_bias)
        weights = linear(hidden.float(), self.weights_proj.float())
        return IndexQueries(*prepare_index_queries(projected, weights, rotation.cos_sin, rope=self.rope))


def supported_indexer(config: MlaConfig) -> tuple[int, int]:
    """Return the heads of the config's indexer, and the columns that its queries are projected from. ValueError if there is none."""
    indexer = config.indexer
    if indexer is None:
        raise ValueError("the config has no indexer; supported: configs with index_topk")
    if indexer.key_pool != 1 and config.qk_rope_head_dim:
        raise ValueError(f"index_kpool is {indexer.key_pool} with qk_rope_head_dim {config.qk_rope_head_dim}; supported: 1, or with 0")
    if config.q_lora_rank is None and not indexer.from_hidden:
        raise ValueError("q_lora_rank is None with an indexer; supported: an integer, whose columns the indexer's queries come from")
    if config.key_columns not in (D_QK, D_LATENT):
        columns = f"{config.kv_lora_rank} and qk_rope_head_dim {config.qk_rope_head_dim}"
        raise ValueError(f"kv_lora_rank is {columns} with an indexer; supported: 512 and 64, 512 and 0")
    return indexer.heads, config.hidden_size if indexer.from_hidden or config.q_lora_rank is None else config.q_lora_rank
