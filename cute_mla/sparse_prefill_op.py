"""Sparse prefill as one launch: what a call of given shapes needs (planned once, kept), and the call itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .cache.gathered import GATHER_ALIGNMENT, MOST_SLOTS
from .runtime.arguments import Argument
from .runtime.device import Device
from .sparse_op import check_indices, check_queries, check_sink
from .spec.arch import Arch
from .spec.dense_decode import MAX_KEYS
from .spec.mla import D_V, LOG2E
from .spec.sparse_prefill import MAX_TOKENS, SparsePrefillProblem
from .tensors import (
    DTYPE_NAMES,
    TensorSpec,
    check_address,
    check_counts,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    optional_spec,
    output_strides,
    row_alignment,
    spec_of,
)


class PrefillWanted(NamedTuple):
    """The results that a caller gives. address_alignment: what row_alignment takes, of q and out (the caller's, if given)."""

    out: TensorSpec | None
    max_logits: TensorSpec | None
    lse: TensorSpec | None
    address_alignment: int


class SparsePrefillCall(NamedTuple):
    """Everything about a call but values and addresses."""

    q: TensorSpec
    kv: TensorSpec
    indices: TensorSpec
    topk_length: TensorSpec | None
    attn_sink: TensorSpec | None
    kv_offsets: TensorSpec | None
    wanted: PrefillWanted

    @property
    def leading(self) -> tuple[int, ...]:
        """The dimensions that count tokens: (s_q,) or (batch, s_q)."""
        return tuple(self.q.shape[:-2])


@dataclass(frozen=True)
class SparsePrefillPlan:
    """What a call needs.

    kernel, grid: the variant, and its CTAs along (heads, 1, tokens). out_shape, row_shape: of out, and of max_logits and lse.
    int64s, int32s: scalar arguments, in the order of the kernel's parameters.
    """

    kernel: str
    grid: tuple[int, int, int]
    out_shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    int64s: tuple[int, ...]
    int32s: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is no output to compute."""
        return 0 in self.out_shape


class PrefillResults(NamedTuple):
    """What a call writes."""

    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor


class PrefillOperands(NamedTuple):
    """The operands of a call, not yet checked."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    kv_offsets: torch.Tensor | None

    def plan(self, wanted: PrefillWanted, device: Device) -> SparsePrefillPlan:
        """What the call needs on a device. ValueError on anything not supported."""
        call = SparsePrefillCall(
            q=spec_of("q", self.q),
            kv=spec_of("kv", self.kv),
            indices=spec_of("indices", self.indices),
            topk_length=optional_spec("topk_length", self.topk_length),
            attn_sink=optional_spec("attn_sink", self.attn_sink),
            kv_offsets=optional_spec("kv_offsets", self.kv_offsets),
            wanted=wanted,
        )
        plan = plan_call(call, device.arch, device.sm_count)
        check_address("kv", self.kv.data_ptr(), GATHER_ALIGNMENT)
        return plan

    def launch(self, device: Device, plan: SparsePrefillPlan, results: PrefillResults, sm_scale: float, empty_lse: float) -> None:
        """Launches sparse_prefill. Allocates nothing."""
        args: tuple[Argument, ...] = (
            self.q,
            self.kv,
            self.kv_offsets,
            self.indices,
            self.topk_length,
            self.attn_sink,
            *results,
            *plan.int64s,
            sm_scale * LOG2E,
            empty_lse,
            *plan.int32s,
        )
        device.launch(device.kernel("sparse_prefill", plan.kernel), plan.grid, args, pdl=True)


@lru_cache(maxsize=4096)
def plan_call(call: SparsePrefillCall, arch: Arch, sm_count: int) -> SparsePrefillPlan:
    """Checks a call and works out what it needs on a device with sm_count SMs. ValueError on anything not supported."""
    q, wanted = call.q, call.wanted
    check_queries(q, ("s_q",), ("batch", "s_q"))
    h_q, d_qk = q.shape[-2:]
    s_kv, kv_strides = _check_kv(call)
    topk = _check_tables(call)
    problem = SparsePrefillProblem(
        arch=arch,
        dtype=DTYPE_NAMES[q.dtype],
        d_qk=d_qk,
        batch=call.leading[0] if len(call.leading) == 2 else 1,
        s_q=call.leading[-1],
        h_q=h_q,
        row_alignment=row_alignment(wanted.address_alignment, q, wanted.out),
    )
    if problem.tokens > MAX_TOKENS:
        raise ValueError(f"q has shape {list(q.shape)}, {problem.tokens} query tokens; supported: to {MAX_TOKENS}")
    row_shape = (*call.leading, h_q)
    out_shape = (*row_shape, D_V)
    out_strides = output_strides("out", wanted.out, out_shape, q.dtype, q)
    if wanted.out is not None:
        check_last_contiguous("out", wanted.out)
    return SparsePrefillPlan(
        kernel=problem.config.name,
        grid=problem.grid(sm_count),
        out_shape=out_shape,
        row_shape=row_shape,
        int64s=(
            *_with_batch(q.stride[:-1], 3),
            *_with_batch(out_strides[:-1], 3),
            *_with_batch(output_strides("max_logits", wanted.max_logits, row_shape, torch.float32, q), 3),
            *_with_batch(output_strides("lse", wanted.lse, row_shape, torch.float32, q), 3),
            *_with_batch(call.indices.stride[:-2], 2),
            *kv_strides,
        ),
        int32s=(problem.tokens, problem.s_q, h_q, s_kv, topk),
    )


def _check_kv(call: SparsePrefillCall) -> tuple[int, tuple[int, int]]:
    """Rows of kv, or of a request's, and the bytes between (requests, rows). ValueError if kernels cannot read it."""
    q, kv, offsets = call.q, call.kv, call.kv_offsets
    batched = len(call.leading) == 2
    if offsets is not None:
        if not batched:
            raise ValueError(f"kv_offsets is given with q of shape {list(q.shape)}; supported: with q [batch, s_q, h_q, {q.shape[-1]}]")
        check_counts("kv_offsets", offsets, (call.leading[0] + 1,), q)
    row_shape = ("s_kv", 1, q.shape[-1])
    if batched and offsets is None:
        check_shape("kv", kv, (call.leading[0], *row_shape), " with a batch and no kv_offsets")
    else:
        check_shape("kv", kv, row_shape, " with kv_offsets" if batched else " without a batch")
    check_dtype("kv", kv, q.dtype)
    check_device("kv", kv, q.device)
    check_last_contiguous("kv", kv)
    rows = kv.shape[-3]
    if rows > MOST_SLOTS:
        raise ValueError(f"kv has shape {list(kv.shape)}; supported: s_kv to {MOST_SLOTS}")
    requests = 0 if len(kv.shape) == 3 else _byte_stride(kv, 0)
    return rows, (requests, _byte_stride(kv, len(kv.shape) - 3))


def _byte_stride(kv: TensorSpec, dimension: int) -> int:
    """Bytes between neighbours along a dimension; 0 if there are none. ValueError unless rows stay aligned."""
    stride = kv.stride[dimension] * kv.dtype.itemsize if kv.shape[dimension] > 1 else 0
    if stride % GATHER_ALIGNMENT:
        raise ValueError(
            f"kv has shape {list(kv.shape)} and strides {list(kv.stride)}, {stride} bytes along dimension {dimension}; "
            f"supported: multiples of {GATHER_ALIGNMENT} bytes"
        )
    return stride


def _check_tables(call: SparsePrefillCall) -> int:
    """The indices of a token. ValueError unless indices, lengths and sinks fit the queries."""
    check_indices("indices", call.indices, (*call.leading, 1, "topk"), call.q)
    topk = call.indices.shape[-1]
    if topk > MAX_KEYS:
        raise ValueError(f"indices has shape {list(call.indices.shape)}; supported: topk to {MAX_KEYS}")
    if call.topk_length is not None:
        check_counts("topk_length", call.topk_length, call.leading, call.q)
    check_sink(call.attn_sink, call.q)
    return topk


def _with_batch(strides: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Strides of a tensor of this rank with the batch in front, 0 where there is none."""
    return (0,) * (rank - len(strides)) + tuple(strides)
