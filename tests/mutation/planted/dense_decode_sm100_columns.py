"""Bugs in dense decode for Blackwell over 1,024 + 64 columns: what two CTAs that divide columns do otherwise than a pair."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from tests.mutation.planted import patterns as ptx
from tests.mutation.planted.cases_sm100 import GAPS, MANY, RISING, WALK
from tests.mutation.planting import Suite, alone, one_by_one, planted, together

WALK, GAPS, MANY, RISING = (replace(case, d_qk=1088) for case in (WALK, GAPS, MANY, RISING))
WINDOW = replace(WALK, s_q=1, causal=False, window=40, lengths=(91, 67, 300))  # the first request sees half of its first tile
RISING = replace(RISING, lengths=(384, 192))  # whole tiles: O is rescaled for the last one, too

TILE_PAGES = r"setp\.gt\.s32 (\s*%p\d+), %r\d+, 63;"  # whether a page holds a tile; lanes beyond the tile's boxes

# In the order of the PTX, as for the kernel of one pair: only waits for barriers that are used otherwise there have a case.
WAITS = (
    ("work_ready of the score role's first work tile", None),
    ("work_ready of score", None),
    ("scores_ready", WALK),
    ("probs_ready of the tile before", WALK),
    ("partial_ready", WALK),
    ("stats_free", GAPS),
    ("work_ready of the output role's first work tile", None),
    ("work_ready before its Q is looked for", None),
    ("pages_asked", None),
    ("work_ready of output", None),
    ("alpha_ready", WALK),
    ("kv_free before O is scaled", RISING),
    ("work_ready before Q of the next work tile is looked for", MANY),
    ("pages_asked, if no tile came before", None),
    ("scores_ready before Q is replaced", MANY),
    ("alpha_ready of the last tile", WALK),
    ("kv_free before O is scaled for the last tile", RISING),
    ("kv_free before O is stored", WALK),
    ("stats_ready", GAPS),
    ("work_ready of the load role's first work tile", None),
    ("work_ready of load", None),
    ("left_free", WALK),
    ("kv_free", WALK),
    ("kv_free before the CTA ends", None),
    ("work_free", None),
    ("work_free of the last record", None),
    ("work_ready of the mma role's first work tile", None),
    ("work_ready of mma", None),
    ("query_ready", WALK),
    ("left_ready", WALK),
    ("scores_free", WALK),
    ("kv_ready", WALK),
    ("probs_ready", WALK),
    ("output_ready", WALK),
    ("scores_free before the CTA ends", None),
)

SUITE = Suite(
    SM100,
    {"walk": WALK, "gaps": GAPS, "many": MANY, "rising": RISING, "window": WINDOW},
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, ptx.CLUSTER_ARRIVALS, or_case=MANY),
        planted("missing store to the peer", WALK, r"st\.async[^;]*;"),
        planted("missing copy to the peer", WALK, ptx.PEER_COPIES),
        planted("missing copy", WALK, ptx.TENSOR_COPIES),
        planted("page left out of a tile that sees half of it", WINDOW, TILE_PAGES, r"setp.ne.u32 \1, 0, 0;", alone(0), count=3),
        planted("missing commit", WALK, ptx.COMMITS),
        planted("commit to one CTA", WALK, r"(tcgen05\.commit[^;]*\], )%rs\d+;", r"\g<1>1;", count=1),
        planted("wrong number of arrivals", WALK, ptx.EXPECTED_ARRIVALS, r"\g<1>3;", or_case=MANY),
        planted("missing cluster barrier", WALK, r"barrier\.cluster\.(?:arrive|wait)[^;]*;"),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES, "", together),
    ),
)
