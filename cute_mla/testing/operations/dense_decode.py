"""The operation dense_decode."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch import Tensor

from ... import reference
from ...api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ..cases.base import LONGER_KEYS
from ..cases.dense_decode import DenseDecodeCase, DenseDecodeTensors, make_dense_decode_tensors
from .decode import Plan, decode_arguments, packed
from .operation import Operation, Result, empty_lse


def _arguments(case: DenseDecodeCase, tensors: DenseDecodeTensors, workspace: Tensor | None) -> dict[str, Any]:
    planned = tensors.cache_seqlens.roll(1) if case.metadata in ("stale", "longer") else tensors.cache_seqlens
    if case.metadata == "longer":
        planned[1] += LONGER_KEYS
    return {
        **decode_arguments(case, tensors, workspace, lambda: _plan(case, planned, tensors)),
        "block_table": tensors.block_table,
        "cache_seqlens": tensors.cache_seqlens,
        "causal": case.causal,
        "descale_q": tensors.descale_q,
        "descale_k": tensors.descale_k,
        "attn_sink": tensors.attn_sink,
        "tree_mask": tensors.tree_mask,
        "window": case.window,
        "window_sink": case.window_sink,
    }


def _plan(case: DenseDecodeCase, lengths: Tensor, tensors: DenseDecodeTensors) -> Plan:
    rows = (case.max_seqlen_q or case.s_q) * case.h_q // case.h_kv
    window, window_sink = (None, 0) if case.metadata in ("stale", "longer") else (case.window, case.window_sink)
    return get_mla_metadata(
        lengths, rows, case.h_kv, case.h_q,
        cu_seqlens_q=tensors.cu_seqlens_q, total_q=case.total_q, window=window, window_sink=window_sink,
    )  # fmt: skip


def _workspace_bytes(case: DenseDecodeCase, tensors: DenseDecodeTensors) -> int:
    return workspace_size(
        case.op,
        batch=case.batch,
        s_q=case.max_seqlen_q or case.s_q,
        total_q=case.total_q,
        h_q=case.h_q,
        h_kv=case.h_kv,
        batch_invariant=case.batch_invariant,
        max_cache_seqlen=case.pages_per_request * case.page_size if case.batch_invariant else None,
        head_dim_v=case.d_v,
        device=tensors.q.device,
    )


def _clipped_lengths(tensors: DenseDecodeTensors) -> Tensor:
    """Return the lengths as the device takes them: at least 0, at most what the block table has room for."""
    capacity = tensors.block_table.shape[1] * tensors.k_cache.shape[1]
    return tensors.cache_seqlens.clamp(0, min(capacity, (1 << 31) - 1))


def _reference(case: DenseDecodeCase, tensors: DenseDecodeTensors) -> Result:
    lengths = _clipped_lengths(tensors)

    def decode(tokens: slice | None, requests: slice) -> Result:
        """Attend with all query tokens, or with those of one request."""
        q = tensors.q if tokens is None else tensors.q[None, tokens]
        tree_mask = tensors.tree_mask
        if tree_mask is not None and tokens is not None:
            tree_mask = tree_mask[None, tokens]
        seen = reference.SeenKeys(case.causal, tree_mask, (case.window, case.window_sink))
        descales = (tensors.descale_q, tensors.descale_k)
        keys = (tensors.k_cache, tensors.block_table[requests], lengths[requests])
        out, lse = reference.dense_decode(q, *keys, case.scale, seen, empty_lse(case), descales)
        return (out if tensors.attn_sink is None else reference.scale_by_sink(out, lse, tensors.attn_sink)), lse

    if case.tokens is None:
        return decode(None, slice(None))
    ranges = enumerate(pairwise(case.offsets))
    return packed(case, [decode(slice(first, end), slice(request, request + 1)) for request, (first, end) in ranges])


DENSE_DECODE = Operation(
    make_dense_decode_tensors,
    flash_mla_with_kvcache,
    _arguments,
    _reference,
    workspace_bytes=_workspace_bytes,
)
