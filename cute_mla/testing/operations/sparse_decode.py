"""The operation sparse_decode."""

from __future__ import annotations

from itertools import pairwise
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
from .decode import Plan, decode_arguments, packed
from .operation import Operation, Result, empty_lse


def _arguments(case: SparseDecodeCase, tensors: SparseDecodeTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        **decode_arguments(case, tensors, workspace, lambda: _plan(case, tensors.cu_seqlens_q, tensors.q.device)),
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


def _plan(case: SparseDecodeCase, offsets: Tensor | None, device: torch.device) -> Plan:
    requests = case.batch if case.tokens is None else len(case.tokens)
    lengths = torch.zeros(requests, dtype=torch.int32, device=device)  # a sparse plan depends on their number only
    topk = max(_topk(case) // 2, 1) if case.metadata == "stale" else _topk(case)
    s_q = case.max_seqlen_q or case.s_q
    return get_mla_metadata(
        lengths, s_q * case.h_q, 1, case.h_q, case.format.quantised > 0, topk, cu_seqlens_q=offsets, total_q=case.total_q
    )


def _topk(case: SparseDecodeCase) -> int:
    return sum(pool.topk for pool in case.pools)


def _workspace_bytes(case: SparseDecodeCase, tensors: SparseDecodeTensors) -> int:
    return workspace_size(
        case.op,
        batch=case.batch if case.tokens is None else len(case.tokens),
        s_q=case.max_seqlen_q or case.s_q,
        total_q=case.total_q,
        h_q=case.h_q,
        batch_invariant=case.batch_invariant,
        topk=_topk(case),
        device=tensors.q.device,
    )


def _reference(case: SparseDecodeCase, tensors: SparseDecodeTensors) -> Result:
    caches = [_selected(case, case.format, tensors.k_cache, tensors.indices, tensors.topk_length)]
    if tensors.extra_k_cache is not None and tensors.extra_indices is not None:
        second = (tensors.extra_k_cache, tensors.extra_indices, tensors.extra_topk_length)
        caches.append(_selected(case, case.extra_format, *second))
    q = tensors.q if case.tokens is None else tensors.q[: case.batch, None]
    out, lse = reference.sparse_decode(q, caches, case.softmax_scale, tensors.attn_sink, empty_lse(case))
    if case.tokens is None:
        return out, lse
    return packed(case, [(out[None, first:end, 0], lse[None, first:end, :, 0].mT) for first, end in pairwise(case.offsets)])


def _selected(case: SparseDecodeCase, layout: CacheFormat, cache: Tensor, indices: Tensor, length: Tensor | None) -> IndexedCache:
    """Return a cache and its indices [tokens, 1, topk] where query tokens are packed."""
    return IndexedCache(_dequantise(case, layout, cache), indices if case.tokens is None else indices[:, None], length)


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
