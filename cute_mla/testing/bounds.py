"""Bounds of the suites' cases: FlashMLA's elementwise bounds, and as tight a bound on rows, cosine and lse as the kernels allow.

Each figure is a small multiple of the largest error over the smoke suites of both architectures, which its comment gives; it stands in the
record of its op. The errors are those of rounding, so that they hardly depend on a case's shape:

- Elements of out and of P are rounded once, by at most 2^-9 (bf16), 2^-12 (fp16) or 2^-4 (e4m3) of their value. A row's error is at most
  about the sum of both, and typically 0.6 of it.
- Sums and exponentials are fp32. lse errs by a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .compare import Tolerance

# lse, lse_indexer and max_logits of exact keys: 5e-7 * (1 + |lse|), 4 units in the last place at most.
EXACT_LSE = Tolerance(1e-6, 2e-6, 1e-9)


def attention_bounds(out: Tolerance, rows: tuple[float, float], *others: str) -> Mapping[str, Tolerance]:
    """Return the tolerances of out and of its fp32 results. rows: relative error of a row of out, cosine difference of out."""
    row_tol, cos_tol = rows
    return {"out": replace(out, row_tol=row_tol, cos_tol=cos_tol), **dict.fromkeys(others, EXACT_LSE)}
