"""flash-attention's rule for dense prefill: at most twice the error that plain torch makes in the element type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..reference import sequence_rows, visible_keys
from .dense_prefill_cases import DensePrefillCase, DensePrefillTensors

_FACTOR = 2.0
_NUDGE = 0.3  # what is added and taken away again, to see how far rounding alone carries


def low_precision_attention(case: DensePrefillCase, tensors: DensePrefillTensors) -> Tensor:
    """out [total_q, h_q, 128] with scores, softmax and products each rounded to the element type; NaN in rows of no sequence."""
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
    """How far any element of a result may be off the reference's, by the name of the result."""
    out = expected[0]
    rounding = _largest(out + _NUDGE - _NUDGE - out)
    return {"out": _FACTOR * _largest(low_precision_attention(case, tensors).float() - out) + _FACTOR * rounding}


def _largest(error: Tensor) -> float:
    """The largest magnitude among those that are finite."""
    finite = error[error.isfinite()].abs()
    return finite.max().item() if finite.numel() else 0.0
