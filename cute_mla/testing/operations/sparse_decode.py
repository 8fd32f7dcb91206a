"""The operation sparse_decode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ...cache import dequantise_cache
from ...reference import IndexedCache
from ...spec.cache_format import CacheFormat
from ..cases.base import DTYPES
from ..cases.paged_cache import named_format
from ..cases.sparse_decode import SparseDecodeCase, SparseDecodeTensors, make_sparse_decode_tensors
from .decode import Plan, decode_arguments
from .operation import Operation, Result, empty_lse


def _arguments(case: SparseDecodeCase, tensors: SparseDecodeTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        **decode_arguments(case, tensors, workspace, lambda: _plan(case, tensors.q.device)),
        "block_table": None,
        "cache_seqlens": None,
        "is_fp8_kvcache": case.format.quantised > 0,
        "indices": tensors.indices,
        "attn_sink": tensors.attn_sink,
        "extra_k_cache": tensors.extra_k_cache,
        "extra_indices_in_kvcache": tensors.extra_indices,
        "topk_length": tensors.topk_length,
        "extra_topk_length": tensors.extra_topk_length,
        "kv_format": named_format(case.format),
        "extra_kv_format": None if case.extra is None else named_format(case.extra_format),
    }


def _plan(case: SparseDecodeCase, device: torch.device) -> Plan:
    lengths = torch.zeros(case.batch, dtype=torch.int32, device=device)  # a sparse plan depends on their number only
    topk = max(_topk(case) // 2, 1) if case.metadata == "stale" else _topk(case)
    return get_mla_metadata(lengths, case.s_q * case.h_q, 1, case.h_q, case.format.quantised > 0, topk)


def _topk(case: SparseDecodeCase) -> int:
    return sum(pool.topk for pool in case.pools)


def _workspace_bytes(case: SparseDecodeCase, tensors: SparseDecodeTensors) -> int:
    return workspace_size(
        case.op,
        batch=case.batch,
        s_q=case.s_q,
        h_q=case.h_q,
        batch_invariant=case.batch_invariant,
        topk=_topk(case),
        device=tensors.q.device,
    )


def _reference(case: SparseDecodeCase, tensors: SparseDecodeTensors) -> Result:
    caches = [IndexedCache(_dequantise(case, case.format, tensors.k_cache), tensors.indices, tensors.topk_length)]
    if tensors.extra_k_cache is not None and tensors.extra_indices is not None:
        caches.append(
            IndexedCache(_dequantise(case, case.extra_format, tensors.extra_k_cache), tensors.extra_indices, tensors.extra_topk_length)
        )
    return reference.sparse_decode(tensors.q, caches, case.softmax_scale, tensors.attn_sink, empty_lse(case))


def _dequantise(case: SparseDecodeCase, layout: CacheFormat, cache: Tensor) -> Tensor:
    """Return the keys of all slots, fp32 [slots, d_qk]: scale times value, rounded once, as the kernels' contract has it."""
    return dequantise_cache(cache, layout.name).to(DTYPES[case.dtype]).float().flatten(0, 2)


SPARSE_DECODE = Operation(
    make_sparse_decode_tensors,
    flash_mla_with_kvcache,
    _arguments,
    _reference,
    workspace_bytes=_workspace_bytes,
)
