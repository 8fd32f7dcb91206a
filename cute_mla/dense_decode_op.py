"""Dense decode as a sequence of launches: what a call of given shapes needs (planned once, kept), and the call itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .cache import DenseCache, dense_cache, dense_tensor_map
from .runtime.arguments import NULL, Argument, Span
from .runtime.device import Device
from .schedule import PlanSpecs, ScheduleKey, check_plan
from .spec.arch import Arch
from .spec.combine import CombineConfig
from .spec.combine import grid as combine_grid
from .spec.dense_decode import MAX_ROW_ALIGNMENT, DenseDecodeProblem
from .spec.mla import D_QK, D_V
from .spec.split_plan import accumulator_rows
from .support import MAX_QUERY_TOKENS, heads_problem
from .tensors import (
    DTYPE_NAMES,
    TensorSpec,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    check_writable,
)

_FLOAT_BYTES = 4


class DenseDecodeCall(NamedTuple):
    """Everything about a call but values and addresses. given_plan: None if a schedule object plans.

    address_alignment: what row_alignment says, of the addresses of q and out (the caller's, if given) alone.
    """

    q: TensorSpec
    k_cache: TensorSpec
    block_table: TensorSpec
    cache_seqlens: TensorSpec
    given_plan: PlanSpecs | None
    out: TensorSpec | None
    lse: TensorSpec | None
    causal: bool
    batch_invariant: bool
    address_alignment: int


@dataclass(frozen=True)
class DenseDecodePlan:
    """What a call needs.

    kernel, grid: variant of dense_decode, and its CTAs along (query rows, KV head, part). box_keys: keys of a box of its tensor map.
    combine_kernel, combine_grid: the same of combine; no grid if no request can be split.
    int64s, int32s, combine_int64s, combine_int32s: scalar arguments in the order of the kernels' parameters.
    """

    cache: DenseCache
    box_keys: int
    schedule_key: ScheduleKey
    kernel: str
    grid: tuple[int, int, int]
    combine_kernel: str
    combine_grid: tuple[int, int, int] | None
    out_shape: tuple[int, int, int, int]
    lse_shape: tuple[int, int, int]
    out_accum_bytes: int
    lse_accum_bytes: int
    int64s: tuple[int, ...]
    int32s: tuple[int, ...]
    combine_int64s: tuple[int, ...]
    combine_int32s: tuple[int, ...]

    @property
    def workspace_bytes(self) -> int:
        """out_accum followed by lse_accum."""
        return self.out_accum_bytes + self.lse_accum_bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is no output to compute."""
        return 0 in self.out_shape


class DenseDecodeTensors(NamedTuple):
    """The tensors of a call. metadata, num_splits: the plan. workspace: None if the call needs none."""

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    metadata: torch.Tensor
    num_splits: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    workspace: torch.Tensor | None


def accumulator_bytes(accum_rows: int, s_q: int, h_q: int) -> tuple[int, int]:
    """Bytes of out_accum and lse_accum."""
    lse_bytes = accum_rows * s_q * h_q * _FLOAT_BYTES
    return lse_bytes * D_V, lse_bytes


@lru_cache(maxsize=4096)
def plan_call(call: DenseDecodeCall, arch: Arch, sm_count: int) -> DenseDecodePlan:
    """Checks a call and works out what it needs on a device with sm_count SMs. ValueError on anything not supported."""
    problem, cache = _check_inputs(call, arch)
    out_shape = (problem.batch, problem.s_q, problem.h_q, D_V)
    lse_shape = (problem.batch, problem.h_q, problem.s_q)
    _check_outputs(call, out_shape, lse_shape)
    num_parts = problem.num_parts(sm_count) if problem.rows else 1
    if call.given_plan is not None:
        check_plan(call.given_plan, problem.batch, num_parts, call.q.device)
    accum_rows = accumulator_rows(problem.batch, num_parts, problem.max_splits)
    out_bytes, lse_bytes = accumulator_bytes(accum_rows, problem.s_q, problem.h_q)
    out_strides = call.out.stride[:3] if call.out is not None else _contiguous_strides(out_shape)[:3]
    lse_strides = call.lse.stride if call.lse is not None else _contiguous_strides(lse_shape)
    return DenseDecodePlan(
        cache=cache,
        box_keys=problem.box_keys,
        schedule_key=ScheduleKey(problem.batch, problem.s_q, problem.h_q, problem.h_kv, problem.page_size, num_parts, call.q.device),
        kernel=problem.config.name,
        grid=(problem.row_ctas, problem.h_kv, num_parts),
        combine_kernel=CombineConfig(problem.dtype).name,
        combine_grid=combine_grid(problem.batch, problem.s_q, problem.h_q, sm_count) if lse_bytes else None,
        out_shape=out_shape,
        lse_shape=lse_shape,
        out_accum_bytes=out_bytes,
        lse_accum_bytes=lse_bytes,
        int64s=(*call.q.stride[:3], *out_strides, *lse_strides, call.block_table.stride[0]),
        int32s=(
            problem.s_q,
            problem.h_q,
            problem.h_q // problem.h_kv,
            problem.page_size,
            int(call.causal and problem.s_q > 1),
            problem.batch,
            problem.max_keys,
            problem.max_splits,
            accum_rows,
        ),
        combine_int64s=(*out_strides, *lse_strides),
        combine_int32s=(problem.s_q, problem.h_q, problem.max_splits, accum_rows),
    )


def launch(device: Device, plan: DenseDecodePlan, tensors: DenseDecodeTensors, softmax_scale: float, empty_lse: float) -> None:
    """Launches dense_decode, and combine where requests may be split. Allocates nothing."""
    out_accum, lse_accum = _accumulators(plan, tensors.workspace)
    args: tuple[Argument, ...] = (
        dense_tensor_map(plan.cache, tensors.k_cache.data_ptr(), plan.box_keys),
        tensors.q,
        tensors.block_table,
        tensors.cache_seqlens,
        tensors.metadata,
        tensors.num_splits,
        tensors.out,
        tensors.lse,
        out_accum,
        lse_accum,
        *plan.int64s,
        softmax_scale * math.log2(math.e),
        empty_lse,
        *plan.int32s,
    )
    device.launch(device.kernel("dense_decode", plan.kernel), plan.grid, args, pdl=True)
    if plan.combine_grid is None:
        return
    args = (
        tensors.cache_seqlens,
        tensors.num_splits,
        out_accum,
        lse_accum,
        tensors.out,
        tensors.lse,
        *plan.combine_int64s,
        empty_lse,
        *plan.combine_int32s,
    )
    device.launch(device.kernel("combine", plan.combine_kernel), plan.combine_grid, args, pdl=True)


def _accumulators(plan: DenseDecodePlan, workspace: torch.Tensor | None) -> tuple[Span, Span]:
    if workspace is None:
        return NULL, NULL
    return Span(workspace, 0, plan.out_accum_bytes), Span(workspace, plan.out_accum_bytes, plan.lse_accum_bytes)


def _check_inputs(call: DenseDecodeCall, arch: Arch) -> tuple[DenseDecodeProblem, DenseCache]:
    q = call.q
    check_shape("q", q, ("batch", "s_q", "h_q", D_QK))
    check_dtype("q", q, torch.bfloat16, torch.float16)
    check_last_contiguous("q", q)
    batch, s_q, h_q, _ = q.shape
    cache = dense_cache(call.k_cache, q.dtype)
    if s_q > MAX_QUERY_TOKENS:
        raise ValueError(f"q has shape {list(q.shape)}; supported: s_q to {MAX_QUERY_TOKENS}")
    problem = heads_problem(h_q, cache.h_kv)
    if problem is not None:
        raise ValueError(f"q has shape {list(q.shape)}, k_cache {list(call.k_cache.shape)}: {problem}")
    check_shape("block_table", call.block_table, (batch, "pages per request"))
    check_last_contiguous("block_table", call.block_table)
    check_shape("cache_seqlens", call.cache_seqlens, (batch,))
    check_contiguous("cache_seqlens", call.cache_seqlens)
    for name, table in (("block_table", call.block_table), ("cache_seqlens", call.cache_seqlens)):
        check_dtype(name, table, torch.int32)
        check_device(name, table, q.device)
    check_device("k_cache", call.k_cache, q.device)
    return (
        DenseDecodeProblem(
            arch=arch,
            dtype=DTYPE_NAMES[q.dtype],
            batch=batch,
            s_q=s_q,
            h_q=h_q,
            h_kv=cache.h_kv,
            page_size=cache.page_size,
            pages_per_request=call.block_table.shape[1],
            batch_invariant=call.batch_invariant,
            row_alignment=alignment(call.address_alignment, *_row_strides(q), *(() if call.out is None else _row_strides(call.out))),
        ),
        cache,
    )


def alignment(*distances: int) -> int:
    """The greatest power of two, at most MAX_ROW_ALIGNMENT, that divides all of these numbers of bytes."""
    bits = MAX_ROW_ALIGNMENT
    for distance in distances:
        bits |= distance
    return bits & -bits


def _row_strides(spec: TensorSpec) -> list[int]:
    """Bytes between neighbouring rows, along each dimension that has more than one."""
    pairs = zip(spec.shape[:-1], spec.stride[:-1], strict=True)
    return [stride * spec.dtype.itemsize for size, stride in pairs if size > 1]


def _check_outputs(call: DenseDecodeCall, out_shape: tuple[int, ...], lse_shape: tuple[int, ...]) -> None:
    for name, spec, shape, dtype in (("out", call.out, out_shape, call.q.dtype), ("lse", call.lse, lse_shape, torch.float32)):
        if spec is not None:
            check_shape(name, spec, shape)
            check_dtype(name, spec, dtype)
            check_device(name, spec, call.q.device)
            check_writable(name, spec)
    if call.out is not None:
        check_last_contiguous("out", call.out)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
