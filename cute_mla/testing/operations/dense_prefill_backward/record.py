"""The operation dense_prefill_backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .... import reference
from ....api import flash_attn_varlen_backward, workspace_size
from ...compare import DENSE_PREFILL_GRADIENT, NO_BOUND, ErrorLimit, Tolerance
from ..dense_prefill.low_precision import gradient_limits
from ..dense_prefill.record import sequence_arguments, taken_inputs
from ..operation import Operation, Result, Sample, operands_of, outputs_of, scale_argument
from ..requests import Call, Picks, rows_of
from .case import DensePrefillBackwardCase, DensePrefillBackwardTensors, make_dense_prefill_backward_tensors, without_left_out
from .suites import OP_SUITES

# (relative error of a row of dv, cosine difference of each gradient). FlashMLA's 7e-6, and with the 3
# bits that fp16 has more, 2^-6 of it. Plain torch in the element type has 1.4e-5 and 2.0e-7, as it rounds scores and dP, too.
_GRADIENT_ROWS = {"bf16": (8e-3, 7e-6), "fp16": (1e-3, 1.1e-7)}  # 4.5e-3, 6.1e-6; 5.4e-4, 8.5e-8
_CANCELLING_KEYS = 4  # a sole key has P = 1 and dP = delta: the true dq and dk are 0, and what remains is the rounding of out


def _arguments(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors, workspace: Tensor | None) -> dict[str, Any]:
    saved, gradients = operands_of(tensors, "dout", "out", "lse"), outputs_of(tensors, "dq", "dk", "dv")
    return {**sequence_arguments(case, tensors), **saved, **gradients, "workspace": workspace}


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


def _expected(arguments: Mapping[str, Any]) -> Result:
    """Return gradients; rows of no sequence, and those of dq that are left out, are 0 where the call allocates, and else NaN."""
    dout, q, k, v, lse = (arguments[name] for name in ("dout", "q", "k", "v", "lse"))
    ends = (arguments["cu_seqlens_qo"], arguments["cu_seqlens_kv"])
    left_out = torch.zeros(len(q), 1, dtype=torch.bool, device=q.device)
    for first, end in pairwise(ends[0].clamp(0, len(q)).tolist()):
        left_out[first + int(arguments["max_seqlen_qo"]) : end] = True
    dout, q = (tensor.masked_fill(left_out[..., None], 0.0) for tensor in (dout, q))
    operands = (dout, q, k, v, lse.masked_fill(left_out, math.inf), ends)
    gradients = reference.dense_prefill_backward(*operands, scale_argument(arguments), bool(arguments["causal"]))
    for name, gradient, starts in zip(("dq", "dk", "dv"), gradients, (ends[0], *ends[1:] * 2), strict=True):
        if arguments.get(name) is None:
            first, end = starts[[0, -1]].clamp(0, len(gradient)).tolist()
            gradient[:first] = gradient[end:] = 0.0
        elif name == "dq":
            gradient[left_out[:, 0]] = math.nan
    return gradients


def _limits(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors, expected: Result) -> dict[str, ErrorLimit]:
    return gradient_limits(case, without_left_out(case, tensors), expected)


def _bounds(case: DensePrefillBackwardCase) -> Mapping[str, Tolerance]:
    """Return the tolerances of dq, dk and dv.

    Sums over a group of heads err by the root of its size. The terms of a row of dq or dk cancel where it sees, or is seen by, few others,
    and leave the rounding of out in delta: rows have no bound. Where few keys have nearly all weight, or there are no more than few, only
    the limits of low_precision.py bound dq and dk. They hold for every case: the largest error and the norm of all errors are at most
    twice those of torch in the element type (over the smoke suite 1.84 and 1.26 of them). Of values other than "normal", rows of q are
    nearly alike: all columns of a row of dk share one sum of rounding errors, and a small case may exceed that by chance, as two did that
    are not in the suite (3.4 and 3.8 of torch's on Hopper, which multiplies P as it is rounded).
    """
    row_tol, cos_tol = _GRADIENT_ROWS[case.dtype]
    bound = replace(DENSE_PREFILL_GRADIENT, abs_tol=DENSE_PREFILL_GRADIENT.abs_tol * math.sqrt(case.group), cos_tol=cos_tol)
    if case.values != "normal" or case.max_seqlen_k < _CANCELLING_KEYS:
        return {"dq": NO_BOUND, "dk": NO_BOUND, "dv": replace(bound, abs_tol=math.inf, row_tol=row_tol)}
    return {"dq": bound, "dk": bound, "dv": replace(bound, row_tol=row_tol)}


def _taken(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors, picks: Picks, moved: bool) -> Call:
    """Take sequences of a call, as those of the forward pass are taken."""
    taken, operands = taken_inputs(case, tensors, picks, moved)
    rows = rows_of(case.q_starts, [s_q for s_q, _ in case.lengths], picks)
    return taken, DensePrefillBackwardTensors(**operands, **{name: getattr(tensors, name)[rows] for name in ("dout", "out", "lse")})


def _of(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors, results: Result, place: int) -> Result:
    (first, end), (first_key, end_key) = (ends[place : place + 2].tolist() for ends in (tensors.cu_seqlens_q, tensors.cu_seqlens_k))
    return results[0][first:end], results[1][first_key:end_key], results[2][first_key:end_key]


def _part(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors, request: int) -> Sample:
    """Compute the gradients of the first and the last KV head of a sequence, with all query heads that share them."""
    heads = sorted({0, case.h_kv - 1})
    rows, keys = (slice(starts[request], starts[request + 1]) for starts in (case.q_starts, case.k_starts))

    def chosen(tensor: Tensor, place: slice) -> Tensor:
        return tensor[place].unflatten(1, (case.h_kv, -1))[:, heads].flatten(1, 2)

    dout, q, lse = (chosen(tensor, rows) for tensor in (tensors.dout, tensors.q, tensors.lse))
    k, v = (chosen(tensor, keys) for tensor in (tensors.k, tensors.v))
    visible = reference.visible_keys(len(q), len(k), case.causal, q.device)
    expected = reference.attention_gradients(dout, (q, k, v), case.scale, visible, ~lse.isinf())
    return expected, lambda results: (chosen(results[0], rows), chosen(results[1], keys), chosen(results[2], keys))


DENSE_PREFILL_BACKWARD = Operation(
    DensePrefillBackwardCase,
    OP_SUITES,
    make_dense_prefill_backward_tensors,
    flash_attn_varlen_backward,
    _arguments,
    _expected,
    workspace_bytes=_workspace_bytes,
    limits=_limits,
    bounds=_bounds,
    taken=_taken,
    of=_of,
    requests=lambda case: len(case.lengths),
    part=_part,
)
