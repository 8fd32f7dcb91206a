"""The operation dense_prefill."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import reference
from ...api import flash_attn_varlen_func, workspace_size
from ..cases.dense_prefill import DensePrefillCase, DensePrefillTensors, make_dense_prefill_tensors
from ..low_precision import error_limits
from .operation import Operation, Result, empty_lse, output_argument


def _arguments(case: DensePrefillCase, tensors: DensePrefillTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "q": tensors.q,
        "k": tensors.k,
        "v": tensors.v,
        "cu_seqlens_qo": tensors.cu_seqlens_q,
        "cu_seqlens_kv": tensors.cu_seqlens_k,
        "max_seqlen_qo": case.max_seqlen_q,
        "max_seqlen_kv": case.max_seqlen_k,
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "out": output_argument(tensors, "out"),
        "lse": output_argument(tensors, "lse"),
        "empty_lse": empty_lse(case),
        **({} if tensors.key_mask is None else {"key_mask": tensors.key_mask}),
    }


def _workspace_bytes(case: DensePrefillCase, tensors: DensePrefillTensors) -> int:
    return workspace_size(case.op, batch=len(case.lengths), s_q=case.max_seqlen_q, h_q=case.h_q, h_kv=case.h_kv, device=tensors.q.device)


def _reference(case: DensePrefillCase, tensors: DensePrefillTensors) -> Result:
    return reference.masked_prefill(
        tensors.q,
        tensors.k,
        tensors.v,
        (tensors.cu_seqlens_q, tensors.cu_seqlens_k),
        tensors.key_mask,
        case.softmax_scale,
        case.causal,
        empty_lse(case),
    )


DENSE_PREFILL = Operation(
    make_dense_prefill_tensors,
    flash_attn_varlen_func,
    _arguments,
    _reference,
    workspace_bytes=_workspace_bytes,
    limits=error_limits,
)
