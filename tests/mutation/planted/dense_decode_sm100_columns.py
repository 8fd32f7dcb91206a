"""Bugs in dense decode for Blackwell over 1,024 + 64 columns: what it does otherwise than the kernel of one pair of CTAs."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from tests.mutation.planted import cases_sm100
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, one_by_one, planted, together

# 18 rows, all in one CTA of a pair; 66 rows, in both
WALK, GAPS = (replace(case, d_qk=1088, sm_count=4) for case in (cases_sm100.WALK, cases_sm100.GAPS))
BOTH = replace(WALK, h_q=33, lengths=(500, 70, 130))
RISING = replace(cases_sm100.RISING, d_qk=1088, sm_count=4)

# In the order of the PTX, as for the kernel of one pair: only waits for barriers that are used otherwise there have a case.
WAITS = (
    ("work_ready of the score role's first work tile", None),
    ("work_ready of score", None),
    ("partial_free", BOTH),
    ("scores_ready of the lower keys, of a warp without rows", WALK),
    ("scores_ready of the upper keys, of a warp without rows", WALK),
    ("partial_ready of a warp without rows", WALK),
    ("scores_ready of the lower keys", BOTH),
    ("scores_ready of the upper keys", BOTH),
    ("partial_ready", BOTH),
    ("reference_ready of the tile before", WALK),
    ("reference_ready of the last tile", WALK),
    ("stats_free", GAPS),
    ("partial_free before the CTA ends", None),
    ("work_ready of the output role's first work tile", None),
    ("work_ready before its Q is looked for", None),
    ("pages_asked", None),
    ("work_ready of output", None),
    ("alpha_ready", WALK),
    ("kv_free before O is scaled", RISING),
    ("work_ready before Q of the next work tile is looked for", None),
    ("pages_asked, if no tile came before", None),
    ("scores_ready before Q is replaced", None),
    ("kv_free before O is stored", WALK),
    ("stats_ready", GAPS),
    ("work_ready of the load role's first work tile", None),
    ("work_ready of load", None),
    ("kv_free", WALK),
    ("kv_free before the CTA ends", None),
    ("work_free", None),
    ("work_free of the last record", None),
    ("work_ready of the first work tile of S", None),
    ("work_ready of S", None),
    ("query_ready", WALK),
    ("kv_ready", WALK),
    ("scores_free of the lower keys", WALK),
    ("scores_free of the upper keys", WALK),
    *((f"scores_free before the CTA ends, stage {stage}", None) for stage in range(3)),
    ("work_ready of the first work tile of P V", None),
    ("work_ready of P V", None),
    ("probs_ready", WALK),
    ("output_ready", WALK),
)

SUITE = Suite(
    SM100,
    {"walk": WALK, "both": BOTH, "gaps": GAPS, "rising": RISING},
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, ptx.CLUSTER_ARRIVALS, or_case=BOTH),
        planted("missing store to the other pair", BOTH, r"st\.async[^;]*;"),
        planted("missing copy", BOTH, ptx.TENSOR_COPIES),
        planted("missing commit", WALK, ptx.COMMITS),
        planted("missing barrier of score warps", BOTH, r"bar\.sync\s+%r\d+, 64;"),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES, "", together),
    ),
)
