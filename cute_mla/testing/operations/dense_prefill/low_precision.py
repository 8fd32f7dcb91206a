"""FlashAttention's error limit for dense prefill, forward and backward: twice the error that plain torch makes in the element type.

Sums are exact before they are rounded to the element type, so that a limit does not depend on the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ....reference import mask_keys, sequence_rows, visible_keys
from ...compare import ErrorLimit
from ..dense_prefill_backward.case import DensePrefillBackwardCase, DensePrefillBackwardTensors
from .case import DensePrefillCase, DensePrefillTensors

_FACTOR = 2.0
_NUDGE = 0.3  # added and subtracted again, to measure the error of rounding alone


def low_precision_attention(case: DensePrefillCase, tensors: DensePrefillTensors) -> Tensor:
    """Compute out [total_q, h_q, 128], rounding scores, softmax and products to the element type; NaN in rows of no sequence."""
    q, k, v = tensors.q, tensors.k, tensors.v
    out = torch.full((len(q), case.h_q, case.d_v), math.nan, dtype=q.dtype, device=q.device)
    for sequence in range(len(case.lengths)):
        rows = sequence_rows(tensors.cu_seqlens_q, sequence, len(q))
        keys = sequence_rows(tensors.cu_seqlens_k, sequence, len(k))
        own_k, own_v = (tensor[keys].transpose(0, 1).repeat_interleave(case.group, dim=0) for tensor in (k, v))
        own_q = q[rows].transpose(0, 1)
        visible = visible_keys(own_q.shape[1], own_k.shape[1], case.causal, q.device)
        if tensors.key_mask is not None:
            visible = visible & mask_keys(tensors.key_mask[rows], own_k.shape[1])
        scores = product(own_q * case.scale, own_k.mT).masked_fill(~visible, -math.inf)
        weights = scores.double().softmax(dim=-1).masked_fill(~visible.any(dim=-1, keepdim=True), 0.0).to(q.dtype)
        out[rows] = product(weights, own_v).transpose(0, 1)
    return out


def low_precision_gradients(case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv from out, rounding every matrix to the element type; NaN in rows of no sequence."""
    dq, dk, dv = (
        torch.full(tensor.shape, math.nan, dtype=tensor.dtype, device=tensor.device) for tensor in (tensors.q, tensors.k, tensors.v)
    )
    for sequence in range(len(case.lengths)):
        rows = sequence_rows(tensors.cu_seqlens_q, sequence, len(dq))
        keys = sequence_rows(tensors.cu_seqlens_k, sequence, len(dk))
        q, out, dout = (tensor[rows].transpose(0, 1) for tensor in (tensors.q, tensors.out, tensors.dout))
        k, v = (tensor[keys].transpose(0, 1).repeat_interleave(case.group, dim=0) for tensor in (tensors.k, tensors.v))
        hidden = ~visible_keys(q.shape[1], k.shape[1], case.causal, q.device) | tensors.lse[rows].isinf().T.unsqueeze(-1)
        scores = (product(q, k.mT).double() * case.scale).masked_fill(hidden, -math.inf)
        weights = scores.softmax(dim=-1).masked_fill(hidden, 0.0).to(q.dtype)
        delta = (out.double() * dout.double()).sum(dim=-1, keepdim=True)
        dscores = (weights * (product(dout, v.mT) - delta)).masked_fill(hidden, 0.0).to(q.dtype)
        dq[rows] = (product(dscores, k) * case.scale).transpose(0, 1)
        dk[keys] = _over_groups(product(dscores.mT, q) * case.scale, case)
        dv[keys] = _over_groups(product(weights.mT, dout), case)
    return dq, dk, dv


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y, rounded once to the element type."""
    return (x.double() @ y.double()).to(x.dtype)


def _over_groups(gradient: Tensor, case: DensePrefillBackwardCase) -> Tensor:
    """Sum [h_q, keys, columns] over the query heads of each KV head; return [keys, h_kv, columns]."""
    return gradient.unflatten(0, (case.h_kv, case.group)).double().sum(dim=1).transpose(0, 1)


def gradient_limits(
    case: DensePrefillBackwardCase, tensors: DensePrefillBackwardTensors, expected: tuple[Tensor, ...]
) -> dict[str, ErrorLimit]:
    """Return the limits of the gradients by name: of an element, and of all together, which random errors do not widen."""
    return limits_of(("dq", "dk", "dv"), low_precision_gradients(case, tensors), expected)


def limits_of(names: tuple[str, ...], coarse: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> dict[str, ErrorLimit]:
    """Return the limits of results by name, given those of plain torch in the element type."""
    pairs = zip(names, coarse, expected, strict=True)
    return {name: ErrorLimit(_limit(low, gradient, _largest), _limit(low, gradient, _norm)) for name, low, gradient in pairs}


def error_limits(case: DensePrefillCase, tensors: DensePrefillTensors, expected: tuple[Tensor, ...]) -> dict[str, ErrorLimit]:
    """Return the limit of out, of an element."""
    return {"out": ErrorLimit(_limit(low_precision_attention(case, tensors), expected[0], _largest))}


def _limit(coarse: Tensor, expected: Tensor, size: Callable[[Tensor], float]) -> float:
    """Return the limit of the size of errors, given the result of plain torch in the element type."""
    return _FACTOR * size(coarse.float() - expected) + _FACTOR * size(expected + _NUDGE - _NUDGE - expected)


def _largest(error: Tensor) -> float:
    """Return the largest magnitude among the finite elements."""
    finite = error[error.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0


def _norm(error: Tensor) -> float:
    """Return the norm of the finite elements."""
    return error[error.isfinite()].double().norm().item()
