"""Bugs in dense decode for Blackwell with keys on M, with e4m3 queries over an e4m3 cache."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.spec.dense_decode import FP8
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each, each_but_around_dealloc, one_by_one, planted, together

# One CTA; work tiles of odd and of even numbers of tiles, more than there are stages, lengths that end inside a tile.
WALK = DenseDecodeCase(batch=4, s_q=3, lengths=(390, 70, 130, 3), h_q=3, causal=True, operands=FP8, sinks="drawn", sm_count=1)
RISING = replace(WALK, batch=1, lengths=(390,), values="rising")  # the references move
GAPS = replace(WALK, batch=6, tokens=(1, 0, 2, 3, 1, 1), lengths=(20, 5, 0, 70, 1, 64), s_q=1)  # work tiles without keys or of one tile
BROKEN = replace(WALK, broken=True)

# In the order of the PTX. None: the wait keeps a CTA alive for signals that nobody else waits for.
WAITS = (
    ("scores_ready", WALK),
    ("stats_free", GAPS),
    ("alpha_ready", WALK),
    ("kv_free before O is scaled", RISING),
    ("stats_ready", GAPS),
    ("kv_free before O is stored", WALK),
    ("kv_free", WALK),
    ("kv_free before the CTA ends", None),
    ("query_free", WALK),
    ("query_free before the CTA ends", None),
    ("query_free of the other Q before the CTA ends", None),
    ("query_ready", WALK),
    ("kv_ready", WALK),
    ("scores_free", WALK),
    ("probs_ready", WALK),
    ("output_ready", WALK),
)

SUITE = Suite(
    SM100,
    {"walk": WALK, "rising": RISING, "gaps": GAPS, "broken": BROKEN},
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;"),
        planted("missing barriers of a role", WALK, r"bar\.sync\s+[13], 128;"),
        planted("missing copy", WALK, ptx.TENSOR_COPIES),
        planted("missing wait for copies of Q", WALK, ptx.COPY_WAITS, ""),
        planted("missing commit", WALK, ptx.COMMITS, ""),
        planted("missing wait for stores of ones", WALK, ptx.STORE_WAITS, "", alone(0), count=2),
        planted("missing wait for stores of O", RISING, ptx.STORE_WAITS, "", alone(1), count=2),
        # 18 products of S, then twice four of O and one of the sum.
        planted("missing product", WALK, ptx.PRODUCTS, "", alone(0, 15, 17, 18, 21, 22, 27), count=28),
        planted("first page for a page below 0", BROKEN, ptx.PAGES, ptx.FIRST_PAGE, together),
        planted("mask without effect", WALK, r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+),", r"selp.f32 \1, \2, \2,", together),
        planted("unused rows not cleared", WALK, ptx.ZERO_STORES, "", together),
        planted("sink in base 2", WALK, ptx.LOG2_E, ptx.ONE, together),
        planted("missing fence before", WALK, ptx.FENCES_BEFORE, "", each_but_around_dealloc, or_case=RISING),
        planted("missing fence after", WALK, ptx.FENCES_AFTER, "", each_but_around_dealloc, or_case=RISING),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES, "", each),
        planted("missing waits for loads", WALK, ptx.LOAD_WAITS, "", together),
    ),
)
