"""sparse_decode: attention of new query tokens over the slots of a paged cache that their indices name. decode.run makes the calls."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..spec.arch import Arch
from ..spec.dense_decode import MAX_KEYS, TILINGS
from ..spec.mla import D_V
from ..spec.sparse_decode import DECODED, DECODED_BESIDE, SparseDecodeArguments, SparseDecodeProblem, serving_kernels
from ..spec.sparse_decode import num_parts as parts_of_plan
from ..spec.split_plan import RaggedQueries
from .arguments import check_no_grad
from .decode_plan import CommonSpec, DecodePlan, check_tokens, layout_results, plan_combine, query_strides
from .indices import check_indices, check_queries, check_sink
from .limits import MAX_GRID_TOKENS
from .paged_cache import UNNAMED, GatheredCache, NamedFormat, gathered_cache
from .split_plan import CallSpec as SplitPlanCall
from .split_plan import ScheduleKey, check_offsets, launch_plan
from .strides import check_rows
from .tensor_spec import DTYPE_NAMES, TensorSpec, check_counts, operand_spec, optional_spec

Arguments = SparseDecodeArguments  # the kernel's
WHERE = "with indices"  # the calls of this op, for messages
EXCLUDED_OPTIONS = ()  # of dense_decode
HEAD_DIMS_V = (D_V,)

_NO_CACHE = GatheredCache("", page_size=1, slots=0, page_stride=0, row_stride=0)


class Operands(NamedTuple):
    """The tensors that a call reads."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    extra_k_cache: torch.Tensor | None
    extra_indices_in_kvcache: torch.Tensor | None
    extra_topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None


class Selection(NamedTuple):
    """A cache and the slots of it that are attended to. names: the three arguments. length: None if all indices count."""

    names: tuple[str, str, str]
    k_cache: TensorSpec
    indices: TensorSpec
    length: TensorSpec | None
    kv_format: NamedFormat = UNNAMED


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses."""

    q: TensorSpec
    main: Selection
    extra: Selection | None
    attn_sink: TensorSpec | None
    cu_seqlens_q: TensorSpec | None
    common: CommonSpec


def check(operands: Operands, common: CommonSpec) -> CallSpec:
    """Check each argument by itself. ValueError unless it is supported."""
    check_no_grad(**operands._asdict())
    if common.options.window is not None:
        raise ValueError(f"window is {common.options.window}: not supported {WHERE}; supported: None")
    if common.options.causal:
        raise ValueError(f"causal is True: not supported {WHERE}; supported: False")
    names = ("k_cache", "indices", "topk_length")
    return CallSpec(
        q=operand_spec("q", operands.q),
        main=_selection(
            names, NamedFormat("kv_format", common.options.kv_format), operands.k_cache, operands.indices, operands.topk_length
        ),
        extra=_extra_selection(operands, NamedFormat("extra_kv_format", common.options.extra_kv_format)),
        attn_sink=optional_spec("attn_sink", operands.attn_sink),
        cu_seqlens_q=optional_spec("cu_seqlens_q", operands.cu_seqlens_q),
        common=common,
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> DecodePlan:
    """Return the launches of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    offsets = call.cu_seqlens_q
    check_tokens(call.q, offsets, call.common.options.max_seqlen_q, WHERE)
    check_queries(call.q, ("batch", "s_q") if offsets is None else ("total_q",))
    *tokens, h_q, d_qk = call.q.shape
    batch, s_q = tokens if offsets is None else (tokens[0], 1)  # with cu_seqlens_q every query token is a request of its own
    ragged = None
    if offsets is not None:
        ragged = RaggedQueries(check_offsets(offsets, call.q.device), batch, call.common.options.max_seqlen_q or 1)
    if s_q > MAX_GRID_TOKENS:
        raise ValueError(f"q has shape {list(call.q.shape)}; supported {WHERE}: s_q to {MAX_GRID_TOKENS}")
    cache, topk, index_strides = _check_selection(call, call.main)
    second = None if call.extra is None else _check_selection(call, call.extra, cache.cache_format)
    extra, extra_topk, extra_strides = second or (_NO_CACHE, 0, ())
    check_sink(call.attn_sink, call.q)
    check_rows(TILINGS[arch.name].row_bytes, call.common.address_alignment, {"q": call.q}, {"out": call.common.out})
    if topk + extra_topk > MAX_KEYS:
        raise ValueError(f"indices and extra_indices_in_kvcache name {topk + extra_topk} slots a token; supported: to {MAX_KEYS}")
    num_parts = parts_of_plan(arch, h_q, s_q, sm_count) if s_q else 1
    problem = SparseDecodeProblem(
        arch=arch,
        dtype=DTYPE_NAMES[call.q.dtype],
        cache=_kernels(cache, extra),
        batch=batch,
        s_q=s_q,
        h_q=h_q,
        topk=topk,
        extra_topk=extra_topk,
        batch_invariant=call.common.options.batch_invariant,
        few_heads=call.common.options.few_heads,
        counted_parts=num_parts if _all_count(call) else 0,
    )
    results = layout_results(problem, call.common, num_parts, call.q, call.q.dtype, ragged)
    split = SplitPlanCall(batch, h_q, s_q, topk, extra_topk, ragged, sparse=True)
    planned_for = (batch, s_q) if ragged is None else (ragged.requests, ragged.max_seqlen_q)
    total_q = None if ragged is None else ragged.total_q
    return DecodePlan(
        kernel=problem.config.name,
        grid=(problem.grid(sm_count)[0], s_q, num_parts),
        scalars={
            **query_strides("q", "batch token head", call.q.stride[:-1], ragged),
            **results.strides,
            **query_strides("indices", "batch token", index_strides, ragged),
            **query_strides("extra_indices", "batch token", extra_strides, ragged),
            "page_stride": cache.page_stride,
            "row_stride": cache.row_stride,
            "extra_page_stride": extra.page_stride,
            "extra_row_stride": extra.row_stride,
            "batch": batch,
            "s_q": s_q,
            "h_q": h_q,
            "page_size": cache.page_size,
            "slots": cache.slots,
            "topk": topk,
            "extra_page_size": extra.page_size,
            "extra_slots": extra.slots,
            "extra_topk": extra_topk,
            "max_splits": problem.max_splits,
            "accum_rows": results.accum_rows,
        },
        op="sparse_decode",
        maps={},  # the kernels gather rows by their addresses
        pointers={
            "cache": "k_cache",
            "extra_cache": "extra_k_cache",
            "extra_indices": "extra_indices_in_kvcache",
            **{name: name for name in ("q", "indices", "topk_length", "extra_topk_length", "attn_sink")},
        },
        lengths=("topk_length", "extra_topk_length"),
        key_limits=(topk, extra_topk),
        schedule_key=ScheduleKey(*planned_for, h_q, 1, cache.page_size, num_parts, call.q.device, topk, extra_topk, total_q),
        results=results,
        combine=plan_combine(problem, results, (topk, extra_topk), sm_count, split),
        default_scale=d_qk**-0.5,
        has_keys=True,  # a cache without pages is one whose indices are all invalid
        split=launch_plan(split, num_parts),
        ragged=ragged,
    )


def _all_count(call: CallSpec) -> bool:
    """Return whether every request has all its indices, as the host knows without reading anything."""
    return call.cu_seqlens_q is None and call.main.length is None and (call.extra is None or call.extra.length is None)


def _selection(names: tuple[str, str, str], kv_format: NamedFormat, k_cache: Any, indices: Any, length: Any) -> Selection:
    specs = operand_spec(names[0], k_cache), operand_spec(names[1], indices), optional_spec(names[2], length)
    return Selection(names, *specs, kv_format)


def _extra_selection(operands: Operands, kv_format: NamedFormat) -> Selection | None:
    """Return the selection of the second cache, or None without one. ValueError if only a part of its arguments is given."""
    names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    given = (operands.extra_k_cache, operands.extra_indices_in_kvcache, operands.extra_topk_length)
    if all(argument is None for argument in (*given, kv_format.value)):
        return None
    for name, tensor in zip(names[:2], given[:2], strict=True):
        if tensor is None:
            raise ValueError(f"{name} is None beside other arguments of a second cache; supported: a tensor, or None for all of them")
    return _selection(names, kv_format, *given)


def _check_selection(call: CallSpec, selection: Selection, first: str | None = None) -> tuple[GatheredCache, int, tuple[int, ...]]:
    """Return the layout of the cache, the indices of a token, and the strides of the indices between requests and tokens.

    first: format of the first cache, if this is the second one. ValueError unless the selection fits the queries and the first cache.
    """
    (cache_name, indices_name, length_name), k_cache, indices, length, kv_format = selection
    cache = gathered_cache(cache_name, k_cache, call.q, call.common.options.is_fp8_kvcache, kv_format, first)
    tokens = call.q.shape[:-2]
    check_indices(indices_name, indices, (*tokens, "topk"), call.q)
    if length is not None:
        check_counts(length_name, length, (tokens[0],), call.q.device)
    return cache, indices.shape[-1], indices.stride[:-1]


def _kernels(cache: GatheredCache, extra: GatheredCache) -> str:
    """Return the name of the kernels for both caches, whose formats fit together."""
    beside = DECODED_BESIDE[extra.cache_format] if extra.cache_format else None
    return serving_kernels(DECODED[cache.cache_format], beside) or ""
