"""The operation sparse_decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ...api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ...cache import dequantise_cache
from ...reference import IndexedCache
from ...spec.cache_format import CacheFormat
from ..bounds import attention_bounds
from ..cases.base import DTYPES
from ..cases.paged_cache import named_format
from ..cases.sparse_decode import SparseDecodeCase, SparseDecodeTensors, make_sparse_decode_tensors
from ..cases.tensors import decode_outputs, token_offsets
from ..compare import SPARSE_DECODE_OUT, Tolerance
from ..suites.sparse_decode import OP_SUITES
from .decode import decode_arguments, packed
from .operation import Operation, Plan, Result, empty_lse
from .requests import CUT, Call, Picks, at, own_rows, relocated, widened

_ROWS = {"bf16": (6e-3, 5e-6), "fp16": (7e-4, 8e-8)}  # 3.3e-3, 3.2e-6; 3.2e-4, 3.9e-8


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
    """Return the pages of a cache that indices name, and the indices into these, [tokens, 1, topk] where query tokens are packed."""
    rows = cache.shape[1]
    valid = (indices >= 0) & (indices < len(cache) * rows)
    pages, place = torch.unique(indices[valid].long() // rows, return_inverse=True)
    own = torch.full_like(indices, -1)
    own[valid] = (place * rows + indices[valid].long() % rows).to(own)
    used = cache[pages] if len(pages) else cache[:1]
    return IndexedCache(_dequantise(case, layout, used), own if case.tokens is None else own[:, None], length)


def _dequantise(case: SparseDecodeCase, layout: CacheFormat, cache: Tensor) -> Tensor:
    """Return the keys of all slots, fp32 [slots, d_qk]: scale times value, rounded once, as the kernels' contract has it."""
    return dequantise_cache(cache, layout.name).to(DTYPES[case.dtype]).float().flatten(0, 2)


def _bounds(case: SparseDecodeCase) -> Mapping[str, Tolerance]:
    return attention_bounds(SPARSE_DECODE_OUT, _ROWS[case.dtype], "lse")


def _taken(case: SparseDecodeCase, tensors: SparseDecodeTensors, picks: Picks, moved: bool) -> Call:
    """Take requests of a call, of packed query tokens the tokens, each a request of its own."""
    picked = list(picks)
    pools = [
        pool._replace(lengths=None if lengths is None else tuple(lengths[pick] for pick in picked))
        for pool, lengths in zip(case.pools, case.topk_lengths, strict=True)
    ]
    taken = replace(
        case,
        batch=len(picked),
        main=pools[0],
        extra=pools[1] if len(pools) > 1 else None,
        tokens=None if case.tokens is None else (1,) * len(picked),
    )
    names = ("indices", "topk_length", "extra_indices", "extra_topk_length")
    own: dict[str, Any] = {name: None if (tensor := getattr(tensors, name)) is None else tensor[picked] for name in names}
    offsets, buffers = token_offsets(taken, tensors.q.device), decode_outputs(taken, tensors.q.device)
    operands = replace(tensors, q=at(tensors.q, picked), cu_seqlens_q=offsets, output_buffers=buffers, **own)
    if not moved:
        return taken, operands
    for prefix, spare in (("", CUT), ("extra_", 3)):
        cache, indices = getattr(operands, f"{prefix}k_cache"), getattr(operands, f"{prefix}indices")
        if cache is not None:
            cache, indices = relocated(cache, indices, cache.shape[1])
            placed: dict[str, Any] = {f"{prefix}k_cache": cache, f"{prefix}indices": widened(indices, spare, 0)}
            operands = replace(operands, **placed)
    return replace(taken, metadata="tensors"), operands


SPARSE_DECODE = Operation(
    SparseDecodeCase,
    OP_SUITES,
    make_sparse_decode_tensors,
    flash_mla_with_kvcache,
    _arguments,
    _reference,
    workspace_bytes=_workspace_bytes,
    bounds=_bounds,
    taken=_taken,
    of=own_rows,
    requests=lambda case: case.batch,
    plan=lambda case, tensors: _plan(case, tensors.cu_seqlens_q, tensors.q.device),
)
