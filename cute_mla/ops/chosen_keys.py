"""Queries, keys and indices of head_sums and indexer_backward: what a call names, checked, and where launches find it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..spec.dense_decode import MAX_KEYS
from ..spec.head_sums import INDEX_COLUMNS, INDEX_HEADS, MAX_TOKENS
from ..spec.mla import MAX_HEADS
from ..spec.sparse_prefill import HEAD_DIMS
from .indices import check_indices, check_sink
from .key_lists import IndexedKeys, KeyPlan
from .launch_plan import named_strides
from .paged_cache import GATHER_ALIGNMENT, MAX_SLOTS
from .strides import as_rows
from .tensor_spec import (
    TensorSpec,
    check_address,
    check_counts,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)


@dataclass(frozen=True)
class Names:
    """Names of operands in messages, and what they may be. head: dimensions of the keys behind their number."""

    keys: str
    terms: str
    columns: tuple[int, ...]
    heads: int
    head: tuple[int, ...] = ()


ATTENTION = Names("kv", "lse", HEAD_DIMS, MAX_HEADS, (1,))
INDEXER = Names("k", "weights", (INDEX_COLUMNS,), INDEX_HEADS)


class Operands(NamedTuple):
    """The tensors that a call reads. terms: lse of the heads, or their weights."""

    q: torch.Tensor
    keys: torch.Tensor
    terms: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None = None
    attn_sink: torch.Tensor | None = None
    kv_offsets: torch.Tensor | None = None

    def named(self, names: Names) -> dict[str, torch.Tensor | None]:
        """Return them by the names of the call's arguments."""
        return {{"keys": names.keys, "terms": names.terms}.get(name, name): tensor for name, tensor in self._asdict().items()}

    def specs(self, names: Names) -> OperandSpecs:
        """Return their specs. ValueError unless each is a plain strided tensor with memory."""
        specs = {name: optional_spec(name, tensor) for name, tensor in self.named(names).items()}
        for name in ("q", names.keys, names.terms, "indices"):
            specs[name] = operand_spec(name, self.named(names)[name])
        return OperandSpecs(*specs.values())  # type: ignore[arg-type]  # those that are not None by the loop


class OperandSpecs(NamedTuple):
    """The specs of the operands."""

    q: TensorSpec
    keys: TensorSpec
    terms: TensorSpec
    indices: TensorSpec
    topk_length: TensorSpec | None
    attn_sink: TensorSpec | None
    kv_offsets: TensorSpec | None

    @property
    def leading(self) -> tuple[int, ...]:
        """Return the dimensions that count tokens: (s_q,) or (batch, s_q)."""
        return tuple(self.q.shape[:-2])

    @property
    def tokens(self) -> int:
        """Return the query tokens of all requests."""
        return math.prod(self.leading)

    @property
    def topk(self) -> int:
        """Return the indices of a token."""
        return self.indices.shape[-1]

    def check(self, names: Names) -> None:
        """Raise ValueError unless the operands fit together."""
        q, columns = self.q, " or ".join(map(str, names.columns))
        if len(q.shape) not in (3, 4) or q.shape[-1] not in names.columns:
            raise ValueError(f"q has shape {list(q.shape)}; supported: [s_q, h_q, {columns}] or [batch, s_q, h_q, {columns}]")
        check_dtype("q", q, torch.bfloat16)
        if not 1 <= q.shape[-2] <= names.heads:
            raise ValueError(f"q has shape {list(q.shape)}; supported: h_q 1 to {names.heads}")
        if self.tokens > MAX_TOKENS:
            raise ValueError(f"q has shape {list(q.shape)}, {self.tokens} query tokens; supported: to {MAX_TOKENS}")
        self._check_keys(names)
        check_shape(names.terms, self.terms, tuple(q.shape[:-1]))
        check_dtype(names.terms, self.terms, torch.float32)
        check_device(names.terms, self.terms, q.device)
        check_indices("indices", self.indices, (*self.leading, 1, "topk"), q)
        if self.topk > MAX_KEYS:
            raise ValueError(f"indices has shape {list(self.indices.shape)}; supported: topk to {MAX_KEYS}")
        if self.topk_length is not None:
            check_counts("topk_length", self.topk_length, self.leading, q.device)
        check_sink(self.attn_sink, q)

    def _check_keys(self, names: Names) -> None:
        q, keys, offsets = self.q, self.keys, self.kv_offsets
        batched = len(self.leading) == 2
        if offsets is not None:
            if not batched:
                raise ValueError(f"kv_offsets is given with q of shape {list(q.shape)}; supported: with q [batch, s_q, h_q, {q.shape[-1]}]")
            check_counts("kv_offsets", offsets, (self.leading[0] + 1,), q.device)
        shape: tuple[int | str, ...] = ("s_kv", *names.head, q.shape[-1])
        own = batched and offsets is None
        check_shape(names.keys, keys, (self.leading[0], *shape) if own else shape, " with a batch and no kv_offsets" if own else "")
        check_dtype(names.keys, keys, q.dtype)
        check_device(names.keys, keys, q.device)
        check_last_contiguous(names.keys, keys)
        if keys.shape[own] > MAX_SLOTS:
            raise ValueError(f"{names.keys} has shape {list(keys.shape)}; supported: s_kv to {MAX_SLOTS}")
        for dimension in range(1 + own):
            stride = keys.stride[dimension] * keys.dtype.itemsize if keys.shape[dimension] > 1 else 0
            if stride % GATHER_ALIGNMENT:
                raise ValueError(
                    f"{names.keys} has shape {list(keys.shape)} and strides {list(keys.stride)}, {stride} bytes along dimension "
                    f"{dimension}; supported: multiples of {GATHER_ALIGNMENT} bytes"
                )


@dataclass(frozen=True)
class Launched:
    """Operands as launches take them: with a batch in front, rows of q at multiples of 16 bytes, keys without a dimension of heads."""

    q: torch.Tensor
    keys: torch.Tensor
    terms: torch.Tensor
    indexed: IndexedKeys

    @staticmethod
    def create(operands: Operands, names: Names, key_plan: KeyPlan | None = None) -> Launched:
        """Return them for operands that have been checked."""
        keys = operands.keys.squeeze(-2) if names.head else operands.keys
        check_address(names.keys, keys.data_ptr(), GATHER_ALIGNMENT)
        if operands.kv_offsets is None and operands.q.dim() == 3:
            keys = keys.unsqueeze(0)
        indices, lengths = operands.indices.squeeze(-2), operands.topk_length
        q, terms, indices = (tensor if operands.q.dim() == 4 else tensor.unsqueeze(0) for tensor in (operands.q, operands.terms, indices))
        if lengths is not None and lengths.dim() == 1:
            lengths = lengths.unsqueeze(0)
        indexed = IndexedKeys(indices, lengths, operands.kv_offsets, keys.shape[-2], key_plan)
        return Launched(as_rows(q), keys, terms, indexed)

    def arguments(self) -> dict[str, Any]:
        """Return the launch arguments that both kernels have, but for the tokens of a launch."""
        keys, size = self.keys, self.keys.itemsize
        return {
            "q": self.q,
            "kv": keys,
            "terms": self.terms,
            "indices": self.indexed.indices,
            "topk_length": self.indexed.topk_length,
            "kv_offsets": self.indexed.kv_offsets,
            **named_strides("q", "batch token head", self.q.stride()[:3]),
            **named_strides("terms", "batch token head", self.terms.stride()),
            **named_strides("indices", "batch token", self.indexed.indices.stride()[:2]),
            "kv_stride_batch": keys.stride(0) * size if keys.dim() == 3 else 0,
            "kv_stride_row": keys.stride(-2) * size,
            "s_q": self.q.shape[1],
            "h_q": self.q.shape[2],
            "s_kv": self.indexed.s_kv,
            "topk": self.indexed.topk,
        }
