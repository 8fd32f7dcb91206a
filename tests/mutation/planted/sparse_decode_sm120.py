"""Bugs in sparse decode for RTX boards."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM120
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, each, planted, together

# One CTA; indices of every kind, lengths that end inside a tile.
POOL = Pool(150, 140, 61, lengths=(140, 70, 3))
CASE = SparseDecodeCase(batch=3, h_q=9, main=POOL, indices="mixed", sinks="drawn", sm_count=1)
RISING = replace(CASE, batch=1, main=Pool(140, 140), values="rising", indices="valid")  # the references move
V41 = replace(CASE, cache="v41")
FP4 = replace(CASE, cache="v41", extra_cache="v41_fp4", extra=Pool(150, 140, 16, lengths=(140, 65, 1)))
BOTH_ROWS = replace(CASE, h_q=20, sm_count=2)  # two CTAs, the second one with rows that do not exist
PHASES = r"xor\.b32 \s*(%r\d+), \1, 1;"  # of the stage that warps bring
SYNCS = r"bar\.sync \s*1, 128;"  # behind Q, behind the maxima, behind P, behind the sums
MASKS = r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+), %p\d+;"
HALVES = r"selp\.b32 (\s*(%r\d+)), %r\d+, (%r\d+), %p\d+;(?=\s*shl\.b32 \s*%r\d+, \2, 4;)"  # of 16 bytes of e2m1 values
FACTORS = r"selp\.f32 (\s*%r\d+), %r\d+, 0f3F800000, %p\d+;"

SUITE = Suite(
    SM120,
    {"656": CASE, "rising": RISING, "v41": V41, "v41_fp4": FP4, "two CTAs": BOTH_ROWS},
    (
        planted("missing arrival", CASE, ptx.ARRIVALS, "", each),
        planted("missing wait for keys or for their place", CASE, ptx.WAITS, ptx.NO_WAIT, each),
        planted("missing barrier", CASE, SYNCS, "", each, count=4),
        planted("warps of a stage wait for the same phase of every tile", CASE, PHASES, "", together, count=1),
        planted("mask without effect", CASE, MASKS, r"mov.f32 \1, \2;", together),
        planted("sink in base 2", CASE, ptx.LOG2_E, ptx.ONE, together),
        planted("no rescale", RISING, FACTORS, r"mov.f32 \1, 0f3F800000;", together),
        planted("v41: no scale", V41, r"shl\.b32 (\s*%r\d+), %r\d+, 23;", r"mov.b32 \1, 0x3F800000;", together),
        planted("v41_fp4: e2m1 values 64 times too small", FP4, r"(mul\.f32 \s*%r\d+, %r\d+), 0f42800000;", rf"\1, {ptx.ONE};", together),
        planted("v41_fp4: both lanes take the lower half", FP4, HALVES, r"mov.b32 \1, \3;", together),
        planted("keys of another warp", CASE, ptx.SHUFFLES, ptx.LANE_0, together),
    ),
)
