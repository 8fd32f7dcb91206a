"""Bugs in dense decode for Hopper with keys on M, over an e4m3 cache."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.spec.dense_decode import FP8_CACHE
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, each, each_in, planted, together

# One CTA; work tiles of odd and of even numbers of tiles, lengths that end inside a tile and inside 16 keys of a warp.
WALK = DenseDecodeCase(batch=4, s_q=3, lengths=(390, 70, 130, 3), h_q=3, causal=True, operands=FP8_CACHE, sinks="drawn", sm_count=1)
RISING = replace(WALK, batch=1, lengths=(390,), values="rising")  # the references move
BROKEN = replace(WALK, broken=True)
SMALL_PAGES = replace(WALK, page_size=16)
PART_WAITS = 8  # before fragments are overwritten, which have registers of their own in PTX, where no bug shows
MASKS = r"selp\.f32 (\s*%r\d+), (?:(%r\d+), 0fFF800000|0fFF800000, (%r\d+)),"

SUITE = Suite(
    SM90,
    {"walk": WALK, "rising": RISING, "broken": BROKEN, "small pages": SMALL_PAGES},
    (
        planted("missing arrival", WALK, ptx.ARRIVALS, "", each),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES, "", each),
        planted("missing wait for products", WALK, ptx.WGMMA_WAITS, "", each_in(PART_WAITS)),
        planted("mask without effect", WALK, MASKS, r"selp.f32 \1, \2\3, \2\3,", together),
        planted("sink in base 2", WALK, ptx.LOG2_E, ptx.ONE, together),
        planted("no rescale", RISING, r"ex2\.approx\.ftz\.f32 ([^,]*), [^;]*;", r"mov.f32 \1, 0f3F800000;", together),
        # A thread's second key lies 8 behind its first, in the same page. It is read only if it exists.
        planted("second keys past the end", WALK, r"setp\.gt\.s32 (\s*%p\d+, %r\d+), 8;", r"setp.gt.s32 \1, 0;", together),
        planted("pages outside the cache", BROKEN, r"setp\.lt\.u32 (\s*%p\d+), %r\d+, %r\d+;", r"setp.eq.u32 \1, 0, 0;", together),
        planted("four pages a tile", SMALL_PAGES, r"selp\.b32 (\s*%r\d+), 4, 2,", r"selp.b32 \1, 2, 2,", together),
        planted("missing scale", WALK, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_5\];", r"mov.b64 \1, 0;", together),
    ),
)
