"""Sparse decode as a sequence of launches: what a call of given shapes needs (planned once, kept), and the call itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .cache.gathered import GatheredCache, gathered_cache
from .decode_op import DecodePlan, Wanted, accumulator_bytes, check_results, plan_combine
from .runtime.device import Device
from .schedule import KeyCounts, ScheduleKey
from .sparse_op import check_indices, check_queries, check_sink
from .spec.arch import Arch
from .spec.dense_decode import MAX_KEYS
from .spec.sparse_decode import SparseDecodeProblem
from .spec.tensor_map import TensorMap
from .support import MAX_GRID_TOKENS
from .tensors import DTYPE_NAMES, TensorSpec, check_counts, optional_spec, row_alignment, spec_of

_NO_CACHE = GatheredCache("", page_size=1, slots=0, page_stride=0, row_stride=0)


class Selection(NamedTuple):
    """A cache and what of it is attended to. names: the three arguments. length: None if all indices count."""

    names: tuple[str, str, str]
    k_cache: TensorSpec
    indices: TensorSpec
    length: TensorSpec | None


class SparseDecodeCall(NamedTuple):
    """Everything about a call but values and addresses."""

    q: TensorSpec
    main: Selection
    extra: Selection | None
    attn_sink: TensorSpec | None
    wanted: Wanted


class SparseOperands(NamedTuple):
    """The operands of a call, not yet checked."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    extra_k_cache: torch.Tensor | None
    extra_indices_in_kvcache: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None

    def plan(self, wanted: Wanted, device: Device) -> DecodePlan:
        """What the call needs on a device. ValueError on anything not supported."""
        call = SparseDecodeCall(
            q=spec_of("q", self.q),
            main=_selection(("k_cache", "indices", "topk_length"), self.k_cache, self.indices, self.topk_length),
            extra=self._extra(),
            attn_sink=optional_spec("attn_sink", self.attn_sink),
            wanted=wanted,
        )
        return plan_call(call, device.arch, device.sm_count)

    def _extra(self) -> Selection | None:
        """The second cache, if there is one. ValueError if only a part of it is given."""
        names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
        given = (self.extra_k_cache, self.extra_indices_in_kvcache, self.extra_topk_length)
        if all(tensor is None for tensor in given):
            return None
        for name, tensor in zip(names[:2], given[:2], strict=True):
            if tensor is None:
                raise ValueError(f"{name} is None beside other arguments of a second cache; supported: a tensor, or None for all of them")
        return _selection(names, *given)

    def counts(self, plan: DecodePlan) -> KeyCounts:
        """The keys of each request: its indices that count."""
        return KeyCounts(self.topk_length, self.extra_topk_length, *plan.key_limits)

    def maps(self, plan: DecodePlan) -> tuple[tuple[str, TensorMap], ...]:
        """There is none: the kernels gather rows by their addresses."""
        return ()

    def pointers(self, plan: DecodePlan) -> tuple[str | None, ...]:
        """The operands that the decode kernel has pointers to, in the order of its parameters."""
        return self._fields


def _selection(names: tuple[str, str, str], k_cache: Any, indices: Any, length: Any) -> Selection:
    return Selection(names, spec_of(names[0], k_cache), spec_of(names[1], indices), optional_spec(names[2], length))


@lru_cache(maxsize=4096)
def plan_call(call: SparseDecodeCall, arch: Arch, sm_count: int) -> DecodePlan:
    """Checks a call and works out what it needs on a device with sm_count SMs. ValueError on anything not supported."""
    _check_queries(call.q)
    cache, topk, index_strides = _check_selection(call, call.main)
    extra, extra_topk, extra_strides = (_NO_CACHE, 0, (0, 0)) if call.extra is None else _check_selection(call, call.extra)
    check_sink(call.attn_sink, call.q)
    batch, s_q, h_q, d_qk = call.q.shape
    if topk + extra_topk > MAX_KEYS:
        raise ValueError(f"indices and extra_indices_in_kvcache name {topk + extra_topk} slots a token; supported: to {MAX_KEYS}")
    problem = SparseDecodeProblem(
        arch=arch,
        dtype=DTYPE_NAMES[call.q.dtype],
        cache=cache.cache_format,
        batch=batch,
        s_q=s_q,
        h_q=h_q,
        topk=topk,
        extra_topk=extra_topk,
        batch_invariant=call.wanted.batch_invariant,
        row_alignment=row_alignment(call.wanted.address_alignment, call.q, call.wanted.out),
    )
    num_parts = problem.num_parts(sm_count) if s_q else 1
    results = check_results(problem, call.wanted, num_parts, call.q, call.q.dtype)
    out_bytes, lse_bytes = accumulator_bytes(results.accum_rows, s_q, h_q)
    combine_kernel, combine_grid = plan_combine(problem, results, sm_count)
    return DecodePlan(
        op="sparse_decode",
        kernel=problem.config.name,
        grid=(problem.row_ctas, s_q, num_parts),
        schedule_key=ScheduleKey(batch, s_q, h_q, 1, cache.page_size, num_parts, call.q.device, topk, extra_topk),
        results=results,
        out_accum_bytes=out_bytes,
        lse_accum_bytes=lse_bytes,
        combine_kernel=combine_kernel,
        combine_grid=combine_grid,
        combine_int32s=(batch, s_q, h_q, topk, extra_topk, problem.max_splits, results.accum_rows),
        int64s=(
            *call.q.stride[:3],
            *results.strides,
            *index_strides,
            *extra_strides,
            *(cache.page_stride, cache.row_stride),
            *(extra.page_stride, extra.row_stride),
        ),
        int32s=(
            *(batch, s_q, h_q),
            *(cache.page_size, cache.slots, topk),
            *(extra.page_size, extra.slots, extra_topk),
            *(problem.max_splits, results.accum_rows),
        ),
        key_limits=(topk, extra_topk),
        default_scale=d_qk**-0.5,
    )


def _check_queries(q: TensorSpec) -> None:
    check_queries(q, ("batch", "s_q"))
    if q.shape[1] > MAX_GRID_TOKENS:
        raise ValueError(f"q has shape {list(q.shape)}; supported with indices: s_q to {MAX_GRID_TOKENS}")


def _check_selection(call: SparseDecodeCall, selection: Selection) -> tuple[GatheredCache, int, tuple[int, int]]:
    """(layout of the cache, indices of a token, strides of the indices between requests and tokens)."""
    (cache_name, indices_name, length_name), k_cache, indices, length = selection
    cache = gathered_cache(cache_name, k_cache, call.q, call.wanted.is_fp8_kvcache)
    batch, s_q = call.q.shape[:2]
    check_indices(indices_name, indices, (batch, s_q, "topk"), call.q)
    if length is not None:
        check_counts(length_name, length, (batch,), call.q)
    return cache, indices.shape[2], (indices.stride[0], indices.stride[1])
