"""The operation dense_prefill_backward."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ... import reference
from ...api import flash_attn_varlen_backward, workspace_size
from ..cases.dense_prefill_backward import (
    DensePrefillBackwardCase,
    DensePrefillBackwardTensors,
    make_dense_prefill_backward_tensors,
    without_left_out,
)
from ..compare import ErrorLimit
from ..low_precision import gradient_limits
from .operation import Operation, Result, output_argument


def _arguments(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "dout": tensors.dout,
        "q": tensors.q,
        "k": tensors.k,
        "v": tensors.v,
        "out": tensors.out,
        "lse": tensors.lse,
        "cu_seqlens_qo": tensors.cu_seqlens_q,
        "cu_seqlens_kv": tensors.cu_seqlens_k,
        "max_seqlen_qo": case.max_seqlen_q,
        "max_seqlen_kv": case.max_seqlen_k,
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        **{name: output_argument(tensors, name) for name in ("dq", "dk", "dv")},
        "workspace": workspace,
    }


def _workspace_bytes(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors) -> int:
    return workspace_size(
        case.op,
        batch=len(case.lengths),
        s_q=case.max_seqlen_q,
        h_q=case.h_q,
        h_kv=case.h_kv,
        total_q=case.total_q,
        device=tensors.q.device,
    )


def _reference(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors) -> Result:
    known = without_left_out(case, tensors)
    ends = (known.cu_seqlens_q, known.cu_seqlens_k)
    operands = (known.dout, known.q, known.k, known.v, known.lse)
    dq, dk, dv = reference.dense_prefill_backward(*operands, ends, case.softmax_scale, case.causal)
    if case.outputs != "allocated":  # not written
        dq[case.left_out.to(dq.device)] = math.nan
    return dq, dk, dv


def _limits(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors, expected: Result) -> dict[str, ErrorLimit]:
    return gradient_limits(case, without_left_out(case, tensors), expected)


DENSE_PREFILL_BACKWARD = Operation(
    make_dense_prefill_backward_tensors,
    flash_attn_varlen_backward,
    _arguments,
    _reference,
    workspace_bytes=_workspace_bytes,
    limits=_limits,
)
