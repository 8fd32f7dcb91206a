"""dense_decode: attention of new query tokens over a paged latent cache. decode.run makes the calls."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from ..spec.arch import Arch
from ..spec.cache_rows import FP8_576, LATENTS
from ..spec.dense_decode import FP8, FP8_CACHE, LATENT, DenseDecodeArguments, DenseDecodeProblem
from ..spec.mla import LATENT_DIMS, VALUE_COLUMNS
from ..spec.split_plan import NO_LIMIT
from .arguments import check_columns, check_no_grad, short_repr
from .decode_plan import CommonSpec, DecodePlan, layout_results, plan_combine
from .launch_plan import named_strides
from .limits import MAX_QUERY_TOKENS, heads_error
from .paged_cache import DenseCache, dense_cache, dense_tensor_map
from .split_plan import ScheduleKey
from .strides import row_alignment
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)

Arguments = DenseDecodeArguments  # the kernel's
WHERE = "without indices"  # the calls of this op, for messages
HEAD_DIMS_V = VALUE_COLUMNS
EXCLUDED = (
    "attn_sink",
    "extra_k_cache",
    "extra_indices_in_kvcache",
    "topk_length",
    "extra_topk_length",
    "extra_kv_format",
)  # of sparse_decode


class Operands(NamedTuple):
    """The tensors that a call reads."""

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    descale_q: torch.Tensor | None
    descale_k: torch.Tensor | None


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses."""

    q: TensorSpec
    k_cache: TensorSpec
    block_table: TensorSpec
    cache_seqlens: TensorSpec
    descale_q: TensorSpec | None
    descale_k: TensorSpec | None
    common: CommonSpec


def check(operands: Operands, common: CommonSpec) -> CallSpec:
    """Check each argument by itself. ValueError unless it is supported."""
    check_no_grad(**operands._asdict())
    k_cache = operand_spec("k_cache", operands.k_cache)
    if common.is_fp8_kvcache and k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError(f"is_fp8_kvcache is True with a k_cache of {k_cache.dtype}; supported {WHERE}: {torch.float8_e4m3fn}")
    own = FP8_576 if k_cache.dtype == torch.float8_e4m3fn else LATENTS.get(k_cache.shape[-1] if k_cache.shape else 0)
    if common.kv_format not in (None, own and own.name):
        raise ValueError(
            f"kv_format is {short_repr(common.kv_format)} with a k_cache of {k_cache.dtype} and shape {list(k_cache.shape)}; "
            f"supported {WHERE}: None" + (f" and {own.name!r}" if own else "")
        )
    return CallSpec(
        q=operand_spec("q", operands.q),
        k_cache=k_cache,
        block_table=operand_spec("block_table", operands.block_table),
        cache_seqlens=operand_spec("cache_seqlens", operands.cache_seqlens),
        descale_q=optional_spec("descale_q", operands.descale_q),
        descale_k=optional_spec("descale_k", operands.descale_k),
        common=common,
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> DecodePlan:
    """Return the launches of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    problem, cache = _check_inputs(call, arch)
    num_parts = problem.num_parts(sm_count) if problem.rows else 1
    results = layout_results(problem, call.common, num_parts, call.q, _out_dtype(call))
    return DecodePlan(
        kernel=problem.config.name,
        grid=(problem.row_ctas, problem.h_kv, num_parts),
        scalars={
            **named_strides("q", "batch token head", call.q.stride[:3]),
            **results.strides,
            "table_stride": call.block_table.stride[0],
            "page_stride": cache.strides[2],
            "row_stride": cache.strides[1],
            "s_q": problem.s_q,
            "h_q": problem.h_q,
            "heads_per_kv": problem.h_q // problem.h_kv,
            "page_size": problem.page_size,
            "pages": min(cache.pages, NO_LIMIT),
            "causal": int(call.common.causal and problem.s_q > 1),
            "batch": problem.batch,
            "max_keys": problem.max_keys,
            "max_splits": problem.max_splits,
            "accum_rows": results.accum_rows,
        },
        op="dense_decode",
        maps={"kv_map": ("k_cache", dense_tensor_map(cache, 0, problem.box_keys))} if cache.pages else {},
        pointers={
            "cache": "k_cache" if problem.operands == FP8_CACHE else None,
            **{name: name for name in ("q", "descale_q", "descale_k", "block_table", "cache_seqlens")},
        },
        lengths=("cache_seqlens", None),
        key_limits=(NO_LIMIT, 0),  # block tables of any width share a plan
        schedule_key=ScheduleKey(problem.batch, problem.s_q, problem.h_q, problem.h_kv, problem.page_size, num_parts, call.q.device),
        results=results,
        combine=plan_combine(problem, results, (problem.max_keys, 0), sm_count),
        default_scale=problem.d_qk**-0.5,
        has_keys=cache.pages > 0,
    )


def _check_inputs(call: CallSpec, arch: Arch) -> tuple[DenseDecodeProblem, DenseCache]:
    """Return the problem and the layout of the cache. ValueError unless the operands fit together."""
    q = call.q
    if len(q.shape) != 4 or q.shape[-1] not in LATENT_DIMS:
        columns = " or ".join(map(str, LATENT_DIMS))
        raise ValueError(f"q has shape {list(q.shape)}; supported {WHERE}: [batch, s_q, h_q, {columns}]")
    check_dtype("q", q, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    check_last_contiguous("q", q)
    batch, s_q, h_q, d_qk = q.shape
    check_columns("head_dim_v", call.common.d_v, LATENT_DIMS[d_qk].latent)
    cache = dense_cache(call.k_cache, q.dtype, d_qk)
    operands = _operand_types(call)
    dtype = _out_dtype(call)
    if s_q > MAX_QUERY_TOKENS:
        raise ValueError(f"q has shape {list(q.shape)}; supported: s_q to {MAX_QUERY_TOKENS}")
    error = heads_error(h_q, cache.h_kv)
    if error is not None:
        raise ValueError(f"q has shape {list(q.shape)}, k_cache {list(call.k_cache.shape)}: {error}")
    check_shape("block_table", call.block_table, (batch, "pages per request"))
    check_last_contiguous("block_table", call.block_table)
    check_shape("cache_seqlens", call.cache_seqlens, (batch,))
    check_contiguous("cache_seqlens", call.cache_seqlens)
    for name, table in (("block_table", call.block_table), ("cache_seqlens", call.cache_seqlens)):
        check_dtype(name, table, torch.int32)
        check_device(name, table, q.device)
    check_device("k_cache", call.k_cache, q.device)
    problem = DenseDecodeProblem(
        arch=arch,
        dtype=DTYPE_NAMES[dtype],
        batch=batch,
        s_q=s_q,
        h_q=h_q,
        h_kv=cache.h_kv,
        page_size=cache.page_size,
        pages_per_request=call.block_table.shape[1] if cache.pages else 0,  # without pages every request has length 0
        batch_invariant=call.common.batch_invariant,
        row_alignment=row_alignment(call.common.address_alignment, q, call.common.out),
        operands=operands,
        d_qk=d_qk,
    )
    return problem, cache


def _out_dtype(call: CallSpec) -> torch.dtype:
    """Return the dtype of out: q's if it has 16 bits; else that of the caller's out, or bf16."""
    if call.q.dtype != torch.float8_e4m3fn:
        return call.q.dtype
    given = call.common.out
    if given is None:
        return torch.bfloat16
    check_dtype("out", given, torch.bfloat16, torch.float16)
    return given.dtype


def _operand_types(call: CallSpec) -> str:
    """Return the operand types of the kernel: LATENT, FP8_CACHE or FP8. ValueError for a scale of a tensor that is not e4m3."""
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
