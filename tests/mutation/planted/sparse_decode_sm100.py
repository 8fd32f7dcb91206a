"""Bugs in sparse decode for Blackwell. dense_decode_sm100.py breaks the roles that sparse and dense decode share."""

from __future__ import annotations

from cute_mla.spec.arch import SM100
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each_in, planted, together

# One pair of CTAs, tiles enough to go round the ring, indices of every kind, lengths that end inside a tile.
WALK = SparseDecodeCase(batch=2, h_q=73, main=Pool(400, 390, 61, lengths=(390, 70)), indices="mixed", sinks="drawn", sm_count=2)
LAST_SCALE = 2 * (8 + 2) + 8 - 1  # of the shuffles of the main loop: two words of an address for each copied pass, then the scales
MASKS = r"selp\.f32 (\s*%r\d+), (%r\d+), 0fFF800000,"

SUITE = Suite(
    SM100,
    {"walk": WALK},
    (
        planted("mask without effect", WALK, MASKS, r"selp.f32 \1, \2, \2,", together),
        planted("row or scales of another key", WALK, ptx.SHUFFLES, ptx.LANE_0, alone(0, LAST_SCALE)),
        planted("sink in base 2", WALK, ptx.LOG2_E, ptx.ONE, together),
        planted("missing arrival of the gather role", WALK, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;", "", each_in(-2)),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES, "", together),
        planted("missing copy, first and last", WALK, r"cp\.async\.c[ag]\.shared\.global [^;]*;", "", alone(0, -1)),
        planted("copies of a tile still under way", WALK, ptx.COPY_WAITS_BUT_ONE, "cp.async.wait_group 2;"),
        planted("copies of the last tile still under way", WALK, ptx.COPY_WAITS, "cp.async.wait_group 1;"),
    ),
)
