"""Bugs in dense decode for Blackwell."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from tests.mutation.planted import patterns as ptx
from tests.mutation.planted.cases_sm100 import BROKEN, GAPS, MANY, RISING, WALK
from tests.mutation.planting import Suite, alone, each_but_around_dealloc, one_by_one, planted, together

# In the order of the PTX: a barrier, and a case that notices when nobody waits for it. None: the wait only keeps a CTA alive for
# signals that nobody else waits for. On the simulator, a cluster barrier always comes later than these signals. Or the record of a work
# tile has been waited for before; or alpha_ready of the last tile, which follows its S; or the wait only puts loads in an order.
WAITS = (
    ("work_ready of the score role's first work tile", WALK),
    ("work_ready of score", WALK),
    ("scores_ready of the lower keys", WALK),
    ("scores_ready of the upper keys", WALK),
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
    ("work_ready of the load role's first work tile", WALK),
    ("work_ready of load", WALK),
    ("kv_free", WALK),
    ("kv_free before the CTA ends", None),
    ("work_free", MANY),
    ("work_free of the last record", MANY),
    ("work_ready of the mma role's first work tile", WALK),
    ("work_ready of mma", WALK),
    ("query_ready", WALK),
    ("scores_free of the upper keys", WALK),
    ("kv_ready", WALK),
    ("scores_free of the lower keys", WALK),
    ("probs_ready", WALK),
    ("output_ready", WALK),
    *((f"scores_free before the CTA ends, stage {stage}", None) for stage in range(3)),
)

NARROW = replace(WALK, d_qk=320)  # 256 + 64 columns: two groups of score warps
NOPE = replace(WALK, d_qk=512)  # keys without rotary columns: S of a tile has 2 x 16 products

SUITE = Suite(
    SM100,
    {
        "walk": WALK,
        "rising": RISING,
        "gaps": GAPS,
        "broken": BROKEN,
        "NoPE": NOPE,
        "256 + 64": NARROW,
        "256 + 64, rising": replace(RISING, d_qk=320),
    },
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;", or_case=MANY),
        planted("missing commit", WALK, ptx.COMMITS),
        planted("missing copy", WALK, ptx.TENSOR_COPIES),
        planted("missing dealloc", WALK, r"tcgen05\.dealloc[^;]*;"),
        planted("missing cluster barrier", WALK, r"barrier\.cluster\.(?:arrive|wait)[^;]*;"),
        planted("missing barrier of score warps", WALK, r"bar\.sync\s+%r\d+, 64;"),
        planted("wrong number of bytes", WALK, r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>4096;"),
        planted("wrong number of arrivals", WALK, ptx.EXPECTED_ARRIVALS, r"\g<1>3;", or_case=MANY),
        planted("commit to one CTA", WALK, r"(tcgen05\.commit[^;]*\], )%rs\d+;", r"\g<1>1;"),
        planted("missing wait for stores of Q", WALK, ptx.STORE_WAITS, "", alone(0, 2), count=3),
        planted("missing wait for stores of O", RISING, ptx.STORE_WAITS, "", alone(1), count=3),
        planted("missing product", WALK, ptx.PRODUCTS, "", alone(0, 17, 18, 35, 36, 43)),
        planted("product that takes Q from an empty collector", WALK, ptx.FILLS, ptx.USE, count=4),
        planted("first page for a page below 0", BROKEN, ptx.PAGES, ptx.FIRST_PAGE, together, count=2),
        planted("mask without effect", WALK, r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+),", r"selp.f32 \1, \2, \2,", together),
        planted("unused rows not cleared", WALK, ptx.ZERO_STORES, "", together),
        planted("lse in base 2", WALK, ptx.LN_2, ptx.ONE),
        planted("missing fence before", WALK, ptx.FENCES_BEFORE, "", each_but_around_dealloc, or_case=RISING),
        planted("missing fence after", WALK, ptx.FENCES_AFTER, "", each_but_around_dealloc, or_case=RISING),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES, "", together),
        planted("NoPE: missing wait for kv_free", NOPE, ptx.WAITS, ptx.NO_WAIT, alone(18), count=len(WAITS)),
        planted("NoPE: missing wait for kv_ready", NOPE, ptx.WAITS, ptx.NO_WAIT, alone(26), count=len(WAITS)),
        planted("NoPE: missing wait for probs_ready", NOPE, ptx.WAITS, ptx.NO_WAIT, alone(28), count=len(WAITS)),
        planted("256 + 64: missing copy", NARROW, ptx.TENSOR_COPIES),
        planted("256 + 64: missing product", NARROW, ptx.PRODUCTS, "", alone(0, 9, 10, 13)),
        planted("256 + 64: missing commit", NARROW, ptx.COMMITS),
        planted("256 + 64: missing proxy fences", NARROW, ptx.PROXY_FENCES, "", together),
        planted("NoPE: missing copy", NOPE, ptx.TENSOR_COPIES),
        planted("NoPE: missing product", NOPE, ptx.PRODUCTS, "", alone(0, 15, 16, 31, 32, 39)),
        planted("missing waits for loads", WALK, ptx.LOAD_WAITS, "", together),
    ),
)
