"""Bugs in dense decode for Hopper over an e4m3 cache.

The roles score and output are the 16-bit kernel's; dense_decode_sm90.py breaks them.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.spec.dense_decode import FP8_CACHE
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Planted, Suite, alone, planted, together, together_in

# One CTA, tiles enough to go round the rings, lengths that end inside a tile, in either half of it.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(330, 70, 20), h_q=9, causal=True, operands=FP8_CACHE, sm_count=1)
BROKEN = replace(WALK, broken=True)
SMALL_PAGES = replace(WALK, page_size=16)
PEAKS = replace(WALK, values="peaks")  # RoPE columns matter only where few keys decide

# Of the convert role, which comes first in the PTX. Per tile each stage has a fence and an arrival, and each but that of the RoPE columns a
# wait. The first stage of a work tile has one more wait.
STAGES = 5
FENCED_STAGES = (0, 1, 3, 4)  # score waits for the RoPE columns, stage 2, last: the fences of the stages behind them hold for them, too
WAITS = 5
CONVERSIONS = r"cvt\.rn\.f16x2\.e4m3x2 (\s*%r\d+), %rs\d+;"


def missing_copy(column: int) -> Planted:
    """Delete the copies of 16 columns from this one on."""
    offset = rf"\+{column}" if column else ""
    return planted(f"columns from {column} not copied", WALK, rf"cp\.async\.cg[^;]*, \[%rd\d+{offset}\], [^;]*;", "", together)


SUITE = Suite(
    SM90,
    {"walk": WALK, "peaks": PEAKS, "small pages": SMALL_PAGES, "broken": BROKEN},
    (
        *(planted(f"missing arrival of stage {stage}", WALK, ptx.ARRIVALS, "", alone(stage)) for stage in range(STAGES)),
        *(planted(f"missing proxy fence of stage {stage}", WALK, ptx.PROXY_FENCES, "", alone(stage)) for stage in FENCED_STAGES),
        planted("missing waits for stages", WALK, ptx.WAITS, ptx.NO_WAIT, together_in(0, WAITS)),
        *(missing_copy(column) for column in range(0, 576, 64)),
        planted("copies of a stage still under way", WALK, r"cp\.async\.wait_group \s*1;", "cp.async.wait_group 2;"),
        *(
            planted(f"{which} pair of values not converted", PEAKS, CONVERSIONS, r"mov.b32 \1, 0;", alone(index))
            for which, index in (("first", 0), ("last", -1))
        ),
        planted("first low halves of fp32 numbers", WALK, r"mov\.b32 (\s*%r\d+), 30258;", r"mov.b32 \1, 0x5410;", alone(0)),
        planted("last low halves of fp32 numbers", WALK, r"mov\.b32 (\s*%r\d+), 30258;", r"mov.b32 \1, 0x5410;", alone(-1)),
        planted("wrong swizzle", WALK, r"xor\.b32 (\s*%r\d+, %r\d+), 16;", r"add.s32 \1, 16;"),
        # A thread's second key lies half a tile behind its first. Its page is looked up only if the key exists.
        planted("keys past the end", WALK, r"setp\.lt\.s32 (\s*%p\d+, %r\d+), 33;", r"setp.lt.s32 \1, 1;"),
        planted("pages outside the cache", BROKEN, r"setp\.lt\.u32 (\s*%p\d+), %r\d+, %r\d+;", r"setp.eq.u32 \1, 0, 0;"),
        # With pages of 16 keys, the entry of the second key is two further in the table.
        planted("page of the first key for the second", SMALL_PAGES, r"selp\.b64 (\s*%rd\d+), 1, 0, ", r"selp.b64 \1, 0, 0, "),
        # The scale of the scores, and that of the values.
        planted("missing scale", WALK, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_5\];", r"mov.b64 \1, 0;"),
    ),
)
