"""Bounds of the suites' cases: FlashMLA's elementwise bounds, and as tight a bound on rows, cosine and lse as the kernels allow.

Each figure is a small multiple of the largest error over the smoke suites of both architectures, which its comment gives. The errors are
those of rounding, so that they hardly depend on a case's shape:

- Elements of out and of P are rounded once, by at most 2^-9 (bf16), 2^-12 (fp16) or 2^-4 (e4m3) of their value. A row's error is at most
  about the sum of both, and typically 0.6 of it.
- Sums and exponentials are fp32. lse errs by a few units in the last place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..spec.dense_decode import FP8
from .cases.base import BaseCase
from .cases.dense_decode import DenseDecodeCase
from .cases.dense_prefill_backward import DensePrefillBackwardCase
from .cases.index_write import IndexWriteCase
from .cases.mqa_logits import MqaLogitsCase
from .cases.sparse_prefill import SparsePrefillCase
from .compare import (
    DENSE_DECODE_OUT,
    DENSE_PREFILL_GRADIENT,
    DENSE_PREFILL_OUT,
    EQUAL,
    FP8_DENSE_OUT,
    MERGED_BF16,
    MERGED_FP16,
    MERGED_LSE,
    NO_BOUND,
    SPARSE_DECODE_OUT,
    SPARSE_PREFILL_OUT,
    Tolerance,
)

# lse, lse_indexer and max_logits of exact keys: 5e-7 * (1 + |lse|), 4 units in the last place at most.
_LSE = Tolerance(1e-6, 2e-6, 1e-9)

_OUT_OF_OP = {
    "dense_decode": DENSE_DECODE_OUT,
    "sparse_decode": SPARSE_DECODE_OUT,
    "sparse_prefill": SPARSE_PREFILL_OUT,
    "dense_prefill": DENSE_PREFILL_OUT,
}
# By op and element type: (relative error of a row, cosine difference of out).
_ROWS = {
    ("dense_decode", "bf16"): (6e-3, 4e-6),  # 3.0e-3, 2.8e-6
    ("dense_decode", "fp16"): (7e-4, 8e-8),  # 3.2e-4, 3.9e-8
    ("sparse_decode", "bf16"): (6e-3, 5e-6),  # 3.3e-3, 3.2e-6
    ("sparse_decode", "fp16"): (7e-4, 8e-8),  # 3.2e-4, 3.9e-8
    ("sparse_prefill", "bf16"): (7e-3, 4e-6),  # 4.0e-3 with a scale of 64, 2.6e-6
    ("sparse_prefill", "fp16"): (8e-4, 8e-8),  # 3.9e-4, 3.3e-8
    ("dense_prefill", "bf16"): (7e-3, 4e-6),  # 3.5e-3, 2.5e-6: rows have 128 columns only, so their errors vary more
    ("dense_prefill", "fp16"): (8e-4, 8e-8),  # 4.0e-4, 3.7e-8
}
# (relative error of a row of dv, cosine difference of each gradient). FlashMLA's 7e-6, and with the 3
# bits that fp16 has more, 2^-6 of it. Plain torch in the element type has 1.4e-5 and 2.0e-7, as it rounds scores and dP, too.
_GRADIENT_ROWS = {"bf16": (8e-3, 7e-6), "fp16": (1e-3, 1.1e-7)}  # 4.5e-3, 6.1e-6; 5.4e-4, 8.5e-8
_CANCELLING_KEYS = 4  # a sole key has P = 1 and dP = delta: the true dq and dk are 0, and what remains is the rounding of out
# P is rounded to e4m3: by up to 1 / 17 = 5.9e-2 in all keys that count for a row, where these have like scores and the reference that the
# exponentials refer to lags behind the maximum, as on SM100. 5.53e-2 with three such keys, 4.6e-4.
_FP8_ROWS = (6e-2, 7e-4)
_LOGITS_COS_DIFF = 5e-6  # DeepGEMM's; fp8 products summed with 13 bits have about 1e-7


def bounds(case: BaseCase) -> Mapping[str, Tolerance]:
    """Return the tolerance of each result of a case by name, in the order of the call's results."""
    if case.op == "merge_states":  # one rounding of out: at most 2^-9 of an element in bf16, 2^-12 in fp16
        out = replace(MERGED_BF16, row_tol=2.5e-3) if case.dtype == "bf16" else replace(MERGED_FP16, row_tol=3.5e-4)
        return {"out": out, "lse": MERGED_LSE}
    if isinstance(case, DensePrefillBackwardCase):
        return _gradient_bounds(case)
    if isinstance(case, MqaLogitsCase) and case.values == "normal":  # a logit has a limit besides (operations/mqa_logits.py)
        return {"out": replace(NO_BOUND, cos_tol=_LOGITS_COS_DIFF)}
    if isinstance(case, IndexWriteCase) and case.rows == "queries":
        return {"out": EQUAL, "out_weights": EQUAL}
    if case.op not in _OUT_OF_OP:
        return {"out": EQUAL}
    fp8 = isinstance(case, DenseDecodeCase) and case.operands == FP8
    row_tol, cos_tol = _FP8_ROWS if fp8 else _ROWS[case.op, case.dtype]
    out = replace(FP8_DENSE_OUT if fp8 else _OUT_OF_OP[case.op], row_tol=row_tol, cos_tol=cos_tol)
    if isinstance(case, SparsePrefillCase):
        rows = ("max_logits", "lse", "lse_indexer") if case.indexer_topk else ("max_logits", "lse")
        return {"out": out, **dict.fromkeys(rows, _LSE)}
    return {"out": out, "lse": _LSE}


def _gradient_bounds(case: DensePrefillBackwardCase) -> Mapping[str, Tolerance]:
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
