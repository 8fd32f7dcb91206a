"""Dense decode as a sequence of launches: what a call of given shapes needs (planned once, kept), and the call itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .cache import DenseCache, dense_cache, dense_tensor_map
from .decode_op import DecodePlan, Wanted, accumulator_bytes, check_results, plan_combine
from .runtime.device import Device
from .schedule import KeyCounts, ScheduleKey
from .spec.arch import Arch
from .spec.dense_decode import FP8, FP8_CACHE, LATENT, DenseDecodeProblem
from .spec.mla import D_QK
from .spec.split_plan import NO_LIMIT
from .spec.tensor_map import TensorMap
from .support import MAX_QUERY_TOKENS, heads_problem
from .tensors import (
    DTYPE_NAMES,
    TensorSpec,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    optional_spec,
    row_alignment,
    spec_of,
)


class DenseDecodeCall(NamedTuple):
    """Everything about a call but values and addresses."""

    q: TensorSpec
    k_cache: TensorSpec
    block_table: TensorSpec
    cache_seqlens: TensorSpec
    descale_q: TensorSpec | None
    descale_k: TensorSpec | None
    wanted: Wanted


@dataclass(frozen=True)
class DenseDecodePlan(DecodePlan):
    """What a call needs. box_keys: keys of a box of the cache's tensor map. reads_cache: whether the kernel reads the cache by its
    address, too."""

    cache: DenseCache
    box_keys: int
    reads_cache: bool


class DenseOperands(NamedTuple):
    """The operands of a call, not yet checked."""

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    descale_q: torch.Tensor | None
    descale_k: torch.Tensor | None

    def plan(self, wanted: Wanted, device: Device) -> DenseDecodePlan:
        """What the call needs on a device. ValueError on anything not supported."""
        call = DenseDecodeCall(
            q=spec_of("q", self.q),
            k_cache=spec_of("k_cache", self.k_cache),
            block_table=spec_of("block_table", self.block_table),
            cache_seqlens=spec_of("cache_seqlens", self.cache_seqlens),
            descale_q=optional_spec("descale_q", self.descale_q),
            descale_k=optional_spec("descale_k", self.descale_k),
            wanted=wanted,
        )
        return plan_call(call, device.arch, device.sm_count)

    def counts(self, plan: DecodePlan) -> KeyCounts:
        """The keys of each request, for the plan."""
        return KeyCounts(self.cache_seqlens, None, *plan.key_limits)

    def maps(self, plan: DecodePlan) -> tuple[tuple[str, TensorMap], ...]:
        """The tensor maps of the decode kernel, at address 0, and the operands that they are of."""
        assert isinstance(plan, DenseDecodePlan)
        return (("k_cache", dense_tensor_map(plan.cache, 0, plan.box_keys)),)

    def pointers(self, plan: DecodePlan) -> tuple[str | None, ...]:
        """The operands that the decode kernel has pointers to, in the order of its parameters."""
        assert isinstance(plan, DenseDecodePlan)
        return "q", "k_cache" if plan.reads_cache else None, "descale_q", "descale_k", "block_table", "cache_seqlens"


@lru_cache(maxsize=4096)
def plan_call(call: DenseDecodeCall, arch: Arch, sm_count: int) -> DenseDecodePlan:
    """Checks a call and works out what it needs on a device with sm_count SMs. ValueError on anything not supported."""
    problem, cache = _check_inputs(call, arch)
    num_parts = problem.num_parts(sm_count) if problem.rows else 1
    results = check_results(problem, call.wanted, num_parts, call.q, out_dtype(call))
    out_bytes, lse_bytes = accumulator_bytes(results.accum_rows, problem.s_q, problem.h_q)
    combine_kernel, combine_grid = plan_combine(problem, results, sm_count)
    return DenseDecodePlan(
        op="dense_decode",
        kernel=problem.config.name,
        grid=(problem.row_ctas, problem.h_kv, num_parts),
        schedule_key=ScheduleKey(problem.batch, problem.s_q, problem.h_q, problem.h_kv, problem.page_size, num_parts, call.q.device),
        results=results,
        out_accum_bytes=out_bytes,
        lse_accum_bytes=lse_bytes,
        combine_kernel=combine_kernel,
        combine_grid=combine_grid,
        combine_int32s=(problem.batch, problem.s_q, problem.h_q, problem.max_keys, 0, problem.max_splits, results.accum_rows),
        key_limits=(NO_LIMIT, 0),  # block tables of any width share a plan
        default_scale=D_QK**-0.5,
        int64s=(*call.q.stride[:3], *results.strides, call.block_table.stride[0], *cache.strides[:0:-1]),
        int32s=(
            problem.s_q,
            problem.h_q,
            problem.h_q // problem.h_kv,
            problem.page_size,
            min(cache.pages, NO_LIMIT),
            int(call.wanted.causal and problem.s_q > 1),
            problem.batch,
            problem.max_keys,
            problem.max_splits,
            results.accum_rows,
        ),
        cache=cache,
        box_keys=problem.box_keys,
        reads_cache=problem.operands == FP8_CACHE,
    )


def _check_inputs(call: DenseDecodeCall, arch: Arch) -> tuple[DenseDecodeProblem, DenseCache]:
    q = call.q
    check_shape("q", q, ("batch", "s_q", "h_q", D_QK))
    check_dtype("q", q, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    check_last_contiguous("q", q)
    batch, s_q, h_q, _ = q.shape
    cache = dense_cache(call.k_cache, q.dtype)
    operands = _operands(call)
    dtype = out_dtype(call)
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
            dtype=DTYPE_NAMES[dtype],
            batch=batch,
            s_q=s_q,
            h_q=h_q,
            h_kv=cache.h_kv,
            page_size=cache.page_size,
            pages_per_request=call.block_table.shape[1],
            batch_invariant=call.wanted.batch_invariant,
            row_alignment=row_alignment(call.wanted.address_alignment, q, call.wanted.out),
            operands=operands,
        ),
        cache,
    )


def out_dtype(call: DenseDecodeCall) -> torch.dtype:
    """The type of out: that of q if it has 16 bits, else what the caller's tensor has, or bf16."""
    if call.q.dtype != torch.float8_e4m3fn:
        return call.q.dtype
    given = call.wanted.out
    if given is None:
        return torch.bfloat16
    check_dtype("out", given, torch.bfloat16, torch.float16)
    return given.dtype


def _operands(call: DenseDecodeCall) -> str:
    """What kernels multiply. ValueError for a scale without anything to scale."""
    for name, scale, scaled in (("descale_q", call.descale_q, call.q), ("descale_k", call.descale_k, call.k_cache)):
        if scale is None:
            continue
        if scaled.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} is given with {scaled.dtype}; supported: with {torch.float8_e4m3fn}")
        if math.prod(scale.shape) != 1:
            raise ValueError(f"{name} has shape {list(scale.shape)}; supported: one element")
        check_dtype(name, scale, torch.float32)
        check_device(name, scale, call.q.device)
    if call.k_cache.dtype != torch.float8_e4m3fn:
        return LATENT
    return FP8 if call.q.dtype == torch.float8_e4m3fn else FP8_CACHE
