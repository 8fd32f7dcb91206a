"""FlashAttention's error limit for dense prefill: twice the error that plain torch makes in the element type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..reference import sequence_rows, visible_keys
from .cases.dense_prefill import DensePrefillCase, DensePrefillTensors

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
        scores = ((own_q * case.scale) @ own_k.transpose(1, 2)).masked_fill(~visible, -math.inf)
        weights = scores.softmax(dim=-1).masked_fill(~visible.any(dim=-1, keepdim=True), 0.0)
        out[rows] = (weights @ own_v).transpose(0, 1)
    return out


def error_limits(case: DensePrefillCase, tensors: DensePrefillTensors, expected: tuple[Tensor, ...]) -> dict[str, float]:
    """Return by name of a result the largest allowed error of an element."""
    out = expected[0]
    rounding = _largest(out + _NUDGE - _NUDGE - out)
    return {"out": _FACTOR * _largest(low_precision_attention(case, tensors).float() - out) + _FACTOR * rounding}


def _largest(error: Tensor) -> float:
    """Return the largest magnitude among the finite elements."""
    finite = error[error.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
