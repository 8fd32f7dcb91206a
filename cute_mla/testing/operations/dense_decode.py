"""The operation dense_decode."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import reference
from ...api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ..cases.dense_decode import DenseDecodeCase, DenseDecodeTensors, make_dense_decode_tensors
from .decode import decode_arguments
from .operation import Operation, Result, empty_lse


def _arguments(case: DenseDecodeCase, tensors: DenseDecodeTensors, workspace: Tensor | None) -> dict[str, Any]:
    rows = case.s_q * case.h_q // case.h_kv
    planned = tensors.cache_seqlens.roll(1) if case.metadata == "stale" else tensors.cache_seqlens
    return {
        **decode_arguments(case, tensors, workspace, lambda: get_mla_metadata(planned, rows, case.h_kv, case.h_q)),
        "block_table": tensors.block_table,
        "cache_seqlens": tensors.cache_seqlens,
        "causal": case.causal,
        "descale_q": tensors.descale_q,
        "descale_k": tensors.descale_k,
    }


def _workspace_bytes(case: DenseDecodeCase, tensors: DenseDecodeTensors) -> int:
    return workspace_size(
        case.op,
        batch=case.batch,
        s_q=case.s_q,
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
    return reference.dense_decode(
        tensors.q,
        tensors.k_cache,
        tensors.block_table,
        _clipped_lengths(tensors),
        softmax_scale=case.scale,
        causal=case.causal,
        empty_lse=empty_lse(case),
        descales=(tensors.descale_q, tensors.descale_k),
    )


DENSE_DECODE = Operation(
    make_dense_decode_tensors,
    flash_mla_with_kvcache,
    _arguments,
    _reference,
    workspace_bytes=_workspace_bytes,
)
