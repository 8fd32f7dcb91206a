"""Bugs in dense decode for Blackwell over an e4m3 cache.

The roles score, output and mma are the 16-bit kernel's; dense_decode_sm100.py breaks them.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.spec.dense_decode import FP8_CACHE
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, between, planted, together

# One pair of CTAs, tiles enough to go round the ring, lengths that end inside a tile.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 20), h_q=9, causal=True, operands=FP8_CACHE, sm_count=2)
PAGE_IN_CACHE = r"setp\.lt\.u32 (\s*(%p\d+)), %r\d+, %r\d+;((?:[^;]*;){0,6}?\s*selp\.b64 [^;]*, \2;)"  # or the address of a row is 0
BROKEN = replace(WALK, broken=True)
PEAKS = replace(WALK, values="peaks")  # RoPE columns matter only where few keys decide

PASSES = 9  # of the convert role, over a tile: eight of latent columns, one of RoPE columns
COPIES = r"cp\.async\.cg\.shared\.global [^;]*;"
FIRST_GROUP = r"setmaxnreg[^;]*;|cp\.async\.commit_group;"  # of the convert role: its begin, the end of its copies; then the next role
CONVERSIONS = r"cvt\.rn\.b?f16x2\.e4m3x2 (\s*%r\d+), %rs\d+;"
ENDS = r"setp\.ge\.s32 (\s*%p\d+), %r\d+, %r\d+;(\s*mov\.b(?:32|64) \s*%rd?\d+, 0;\s*mov\.b32 \s*%r\d+, -1;)"

SUITE = Suite(
    SM100,
    {"walk": WALK, "peaks": PEAKS, "small pages": replace(WALK, page_size=16), "broken": BROKEN},
    (
        planted("missing arrival of a stage", WALK, r"mbarrier\.arrive\.shared::cluster\.b64 [^;]*;", "", alone(-1)),
        planted("missing proxy fence of a stage", WALK, ptx.PROXY_FENCES, "", alone(-1)),
        planted("missing wait for a stage", WALK, ptx.WAITS, ptx.NO_WAIT, between(FIRST_GROUP, -3, -2)),
        *(planted(f"missing copy {number}", WALK, COPIES, "", alone(number), count=PASSES) for number in range(PASSES)),
        planted("copies of a tile still under way", WALK, ptx.COPY_WAITS_BUT_TWO, "cp.async.wait_group 3;"),
        planted("copies of the last tile still under way", WALK, ptx.COPY_WAITS, "cp.async.wait_group 1;"),
        *(
            planted(f"{which} pair of values not converted", PEAKS, CONVERSIONS, r"mov.b32 \1, 0;", alone(index))
            for which, index in (("first", 0), ("last", 8 * PASSES - 1))  # of the main loop
        ),
        planted("row of another key, first", WALK, ptx.SHUFFLES, ptx.LANE_0, alone(0)),
        planted("row of another key, last", WALK, ptx.SHUFFLES, ptx.LANE_0, alone(-1)),
        planted("keys past the end", WALK, ENDS, r"setp.eq.u32 \1, 0, 1;\2"),
        planted("pages outside the cache", BROKEN, PAGE_IN_CACHE, r"setp.eq.u32 \1, 0, 0;\3"),
        # The scale of the scores, and that of the values.
        planted("missing scales", WALK, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_5\];", r"mov.b64 \1, 0;", together),
    ),
)
