"""Bugs in topk_indices.

One source serves all architectures, so each bug is planted in the kernel of one of them, in turn.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.topk_indices import RESIDENT, STREAM_TILE
from cute_mla.testing.operations.indexer_topk.case import IndexerTopkCase
from cute_mla.testing.operations.topk_indices.case import TopkIndicesCase
from tests.mutation.planting import alone, each, in_turn, planted, together

# A cluster of 8, one CTA, and two CTAs whose warps have more numbers than stay in shared memory.
SHARED = TopkIndicesCase(rows=2, columns=2600, topk=300, values="few", outputs="given")
NARROW = replace(SHARED, values="narrow")
CROWDED = replace(SHARED, values="crowded", topk=40)
CROWDED_MANY = replace(CROWDED, topk=1000)  # which the last choice narrows once more
SPECIALS = replace(SHARED, values="specials", topk=1500)
NAN = replace(SHARED, values="nan")
PLATEAU = replace(SHARED, values="plateau")
ALONE_EQUAL = replace(SHARED, columns=4500, values="equal", sm_count=1)  # more than the list of a warp holds
RANDOM = replace(SHARED, values="random")
EDGES = replace(SHARED, rows=8, lengths="edges", values="random")
SHORT = replace(SHARED, rows=3, lengths="short")
LONG = TopkIndicesCase(rows=1, columns=2 * RESIDENT + 900, topk=300, values="random", outputs="given", sm_count=1)
LONG_TIES = replace(LONG, values="few")
LONG_EQUAL = replace(LONG, values="equal", topk=40)
ONCE = TopkIndicesCase(rows=2, columns=4 * STREAM_TILE + 700, topk=300, values="few", outputs="given", sm_count=1)  # read once
ONCE_RISING = replace(ONCE, values="rising", topk=2048)
ONCE_SCARCE = replace(ONCE, values="scarce", topk=1900)
ONCE_EQUAL = replace(ONCE, values="equal")
ONCE_NAN = replace(ONCE, values="nan", topk=2000)
ONCE_FULL = replace(ONCE, values="filling", topk=101)  # one number more than the list holds
SLOTS = IndexerTopkCase(requests=3, tokens=2, keys=500, heads=8, page_size=64, topk=300, slots=True, lengths="random", outputs="given")
BROKEN = replace(SLOTS, lengths="full", topk=450, broken=True)

NANS = r"selp\.b32(\s+%r\d+, %r\d+), 1,"
ZEROS = r"add\.f32(\s+%r\d+, %r\d+), 0f00000000;"
CLEARED = r"st\.shared\.v4\.b32\s+\[%r\d+\+\d+\], \{0, 0, 0, 0\};"
LOWER_LANES = r"and\.b32(\s+%r\d+, %r\d+), %r\d+;(\s+popc)"
CLUSTER_BARRIERS = r"barrier\.cluster\.arrive;\s+barrier\.cluster\.wait;"
BARRIERS = r"bar\.sync\s+0;"
PEERS = r"mapa\.shared::cluster\.u32(\s+%r\d+, %r\d+), 1;"
SCANS = r"shfl\.sync\.up\.b32(\s+%r\d+, %r\d+), (\d+), 0, -1;"
SUMS = r"shfl\.sync\.bfly\.b32(\s+%r\d+, %r\d+), (\d+), 31, -1;"
CANDIDATES = r"setp\.ge\.u32(\s+%p\d+, %r\d+, %r\d+);(?=\s*(?:vote|and\.pred))"
LISTED = r"setp\.gt\.s32(\s+%p\d+, %r\d+), 256;"
TIES = r"setp\.lt\.s32(\s+%p\d+, %r\d+, %r\d+);(?=\s*and\.pred[^;]*;\s*or\.pred)"
BEHIND_LAST = r"selp\.b32(\s+%r\d+, %r\d+), -1, %p\d+;"
KEPT = r"setp\.gt\.u32(\s+%p\d+, %r\d+), 1023;"
REST = r"setp\.lt\.s32(\s+%p\d+, %r\d+), 1024;"
FULL_LIST = r"setp\.lt\.s32(\s+%p\d+, %r\d+), 8193;"
TILE_WAITS = r"cp\.async\.wait_group(\s+)1;"
LAST_TIES = r"setp\.ge\.s32(\s+%p\d+, %r\d+, %r\d+);(\s+selp)"
BELOW_LEAST = r"setp\.lt\.u32(\s+%p\d+, %r\d+, %r\d+);"
THERE = r"(selp\.b32\s+%r\d+, 65535, %r\d+, %p\d+;\s+)and\.b32(\s+%r\d+, %r\d+), %r\d+;"
DIGIT_ABOVE = r"shl\.b32(\s+%r\d+)(, %r\d+, %r\d+);(?=\s+setp\.eq\.b32\s+%p\d+, %r\d+, 2047;)"
PAGE_BELOW = r"setp\.gt\.s32(\s+%p\d+, %r\d+), -1;"
PAGE_BEYOND = r"setp\.lt\.s32(\s+%p\d+), %r\d+, %r\d+;(?=\s*and\.b32[^;]*;\s*mad)"
IN_PAGE = r"and\.b32(\s+%r\d+, %r\d+), %r\d+;(?=\s*mad\.lo\.s32)"

BUGS = (
    planted("NaN is the greatest", NAN, NANS, r"selp.b32\1, -1,", together),
    planted("-0 is less than 0", PLATEAU, ZEROS, r"mov.b32\1;", together),
    planted("a far distance is negative", CROWDED, r"min\.u32(\s+%r\d+, %r\d+, 2047)", r"min.s32\1", together),
    planted("a histogram is not cleared", SHARED, CLEARED, "", each, or_case=CROWDED_MANY),
    planted("a lane counts those above it, too", RANDOM, LOWER_LANES, r"mov.b32\1;\2", alone(0, 16, 17), or_case=SHARED, count=24),
    planted("no barrier of the cluster", SHARED, CLUSTER_BARRIERS, "", each, or_case=CROWDED),
    planted("no barrier of the CTA", SHARED, BARRIERS, "", each, or_case=CROWDED),
    planted("one CTA: no barrier", replace(SHARED, columns=1500), BARRIERS, "", each, or_case=replace(CROWDED, columns=1500)),
    # Of the choices that narrow; those before them only bound, and a lower bound is as good.
    planted("counts of a peer left out", RANDOM, PEERS, r"mapa.shared::cluster.u32\1, 0;", alone(4, 5), or_case=NARROW, count=6),
    planted("a sum over lanes cut short", RANDOM, SCANS, r"shfl.sync.up.b32\1, 0, 0, -1;", alone(20, 24, 25, 29), or_case=NARROW, count=30),
    planted("a sum of digits cut short", RANDOM, SUMS, r"shfl.sync.bfly.b32\1, 0, 31, -1;", alone(8, 11), or_case=NARROW, count=32),
    planted("the bound is no candidate", SHARED, CANDIDATES, r"setp.gt.u32\1;", together),
    planted("a list that is full is all", ALONE_EQUAL, LISTED, r"setp.gt.s32\1, 99999;", together),
    planted("a tie too many", SHARED, TIES, r"setp.le.s32\1;", alone(0)),
    planted("positions behind the last", SHORT, BEHIND_LAST, r"mov.b32\1;", together, count=1),
    planted("long rows: keys of another number kept", LONG, KEPT, r"setp.gt.u32\1, 1279;", together),
    planted("long rows: a kept key in the place of another", LONG_EQUAL, REST, r"setp.lt.s32\1, 1280;", together, or_case=LONG_TIES),
    planted("long rows: the bound is no candidate", LONG_TIES, CANDIDATES, r"setp.gt.u32\1;", together),
    planted("slots: pages below 0 used", BROKEN, PAGE_BELOW, r"setp.gt.s32\1, -9;", together),
    planted("slots: pages beyond the cache used", BROKEN, PAGE_BEYOND, r"setp.ge.s32\1, 0, 0;", together),
    planted("slots: the first key of each page", SLOTS, IN_PAGE, r"and.b32\1, 0;", together),
    planted("read once: a full list takes one more", ONCE_FULL, FULL_LIST, r"setp.lt.s32\1, 8194;", together, count=1),
    planted("read once: no wait for a tile", ONCE_RISING, TILE_WAITS, r"cp.async.wait_group\g<1>2;", alone(-1), count=2),
    planted("read once: no barrier", ONCE_RISING, BARRIERS, "", each, or_case=ONCE_SCARCE),
    planted("read once: a tie too many", ONCE_SCARCE, LAST_TIES, r"setp.gt.s32\1;\2", together),
    planted("read once: the least key is dropped", ONCE, BELOW_LEAST, r"setp.le.u32\1;", together, or_case=ONCE_RISING),
    planted("read once: numbers behind the last", ONCE_EQUAL, THERE, r"\1mov.b32\2;", together),
    planted("read once: a threshold above the chosen digit", ONCE_RISING, DIGIT_ABOVE, r"shl.b32\1\2; add.s32\1,\1, 65536;", together),
)
UNBROKEN = (
    {"shared": SHARED, "long": LONG, "slots": SLOTS, "once": ONCE_NAN},
    {"specials": SPECIALS, "edges": EDGES, "broken": BROKEN, "once": ONCE_FULL},
)

SUITES = in_turn("topk_indices", UNBROKEN, BUGS)
