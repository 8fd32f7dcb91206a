"""dense_decode: attention of new query tokens over a paged latent cache. decode.run makes the calls."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ..spec.arch import Arch
from ..spec.cache_rows import FP8_576, LATENTS
from ..spec.dense_decode import (
    ALL_KEYS,
    CAUSAL,
    FP8,
    FP8_CACHE,
    LATENT,
    TILINGS,
    TREE,
    TREE_WORD_TOKENS,
    DenseDecodeArguments,
    DenseDecodeProblem,
    key_columns,
    num_parts,
    reads_by_address,
    takes_key_masks,
    whole_eighths,
)
from ..spec.mla import DENSE_DIMS, DENSE_VALUE_COLUMNS, ceil_div, key_dtypes
from ..spec.split_plan import NO_LIMIT, TILE_KEYS, KeyWindow, RaggedQueries
from ..spec.tensor_map import TensorMap
from .arguments import check_columns, check_no_grad, short_repr
from .decode_plan import CommonSpec, DecodePlan, check_tokens, layout_results, plan_combine, query_strides
from .indices import check_sink
from .limits import MAX_QUERY_TOKENS, heads_error
from .paged_cache import DenseCache, dense_cache, dense_tensor_map
from .split_plan import CallSpec as SplitPlanCall
from .split_plan import ScheduleKey, key_window, launch_plan, ragged_queries
from .strides import check_rows
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    check_contiguous,
    check_counts,
    check_device,
    check_dtype,
    check_dtype_of_columns,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)

Arguments = DenseDecodeArguments  # the kernel's
WHERE = "without indices"  # the calls of this op, for messages
HEAD_DIMS_V = DENSE_VALUE_COLUMNS
EXCLUDED_OPTIONS = ("extra_kv_format",)  # of sparse_decode


class Operands(NamedTuple):
    """The tensors that a call reads."""

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    descale_q: torch.Tensor | None
    descale_k: torch.Tensor | None
    attn_sink: torch.Tensor | None
    tree_mask: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses."""

    q: TensorSpec
    k_cache: TensorSpec
    block_table: TensorSpec
    cache_seqlens: TensorSpec
    descale_q: TensorSpec | None
    descale_k: TensorSpec | None
    attn_sink: TensorSpec | None
    tree_mask: TensorSpec | None
    cu_seqlens_q: TensorSpec | None
    common: CommonSpec


def check(operands: Operands, common: CommonSpec) -> CallSpec:
    """Check each argument by itself. ValueError unless it is supported."""
    check_no_grad(**operands._asdict())
    k_cache = operand_spec("k_cache", operands.k_cache)
    if common.options.is_fp8_kvcache and k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError(f"is_fp8_kvcache is True with a k_cache of {k_cache.dtype}; supported {WHERE}: {torch.float8_e4m3fn}")
    own = FP8_576 if k_cache.dtype == torch.float8_e4m3fn else LATENTS.get(k_cache.shape[-1] if k_cache.shape else 0)
    if common.options.kv_format not in (None, own and own.name):
        raise ValueError(
            f"kv_format is {short_repr(common.options.kv_format)} with a k_cache of {k_cache.dtype} and shape {list(k_cache.shape)}; "
            f"supported {WHERE}: None" + (f" and {own.name!r}" if own else "")
        )
    return CallSpec(
        q=operand_spec("q", operands.q),
        k_cache=k_cache,
        block_table=operand_spec("block_table", operands.block_table),
        cache_seqlens=operand_spec("cache_seqlens", operands.cache_seqlens),
        descale_q=optional_spec("descale_q", operands.descale_q),
        descale_k=optional_spec("descale_k", operands.descale_k),
        attn_sink=optional_spec("attn_sink", operands.attn_sink),
        tree_mask=optional_spec("tree_mask", operands.tree_mask),
        cu_seqlens_q=optional_spec("cu_seqlens_q", operands.cu_seqlens_q),
        common=common,
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> DecodePlan:
    """Return the launches of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    problem, cache, ragged = _check_inputs(call, arch)
    window = _window(call, problem)
    for name, given in (("tree_mask", call.tree_mask), ("window", call.common.options.window)):
        if given is not None and not takes_key_masks(problem.operands):
            raise ValueError(f"{name} is given with a k_cache of {call.k_cache.dtype}: not supported; supported: with a 16-bit k_cache")
    problem, parts = _with_parts(problem, call.common, sm_count, 0 if ragged is None else ragged.table_rows)
    results = layout_results(problem, call.common, parts, call.q, _out_dtype(call), ragged)
    requests, total_q = (problem.batch, None) if ragged is None else (ragged.requests, ragged.total_q)
    s_q = problem.s_q if ragged is None else ragged.max_seqlen_q
    mask = _mask(call, s_q)
    hidden_keys = {ALL_KEYS: 0, CAUSAL: problem.s_q - 1, TREE: s_q}[mask]
    split = SplitPlanCall(problem.batch, problem.rows, problem.h_kv, NO_LIMIT, 0, ragged, window)
    return DecodePlan(
        kernel=problem.config.name,
        grid=(problem.row_ctas, problem.h_kv, parts),
        scalars={
            **query_strides("q", "batch token head", call.q.stride[:-1], ragged),
            **results.strides,
            "table_stride": call.block_table.stride[0],
            "page_stride": cache.strides[2],
            "row_stride": cache.strides[1],
            "s_q": problem.s_q,
            "h_q": problem.h_q,
            "heads_per_kv": problem.h_q // problem.h_kv,
            "page_size": problem.page_size,
            "pages": min(cache.pages, NO_LIMIT),
            "mask": mask,
            "batch": problem.batch,
            "max_keys": problem.max_keys,
            "max_splits": problem.max_splits,
            "accum_rows": results.accum_rows,
            "requests": requests,
            "total_q": s_q if total_q is None else total_q,
            **_mask_scalars(window, call.common.options.window, hidden_keys),
            **query_strides("tree", "batch token", () if call.tree_mask is None else call.tree_mask.stride[:-1], ragged),
        },
        op="dense_decode",
        maps=_maps(cache, problem.box_keys) if cache.pages else {},
        pointers={
            "cache": "k_cache" if reads_by_address(arch, problem.operands) else None,
            **{name: name for name in ("q", "descale_q", "descale_k", "block_table", "cache_seqlens", "attn_sink", "tree_mask")},
        },
        lengths=("cache_seqlens", None),
        key_limits=(NO_LIMIT, 0),  # block tables of any width share a plan
        schedule_key=ScheduleKey(
            *(requests, s_q, problem.h_q, problem.h_kv, problem.page_size, parts, call.q.device),
            total_q=total_q,
            window=call.common.options.window,
            window_sink=call.common.options.window_sink,
        ),
        results=results,
        combine=plan_combine(problem, results, (problem.max_keys, 0), sm_count, split, int(mask == CAUSAL)),
        default_scale=problem.d_qk**-0.5,
        has_keys=cache.pages > 0,
        split=launch_plan(split, parts, whole_eighths(arch, problem.few_rows)),
        ragged=ragged,
    )


def _with_parts(problem: DenseDecodeProblem, common: CommonSpec, sm_count: int, table_rows: int) -> tuple[DenseDecodeProblem, int]:
    """Return the problem and the parts of its plan, as a plan that was made for calls of another kernel has them.

    Kernels for few heads on SM100 want twice the parts of others. With a plan for others, one of them serves the call; they take either.
    """
    if not problem.rows:
        return problem, 1
    wide = replace(problem, few_heads=False)
    parts, wide_parts = problem.num_parts(sm_count), wide.num_parts(sm_count)
    few_parts = num_parts(problem.arch, problem.rows, problem.h_kv, sm_count, FP8)
    planned = common.planned_parts if common.split_plan is None else common.split_plan.rows - table_rows
    if planned == parts or planned not in (wide_parts, few_parts):
        return problem, parts
    return (wide if planned == wide_parts else problem), planned


def _maps(cache: DenseCache, box_keys: int) -> dict[str, tuple[str, TensorMap]]:
    """Return the tensor maps of a cache, by argument."""
    return {name: ("k_cache", dense_tensor_map(cache, 0, box_keys, row_bytes)) for name, row_bytes in (("kv_map", 128), ("rope_map", 64))}


def _check_inputs(call: CallSpec, arch: Arch) -> tuple[DenseDecodeProblem, DenseCache, RaggedQueries | None]:
    """Return the problem, the layout of the cache, and packed query tokens. ValueError unless the operands fit together."""
    q, offsets = call.q, call.cu_seqlens_q
    check_tokens(q, offsets, call.common.options.max_seqlen_q, WHERE)
    if len(q.shape) != (4 if offsets is None else 3) or q.shape[-1] not in key_columns(arch):
        columns = " or ".join(map(str, key_columns(arch)))
        raise ValueError(f"q has shape {list(q.shape)}; supported {WHERE} on {arch.name}: [batch, s_q, h_q, {columns}]")
    check_dtype("q", q, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    check_last_contiguous("q", q)
    *tokens, h_q, d_qk = q.shape
    check_columns("head_dim_v", call.common.options.head_dim_v, DENSE_DIMS[d_qk].latent)
    if q.dtype != torch.float8_e4m3fn:
        check_dtype_of_columns("q", q, key_dtypes(d_qk))
    cache = dense_cache(call.k_cache, q.dtype, d_qk)
    operands = _operand_types(call)
    if cache.h_kv > 1 and reads_by_address(arch, operands):
        raise ValueError(f"k_cache has shape {list(call.k_cache.shape)}: h_kv {cache.h_kv} is not supported on {arch.name}; supported: 1")
    dtype = _out_dtype(call)
    if offsets is None and tokens[1] > MAX_QUERY_TOKENS:
        raise ValueError(f"q has shape {list(q.shape)}; supported: s_q to {MAX_QUERY_TOKENS}")
    error = heads_error(h_q, cache.h_kv)
    if error is not None:
        raise ValueError(f"q has shape {list(q.shape)}, k_cache {list(call.k_cache.shape)}: {error}")
    requests = tokens[0] if offsets is None else "batch"
    check_shape("block_table", call.block_table, (requests, "pages per request"))
    requests = call.block_table.shape[0]
    check_last_contiguous("block_table", call.block_table)
    check_shape("cache_seqlens", call.cache_seqlens, (requests,))
    check_contiguous("cache_seqlens", call.cache_seqlens)
    for name, table in (("block_table", call.block_table), ("cache_seqlens", call.cache_seqlens)):
        check_dtype(name, table, torch.int32)
        check_device(name, table, q.device)
    check_device("k_cache", call.k_cache, q.device)
    ragged = None
    if offsets is not None:
        check_counts("cu_seqlens_q", offsets, (requests + 1,), q.device)
        ragged = ragged_queries(requests, tokens[0], call.common.options.max_seqlen_q or 1, h_q // cache.h_kv)
    check_sink(call.attn_sink, q)
    check_rows(TILINGS[arch.name].row_bytes, call.common.address_alignment, {"q": q}, {"out": call.common.out})
    _check_tree(call, tokens[1] if ragged is None else ragged.max_seqlen_q)
    problem = DenseDecodeProblem(
        arch=arch,
        dtype=DTYPE_NAMES[dtype],
        batch=requests if ragged is None else ragged.units,
        s_q=tokens[1] if ragged is None else ragged.unit_tokens,
        h_q=h_q,
        h_kv=cache.h_kv,
        page_size=cache.page_size,
        pages_per_request=call.block_table.shape[1] if cache.pages else 0,  # without pages every request has length 0
        batch_invariant=call.common.options.batch_invariant,
        operands=operands,
        d_qk=d_qk,
        few_heads=call.common.options.few_heads and call.tree_mask is None and call.common.options.window is None,
    )
    return problem, cache, ragged


def _check_tree(call: CallSpec, s_q: int) -> None:
    """Raise ValueError unless tree_mask is None or int32, with rows contiguous, on q's device, of the shape that goes with q.

    The shape is [batch, s_q, ceil(s_q / 32)], or [total_q, ceil(max_seqlen_q / 32)] with cu_seqlens_q. s_q: s_q or max_seqlen_q.
    """
    q, tree_mask = call.q, call.tree_mask
    if tree_mask is not None:
        check_shape("tree_mask", tree_mask, (*q.shape[:-2], ceil_div(s_q, TREE_WORD_TOKENS)))
        check_dtype("tree_mask", tree_mask, torch.int32)
        check_last_contiguous("tree_mask", tree_mask)
        check_device("tree_mask", tree_mask, q.device)


def _window(call: CallSpec, problem: DenseDecodeProblem) -> KeyWindow:
    """Return the keys that any query token of a request sees, or could see if it had as many as a unit holds.

    ValueError for a window beside a tree mask, or with cu_seqlens_q unless the call is causal: a unit then ends with its last token's keys.
    """
    window = call.common.options.window
    if window is not None and call.cu_seqlens_q is not None and call.tree_mask is None and not call.common.options.causal:
        raise ValueError(f"window is {window} with cu_seqlens_q and causal False; supported: None, or causal True")
    if window is not None and call.tree_mask is not None:
        raise ValueError(
            f"window is {window} with a tree_mask: not supported, since the position of a token of a tree is its depth, not its place in "
            "q; supported: one of them"
        )
    return key_window(window, call.common.options.window_sink, problem.s_q)


def _mask_scalars(keys: KeyWindow, window: int | None, hidden_keys: int) -> dict[str, int]:
    """Return the kernel's arguments that say which tiles need a mask. hidden_keys: last keys that the mask may hide."""
    if window is None:
        steady = {"steady_keys": NO_LIMIT, "steady_values": NO_LIMIT}
        return {"hidden_keys": hidden_keys, "reach": keys.reach, "sink_keys": 0, **steady}
    return {
        "hidden_keys": hidden_keys,
        "reach": keys.reach,
        "sink_keys": keys.sink_keys,
        "steady_keys": max(window - hidden_keys - TILE_KEYS + 1, 0),
        "steady_values": max(keys.reach - TILE_KEYS + 1, 0),
    }


def _mask(call: CallSpec, s_q: int) -> int:
    """Return the mask of the kernel's arguments. A tree mask decides on the new tokens alone, whatever causal is.

    s_q: as in _check_tree.
    """
    if call.tree_mask is not None:
        return TREE
    return CAUSAL if call.common.options.causal and (s_q > 1 or call.cu_seqlens_q is not None) else ALL_KEYS


def _out_dtype(call: CallSpec) -> torch.dtype:
    """Return the dtype of out: q's if it has 16 bits, else bf16."""
    return torch.bfloat16 if call.q.dtype == torch.float8_e4m3fn else call.q.dtype


def _operand_types(call: CallSpec) -> str:
    """Return the operand types of the kernel: LATENT, FP8_CACHE or FP8. ValueError for a scale of a tensor that is not e4m3."""
    for name, scale, scaled in (("descale_q", call.descale_q, call.q), ("descale_k", call.descale_k, call.k_cache)):
        if scale is None:
            continue
        if scaled.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{name} is given with {scaled.dtype}; supported: with {torch.float8_e4m3fn}")
        if math.prod(scale.shape) != 1:
            raise ValueError(f"{name} has shape {list(scale.shape)}; supported: one element, for all heads and requests")
        check_dtype(name, scale, torch.float32)
        check_device(name, scale, call.q.device)
    if call.k_cache.dtype != torch.float8_e4m3fn:
        return LATENT
    check_dtype("q with an FP8 cache", call.q, torch.bfloat16, torch.float8_e4m3fn)
    return FP8 if call.q.dtype == torch.float8_e4m3fn else FP8_CACHE
