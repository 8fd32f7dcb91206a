"""What running a case takes of its op: its tensors, its call through the public API, and the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..api import flash_attn_varlen_func, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ..cache import dequantise_cache, gather_kv_cache, write_kv_cache
from ..ops.cache_torch import write_rows
from ..ops.paged_cache import cache_rows
from ..ops.tensor_spec import spec_of
from ..reference import IndexedCache
from ..spec.cache_format import LATENT
from ..spec.cache_rows import FP8_576
from ..spec.dense_decode import FP8
from ..spec.mla import D_V
from .cache_cases import (
    CacheGatherCase,
    CacheGatherTensors,
    CacheWriteCase,
    CacheWriteTensors,
    copied_cache,
    make_gather_tensors,
    make_write_tensors,
    page_bytes,
)
from .case import DTYPES, BaseCase, Operands
from .cases import Case, Tensors, make_tensors
from .compare import (
    DENSE_DECODE_OUT,
    DENSE_PREFILL_OUT,
    EQUAL,
    FP8_DENSE_OUT,
    LSE,
    PREFILL_LSE,
    SPARSE_DECODE_OUT,
    SPARSE_PREFILL_OUT,
    Tolerance,
)
from .decode_case import DecodeCase
from .dense_prefill_cases import DensePrefillCase, DensePrefillTensors, make_dense_prefill_tensors
from .low_precision import error_limits
from .prefill_cases import SparsePrefillCase, SparsePrefillTensors, make_prefill_tensors
from .sparse_cases import SparseCase, SparseTensors, make_sparse_tensors

Result = tuple[Tensor, ...]


def _no_limits(case: Any, tensors: Any, expected: Result) -> Mapping[str, float]:
    return {}


@dataclass(frozen=True)
class Operation:
    """One op; each function takes a case of it.

    make_tensors: the operands on a device. call(case, tensors, workspace or None): through the public API.
    arguments(case, tensors, workspace or None): all of that call, by name; a plan of tensors is made for it, on the device.
    workspace_bytes(case, tensors): exactly what the call needs. reference(case, tensors): in fp32.
    results: the name of each result of call and reference, in order, and how far it may be off.
    limits(case, tensors, the reference's results): by the name of a result, what the largest error of its elements may be, for
        ops that have such a rule beside the tolerances.
    """

    make_tensors: Callable[[Any, str | torch.device], Any]
    call: Callable[[Any, Any, Tensor | None], Result]
    workspace_bytes: Callable[[Any, Any], int]
    reference: Callable[[Any, Any], Result]
    results: Mapping[str, Tolerance]
    arguments: Callable[[Any, Any, Tensor | None], dict[str, Any]]
    limits: Callable[[Any, Any, Result], Mapping[str, float]] = _no_limits


def operation(case: BaseCase) -> Operation:
    """The op of a case."""
    return FP8_DENSE_DECODE if isinstance(case, Case) and case.operands == FP8 else OPERATIONS[case.op]


def _empty_lse(case: BaseCase) -> float:
    return math.inf if case.empty_lse is None else case.empty_lse


def _given(tensors: Operands, name: str) -> Tensor | None:
    """The tensor that a call is given for a result."""
    given = tensors.given.get(name)
    return None if given is None else given.tensor


def _copied(plan: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A plan made beforehand and copied, as engines do that keep plans in buffers of their own."""
    metadata, num_splits = plan
    return torch.empty_like(metadata).copy_(metadata), torch.empty_like(num_splits).copy_(num_splits)


def _dense_call(case: Case, tensors: Tensors, workspace: Tensor | None) -> Result:
    return flash_mla_with_kvcache(**_dense_arguments(case, tensors, workspace))


def _dense_arguments(case: Case, tensors: Tensors, workspace: Tensor | None) -> dict[str, Any]:
    rows = case.s_q * case.h_q // case.h_kv
    planned = case.metadata == "tensors"
    plan = _copied(get_mla_metadata(tensors.cache_seqlens, rows, case.h_kv, case.h_q)) if planned else get_mla_metadata()
    return {
        **_decode_arguments(case, tensors, plan, workspace),
        "block_table": tensors.block_table,
        "cache_seqlens": tensors.cache_seqlens,
        "causal": case.causal,
        "descale_q": tensors.descale_q,
        "descale_k": tensors.descale_k,
    }


def _decode_arguments(case: DecodeCase, tensors: Tensors | SparseTensors, plan: Any, workspace: Tensor | None) -> dict[str, Any]:
    """What all decode calls have."""
    return {
        "q": tensors.q,
        "k_cache": tensors.k_cache,
        "head_dim_v": D_V,
        "tile_scheduler_metadata": plan[0],
        "num_splits": plan[1],
        "softmax_scale": case.softmax_scale,
        "out": _given(tensors, "out"),
        "lse": _given(tensors, "lse"),
        "workspace": workspace,
        "batch_invariant": case.batch_invariant,
        "empty_lse": _empty_lse(case),
    }


def _dense_workspace(case: Case, tensors: Tensors) -> int:
    return workspace_size(
        case.op,
        batch=case.batch,
        s_q=case.s_q,
        h_q=case.h_q,
        h_kv=case.h_kv,
        batch_invariant=case.batch_invariant,
        max_cache_seqlen=case.pages_per_request * case.page_size if case.batch_invariant else None,
        device=tensors.q.device,
    )


def _dense_reference(case: Case, tensors: Tensors) -> Result:
    return reference.dense_decode(
        tensors.q,
        tensors.k_cache,
        tensors.block_table,
        tensors.cache_seqlens,
        softmax_scale=case.scale,
        causal=case.causal,
        empty_lse=_empty_lse(case),
        descales=(tensors.descale_q, tensors.descale_k),
    )


def _sparse_call(case: SparseCase, tensors: SparseTensors, workspace: Tensor | None) -> Result:
    return flash_mla_with_kvcache(**_sparse_arguments(case, tensors, workspace))


def _sparse_arguments(case: SparseCase, tensors: SparseTensors, workspace: Tensor | None) -> dict[str, Any]:
    planned = case.metadata == "tensors"
    plan = _copied(_sparse_plan(case, tensors.q.device)) if planned else get_mla_metadata()
    return {
        **_decode_arguments(case, tensors, plan, workspace),
        "block_table": None,
        "cache_seqlens": None,
        "is_fp8_kvcache": case.format.quantised > 0,
        "indices": tensors.indices,
        "attn_sink": tensors.attn_sink,
        "extra_k_cache": tensors.extra_k_cache,
        "extra_indices_in_kvcache": tensors.extra_indices,
        "topk_length": tensors.topk_length,
        "extra_topk_length": tensors.extra_topk_length,
    }


def _sparse_plan(case: SparseCase, device: torch.device) -> tuple[Tensor, Tensor]:
    lengths = torch.zeros(case.batch, dtype=torch.int32, device=device)  # their number alone counts
    return get_mla_metadata(lengths, case.s_q * case.h_q, 1, case.h_q, case.format.quantised > 0, _topk(case))


def _topk(case: SparseCase) -> int:
    return sum(pool.topk for pool in case.pools)


def _sparse_workspace(case: SparseCase, tensors: SparseTensors) -> int:
    return workspace_size(
        case.op,
        batch=case.batch,
        s_q=case.s_q,
        h_q=case.h_q,
        batch_invariant=case.batch_invariant,
        topk=_topk(case),
        device=tensors.q.device,
    )


def _sparse_reference(case: SparseCase, tensors: SparseTensors) -> Result:
    caches = [IndexedCache(_slots(case, tensors.k_cache), tensors.indices, tensors.topk_length)]
    if tensors.extra_k_cache is not None and tensors.extra_indices is not None:
        caches.append(IndexedCache(_slots(case, tensors.extra_k_cache), tensors.extra_indices, tensors.extra_topk_length))
    return reference.sparse_decode(tensors.q, caches, case.softmax_scale, tensors.attn_sink, _empty_lse(case))


def _slots(case: SparseCase, cache: Tensor) -> Tensor:
    """fp32 [slots, d_qk]"""
    return dequantise_cache(cache, case.cache).flatten(0, 2)


def _prefill_call(case: SparsePrefillCase, tensors: SparsePrefillTensors, workspace: Tensor | None) -> Result:
    return flash_mla_sparse_fwd(**_prefill_arguments(case, tensors, workspace))


def _prefill_arguments(case: SparsePrefillCase, tensors: SparsePrefillTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "q": tensors.q,
        "kv": tensors.kv,
        "indices": tensors.indices,
        "sm_scale": case.scale,
        "d_v": D_V,
        "attn_sink": tensors.attn_sink,
        "topk_length": tensors.topk_length,
        "kv_offsets": tensors.kv_offsets,
        "out": _given(tensors, "out"),
        "lse": _given(tensors, "lse"),
        "max_logits": _given(tensors, "max_logits"),
        "empty_lse": _empty_lse(case),
    }


def _prefill_workspace(case: SparsePrefillCase, tensors: SparsePrefillTensors) -> int:
    return workspace_size(case.op, batch=case.batch, s_q=case.s_q, h_q=case.h_q, device=tensors.q.device)


def _prefill_reference(case: SparsePrefillCase, tensors: SparsePrefillTensors) -> Result:
    return reference.sparse_prefill(
        tensors.q,
        tensors.kv,
        tensors.indices,
        case.scale,
        tensors.attn_sink,
        tensors.topk_length,
        tensors.kv_offsets,
        _empty_lse(case),
    )


def _dense_prefill_call(case: DensePrefillCase, tensors: DensePrefillTensors, workspace: Tensor | None) -> Result:
    return flash_attn_varlen_func(**_dense_prefill_arguments(case, tensors, workspace))


def _dense_prefill_arguments(case: DensePrefillCase, tensors: DensePrefillTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "q": tensors.q,
        "k": tensors.k,
        "v": tensors.v,
        "cu_seqlens_q": tensors.cu_seqlens_q,
        "cu_seqlens_k": tensors.cu_seqlens_k,
        "max_seqlen_q": case.max_seqlen_q,
        "max_seqlen_k": case.max_seqlen_k,
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "out": _given(tensors, "out"),
        "lse": _given(tensors, "lse"),
        "empty_lse": _empty_lse(case),
    }


def _dense_prefill_workspace(case: DensePrefillCase, tensors: DensePrefillTensors) -> int:
    return workspace_size(case.op, batch=len(case.lengths), s_q=case.max_seqlen_q, h_q=case.h_q, h_kv=case.h_kv, device=tensors.q.device)


def _dense_prefill_reference(case: DensePrefillCase, tensors: DensePrefillTensors) -> Result:
    return reference.dense_prefill(
        tensors.q,
        tensors.k,
        tensors.v,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
        case.softmax_scale,
        case.causal,
        _empty_lse(case),
    )


def _no_workspace(case: BaseCase, tensors: Any) -> int:
    return 0


def _write_arguments(case: CacheWriteCase, tensors: CacheWriteTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "kv_c": tensors.kv_c,
        "k_pe": tensors.k_pe,
        "k_cache": copied_cache(case, tensors.k_cache),
        "slot_mapping": tensors.slot_mapping,
        "descale_k": tensors.descale_k,
        "power_of_two": case.power_of_two,
    }


def _write_call(case: CacheWriteCase, tensors: CacheWriteTensors, workspace: Tensor | None) -> Result:
    """The bytes of a copy of the cache, and of what lies around it."""
    arguments = _write_arguments(case, tensors, workspace)
    write_kv_cache(**arguments)
    return (page_bytes(case, arguments["k_cache"]),)


def _write_reference(case: CacheWriteCase, tensors: CacheWriteTensors) -> Result:
    cache = copied_cache(case, tensors.k_cache)
    keys = torch.cat((tensors.kv_c, tensors.k_pe), dim=1)
    if case.format is FP8_576 and tensors.descale_k is not None:
        keys = keys.float() / tensors.descale_k
    if case.tokens:
        write_rows(cache_rows("k_cache", spec_of("k_cache", cache)), cache, keys, tensors.slot_mapping, case.power_of_two)
    return (page_bytes(case, cache),)


def _gather_arguments(case: CacheGatherCase, tensors: CacheGatherTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "k_cache": tensors.k_cache,
        "block_table": tensors.block_table,
        "cu_seqlens": tensors.cu_seqlens,
        "rows": case.keys + case.rest,
        "starts": tensors.starts,
        "descale_k": tensors.descale_k,
        "dtype": None if case.format is LATENT else DTYPES[case.dtype],
        "out": _given(tensors, "out"),
    }


def _gather_call(case: CacheGatherCase, tensors: CacheGatherTensors, workspace: Tensor | None) -> Result:
    return (gather_kv_cache(**_gather_arguments(case, tensors, workspace)),)


def _gather_reference(case: CacheGatherCase, tensors: CacheGatherTensors) -> Result:
    """Key by key; rows behind the last are NaN, as they were given."""
    cache, out = tensors.k_cache, torch.full((case.keys + case.rest, case.format.d_qk), math.nan)
    if case.format is FP8_576:
        every = cache.float() * (1.0 if tensors.descale_k is None else tensors.descale_k)
    else:
        every = dequantise_cache(cache, case.cache)
    table, row = tensors.block_table.tolist(), 0
    for request, (first, length) in enumerate(zip(case.firsts, case.lengths, strict=True)):
        for position in range(first, first + length):
            column = position // case.page_size
            page = table[request][column] if column < len(table[request]) else -1
            out[row] = every[page, position % case.page_size, 0] if 0 <= page < case.pages else 0.0
            row += 1
    return (out.to(cache.device, DTYPES[case.dtype]),)


OPERATIONS = {
    Case.op: Operation(
        make_tensors, _dense_call, _dense_workspace, _dense_reference, {"out": DENSE_DECODE_OUT, "lse": LSE}, _dense_arguments
    ),
    SparseCase.op: Operation(
        make_sparse_tensors, _sparse_call, _sparse_workspace, _sparse_reference, {"out": SPARSE_DECODE_OUT, "lse": LSE}, _sparse_arguments
    ),
    SparsePrefillCase.op: Operation(
        make_prefill_tensors,
        _prefill_call,
        _prefill_workspace,
        _prefill_reference,
        {"out": SPARSE_PREFILL_OUT, "max_logits": PREFILL_LSE, "lse": PREFILL_LSE},
        _prefill_arguments,
    ),
    DensePrefillCase.op: Operation(
        make_dense_prefill_tensors,
        _dense_prefill_call,
        _dense_prefill_workspace,
        _dense_prefill_reference,
        {"out": DENSE_PREFILL_OUT, "lse": PREFILL_LSE},
        _dense_prefill_arguments,
        error_limits,
    ),
    CacheWriteCase.op: Operation(make_write_tensors, _write_call, _no_workspace, _write_reference, {"out": EQUAL}, _write_arguments),
    CacheGatherCase.op: Operation(make_gather_tensors, _gather_call, _no_workspace, _gather_reference, {"out": EQUAL}, _gather_arguments),
}

FP8_DENSE_DECODE = replace(OPERATIONS[Case.op], results={"out": FP8_DENSE_OUT, "lse": LSE})
