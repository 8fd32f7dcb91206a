"""The operation sparse_prefill."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import reference
from ...api import flash_mla_sparse_fwd, workspace_size
from ...spec.mla import D_V
from ..cases.sparse_prefill import SparsePrefillCase, SparsePrefillTensors, make_sparse_prefill_tensors
from .operation import Operation, Result, empty_lse, output_argument


def _arguments(case: SparsePrefillCase, tensors: SparsePrefillTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "q": tensors.q,
        "kv": tensors.kv,
        "indices": tensors.indices,
        "sm_scale": case.scale,
        "d_v": D_V,
        "attn_sink": tensors.attn_sink,
        "topk_length": tensors.topk_length,
        "indexer_topk": case.indexer_topk,
        "kv_offsets": tensors.kv_offsets,
        "out": output_argument(tensors, "out"),
        "lse": output_argument(tensors, "lse"),
        "max_logits": output_argument(tensors, "max_logits"),
        "lse_indexer": output_argument(tensors, "lse_indexer"),
        "empty_lse": empty_lse(case),
    }


def _workspace_bytes(case: SparsePrefillCase, tensors: SparsePrefillTensors) -> int:
    return workspace_size(case.op, batch=case.batch, s_q=case.s_q, h_q=case.h_q, device=tensors.q.device)


def _reference(case: SparsePrefillCase, tensors: SparsePrefillTensors) -> Result:
    operands = (tensors.q, tensors.kv, tensors.indices, case.scale, tensors.attn_sink, tensors.topk_length, tensors.kv_offsets)
    found = reference.sparse_prefill(*operands, empty_lse(case))
    return (*found, reference.lse_indexer(case.indexer_topk, *operands, empty_lse(case))) if case.indexer_topk else found


SPARSE_PREFILL = Operation(
    make_sparse_prefill_tensors,
    flash_mla_sparse_fwd,
    _arguments,
    _reference,
    workspace_bytes=_workspace_bytes,
)
