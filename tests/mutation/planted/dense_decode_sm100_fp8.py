"""Bugs in dense decode for Blackwell with e4m3 operands: what it does otherwise than the 16-bit kernel."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.spec.dense_decode import FP8
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import cases_sm100
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each_but_around_dealloc, one_by_one, planted, together

WALK, RISING, GAPS, BROKEN, MANY = (
    replace(case, operands=FP8, few_heads=False)
    for case in (cases_sm100.WALK, cases_sm100.RISING, cases_sm100.GAPS, cases_sm100.BROKEN, cases_sm100.MANY)
)
# by 1,000 octaves and more
STEEP = DenseDecodeCase(lengths=(400,), h_q=64, values="falling", softmax_scale=2.0, sm_count=2, operands=FP8, few_heads=False)

# In the order of the PTX, as for the 16-bit kernel. None: the wait keeps a CTA alive for signals that nobody else waits for.
WAITS = (
    ("work_ready of the score role's first work tile", WALK),
    ("work_ready of score", WALK),
    ("scores_ready", WALK),
    ("reference_ready of the tile before", WALK),
    ("kv_free before P is written", WALK),
    ("reference_ready of the last tile", WALK),
    ("stats_free", GAPS),
    ("work_ready of the output role's first work tile", WALK),
    ("work_ready before its Q is looked for", None),
    ("pages_asked", None),
    ("work_ready of output", None),
    ("alpha_ready", WALK),
    ("kv_free before O is scaled", RISING),
    ("work_ready before Q of the next work tile is looked for", WALK),
    ("pages_asked, if no tile came before", None),
    ("scores_ready before Q is replaced", None),
    ("kv_free before O is stored", WALK),
    ("stats_ready", GAPS),
    ("work_ready of the first work tile's value columns", WALK),
    ("work_ready of the value columns", WALK),
    ("kv_free of the value columns", WALK),
    ("kv_free of the value columns before the CTA ends", None),
    ("work_ready of the first work tile's other columns", WALK),
    ("work_ready of the other columns", WALK),
    ("kv_free of the other columns", WALK),
    ("kv_free of the other columns before the CTA ends", None),
    ("work_free", MANY),
    ("work_free of the last record", MANY),
    ("work_ready of the mma role's first work tile", WALK),
    ("work_ready of mma", WALK),
    ("query_ready", WALK),
    ("kv_ready", WALK),
    ("scores_free", WALK),
    ("probs_ready", WALK),
    ("output_ready", WALK),
    ("scores_free before the CTA ends", None),
    ("scores_free of the other group before the CTA ends", None),
)
ONES = r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{943208504, 943208504, 943208504, 943208504\};"
SUM_STORE = r"tcgen05\.st\.sync\.aligned\.32x32b\.x1\.b32[^;]*;"

SUITE = Suite(
    SM100,
    {"walk": WALK, "rising": RISING, "gaps": GAPS, "broken": BROKEN, "steep": STEEP},
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;", or_case=MANY),
        planted("missing barrier of score warps", WALK, r"bar\.sync\s+%r\d+, (?:64|128);"),
        planted("missing copy", WALK, ptx.TENSOR_COPIES),
        planted("wrong number of arrivals", WALK, ptx.EXPECTED_ARRIVALS, r"\g<1>3;", alone(0, 1)),
        planted("missing wait for stores of Q or P", WALK, ptx.STORE_WAITS, "", alone(0, 1, 3), count=4),
        planted("missing wait for stores of O", RISING, ptx.STORE_WAITS, "", alone(2), count=4),
        # 18 products of S, then twice two of P V and one of the sum.
        planted("missing product", WALK, ptx.PRODUCTS, "", alone(0, 15, 17, 18, 20, 23), count=24),
        planted("ones not written", WALK, ONES, "", count=1),
        planted("sum not scaled with the output", RISING, SUM_STORE, "", count=1),
        planted("reference that falls without end", STEEP, "0fC2000000", "0fD0000000", together),
        planted("first page for a page below 0", BROKEN, ptx.PAGES, ptx.FIRST_PAGE, together, count=4),
        planted("mask without effect", WALK, r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+),", r"selp.f32 \1, \2, \2,", together),
        planted("unused rows not cleared", WALK, ptx.ZERO_STORES, "", together),
        planted("missing fence before", WALK, ptx.FENCES_BEFORE, "", each_but_around_dealloc, or_case=RISING),
        planted("missing fence after", WALK, ptx.FENCES_AFTER, "", each_but_around_dealloc, or_case=RISING),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES, "", together),
        planted("missing waits for loads", WALK, ptx.LOAD_WAITS, "", together),
    ),
)
