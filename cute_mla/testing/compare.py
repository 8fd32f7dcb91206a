"""Comparison of a kernel's result with its reference by FlashMLA's rule and bounds.

Positions of NaN, +inf and -inf must match exactly. Every other element passes if its absolute or its relative error is within bounds:
the first bound decides for small values, the second for large ones. The cosine difference of the whole tensor is far stricter; it catches
an error that is small everywhere but systematic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_REL_FLOOR = 1e-6  # added to |reference|, so that the relative error of a zero is finite
_ROW_FLOOR = 2e-6  # norm of a row's error that always passes: half a subnormal step of fp16 in each of 512 elements is 7e-7


@dataclass(frozen=True)
class Tolerance:
    """Bounds of one result.

    An element passes if its error is below abs_tol or below rel_tol * (|reference| + 1e-6). The tensor passes if its cosine difference is
    at most cos_tol. A row, along the last dimension, passes if the norm of its error is at most row_tol * (norm of the reference) + 2e-6.
    """

    abs_tol: float
    rel_tol: float
    cos_tol: float
    row_tol: float = math.inf


DENSE_DECODE_OUT = Tolerance(8e-4, 2.01 / 128, 5e-6)
FP8_DENSE_OUT = Tolerance(2e-2, 1 / 16, 1e-3)  # P has 3 bits of mantissa, a relative error of up to 1/16
SPARSE_DECODE_OUT = Tolerance(1e-3, 2.01 / 128, 5e-6)
SPARSE_PREFILL_OUT = Tolerance(8e-4, 3.01 / 128, 7e-6)
DENSE_PREFILL_OUT = Tolerance(1e-3, 8.01 / 128, 7e-6)
DENSE_PREFILL_GRADIENT = Tolerance(1e-2, 8.01 / 128, 7e-6)  # FlashMLA's 1e-3, of a dout that is a tenth of our cases'
LSE = Tolerance(1e-6, 8.01 / 65536, 1e-7)
NO_BOUND = Tolerance(math.inf, 0.0, math.inf)  # the places of NaN and infinities still count
EQUAL = Tolerance(1e-300, 0.0, 0.0)  # no difference at all, for values that are moved or rounded once
PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536, 1e-7)  # also of max_logits of sparse prefill
# merge_states sums in fp32 and rounds once: half a unit in the last place is at most 2^-8 (bf16) or 2^-11 (fp16) of the value, and the
# cosine difference at most half the square of that over 3. Near 0, where terms cancel, the error of the sums decides.
MERGED_BF16 = Tolerance(1e-5, 1.01 / 256, 3e-6)
MERGED_FP16 = Tolerance(4e-6, 1.01 / 2048, 4e-8)
MERGED_LSE = Tolerance(2e-6, 1e-6, 1e-12)  # fp32 throughout


@dataclass(frozen=True)
class Comparison:
    """Outcome of a comparison. max_abs, norm and cos_diff cover elements that are finite on both sides; reason is empty if passed.

    max_abs, norm: largest error of an element, and the root of the sum of all errors' squares.
    """

    passed: bool
    max_abs: float
    norm: float
    cos_diff: float
    reason: str = ""


@dataclass(frozen=True)
class ErrorLimit:
    """The largest error that is allowed of an element, and the largest norm of the errors of all."""

    largest: float
    norm: float = math.inf


def compare(name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance) -> Comparison:
    """Compare a result with its reference, of any float dtypes. The reason begins with `name`."""
    if actual.shape != expected.shape:
        nan = float("nan")
        return Comparison(False, nan, nan, nan, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    actual, expected = actual.double(), expected.double()
    errors = [_misplaced(name, actual, expected)]
    finite = actual.isfinite() & expected.isfinite()
    error = torch.where(finite, (actual - expected).abs(), 0.0)
    outside = finite & ~((error < tolerance.abs_tol) | (error < tolerance.rel_tol * (expected.abs() + _REL_FLOOR)))
    errors.append(_outside(name, actual, expected, error, outside))
    errors.append(_rows_outside(name, error, torch.where(finite, expected, 0.0), tolerance.row_tol))
    cos_diff = cosine_difference(torch.where(finite, actual, 0.0), torch.where(finite, expected, 0.0))
    if cos_diff > tolerance.cos_tol:
        errors.append(f"{name}: cosine difference {cos_diff:.3g} exceeds {tolerance.cos_tol:.3g}")
    reason = "; ".join(filter(None, errors))
    max_abs = error.max().item() if error.numel() else 0.0
    return Comparison(not reason, max_abs, error.norm().item(), cos_diff, reason)


def with_error_limit(name: str, comparison: Comparison, limit: ErrorLimit | None) -> Comparison:
    """Return the comparison, failed if its errors exceed the limit."""
    if limit is None:
        return comparison
    faults = [
        f"{name}: {what} {error:.3g} exceeds {most:.3g}"
        for what, error, most in (("largest error", comparison.max_abs, limit.largest), ("norm of errors", comparison.norm, limit.norm))
        if error > most
    ]
    reason = "; ".join(filter(None, [comparison.reason, *faults]))
    return replace(comparison, passed=not reason, reason=reason)


def cosine_difference(x: Tensor, y: Tensor) -> float:
    """Compute |1 - 2<x,y> / (<x,x> + <y,y>)| in fp64: 0 for equal tensors, sensitive to length and to direction."""
    x, y = x.double().flatten(), y.double().flatten()
    norm = (x.dot(x) + y.dot(y)).item()
    return abs(1 - 2 * x.dot(y).item() / norm) if norm > 0 else 0.0


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors have the same shape, dtype and bits, those of NaN included."""
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(_bits(x), _bits(y))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({1: torch.int8, 2: torch.int16}.get(tensor.element_size(), torch.int32))


def _misplaced(name: str, actual: Tensor, expected: Tensor) -> str:
    """Describe the first NaN or infinity that occurs on one side only; empty if there is none."""
    both_nan = actual.isnan() & expected.isnan()
    wrong = (~actual.isfinite() | ~expected.isfinite()) & ~both_nan & (actual != expected)
    if not wrong.any():
        return ""
    return f"{name}: {int(wrong.sum())} misplaced NaN or infinity, first {_show(actual, expected, _first(wrong))}"


def _outside(name: str, actual: Tensor, expected: Tensor, error: Tensor, outside: Tensor) -> str:
    """Describe how many elements are out of bounds, and the worst one; empty if there is none."""
    if not outside.any():
        return ""
    worst = _unravel(int(torch.where(outside, error, -1.0).argmax()), error.shape)
    return f"{name}: {int(outside.sum())} of {error.numel()} elements out of bounds, worst {_show(actual, expected, worst)}"


def _rows_outside(name: str, error: Tensor, expected: Tensor, row_tol: float) -> str:
    """Describe how many rows are out of bounds, and the worst one; empty if there is none."""
    if not error.numel() or math.isinf(row_tol):
        return ""
    norms = expected.norm(dim=-1)
    ratio = (error.norm(dim=-1) - _ROW_FLOOR).clamp(min=0) / norms.clamp(min=1e-30)
    if ratio.max() <= row_tol:
        return ""
    worst = _unravel(int(ratio.argmax()), ratio.shape)
    return f"{name}: {int((ratio > row_tol).sum())} rows out of bounds, worst at {list(worst)}: {ratio[worst]:.3g} exceeds {row_tol:.3g}"


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero()[0].tolist())


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for extent in reversed(shape):
        flat, coordinate = divmod(flat, extent)
        index.append(coordinate)
    return tuple(reversed(index))


def _show(actual: Tensor, expected: Tensor, index: tuple[int, ...]) -> str:
    return f"at {list(index)}: {actual[index].item():.6g}, expected {expected[index].item():.6g}"
