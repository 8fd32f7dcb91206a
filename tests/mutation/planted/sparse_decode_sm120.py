"""Bugs in sparse decode for RTX boards: the kernels for up to 16 heads, and those for more, with keys on M."""

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
MANY = replace(CASE, h_q=70, sm_count=2)  # two CTAs, of the second one pairs have no row
MANY_RISING = replace(RISING, h_q=30)
MANY_LATENT, MANY_V41, MANY_FP4 = replace(MANY, cache="latent"), replace(V41, h_q=17), replace(FP4, h_q=17)
SPLIT = replace(RISING, h_q=17, sm_count=2, values="normal")  # one request, which is cut
SPREAD = replace(CASE, batch=1, main=Pool(140, 140), h_q=40, sm_count=8)  # 32 heads a CTA
PHASES = r"xor\.b32 \s*(%r\d+), \1, 1;"  # of the stage that warps bring
SYNCS = r"bar\.sync \s*1, 128;"  # behind Q, behind the maxima, behind P, behind the sums
MASKS = r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+), %p\d+;"
HALVES = r"selp\.b32 (\s*(%r\d+)), %r\d+, (%r\d+), %p\d+;(?=\s*shl\.b32 \s*%r\d+, \2, 4;)"  # of 16 bytes of e2m1 values
PAIR_SYNCS = r"bar\.sync \s*%r\d+, 64;"  # behind P, behind the weights
TURN_WAITS, TURN_ARRIVALS = r"bar\.sync \s*%r\d+, 128;", r"bar\.arrive \s*%r\d+, 128;"
COPY_WAITS = r"cp\.async\.wait_group \s*\d;"
LANDED = r"cp\.async\.mbarrier\.arrive[^;]*;"
SOURCES = r"selp\.b32 (\s*%r\d+), 0, 16, %p\d+;"
SPLIT_STORES = r"st\.global\.b32 \s*\[[^]]*\], %r\d+;"
FACTORS = r"selp\.f32 (\s*%r\d+), %r\d+, 0f3F800000, %p\d+;"
CTA_ROWS = r"selp\.b32 (\s*%r\d+), 64, 32, %p\d+;"
FIRST_ROWS = r"selp\.b32 (\s*%r\d+), 6, 5, %p\d+;"

SUITE = Suite(
    SM120,
    {
        "656": CASE,
        "rising": RISING,
        "v41": V41,
        "v41_fp4": FP4,
        "many": MANY,
        "many, rising": MANY_RISING,
        "many, latent": MANY_LATENT,
        "many, v41": MANY_V41,
        "many, v41_fp4": MANY_FP4,
        "many, cut": SPLIT,
        "spread": SPREAD,
    },
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
        planted("many: missing arrival", MANY, ptx.ARRIVALS, "", each),
        planted("many: missing wait for keys or for their place", MANY, ptx.WAITS, ptx.NO_WAIT, each),
        planted("many: missing barrier of a pair", MANY, PAIR_SYNCS, "", each, count=2),
        planted("many: a pair begins a stage out of turn", MANY, TURN_WAITS),
        planted("many: no turn is given", MANY, TURN_ARRIVALS),
        planted("many: codes converted before they land", MANY, COPY_WAITS, "", each, count=4),
        planted("many: copies without a signal", MANY_LATENT, LANDED),
        planted("many: absent keys read", MANY, SOURCES, r"mov.b32 \1, 16;", together),
        planted("many: mask without effect", MANY, MASKS, r"mov.f32 \1, \2;", together),
        planted("many: every key taken for present", MANY, ptx.BALLOTS, r"mov.b32 \1, -1;"),
        planted("many: sink in base 2", MANY, ptx.LOG2_E, ptx.ONE, together),
        planted("many: no rescale", MANY_RISING, FACTORS, r"mov.f32 \1, 0f3F800000;", together),
        planted("many: keys of another warp", MANY, ptx.SHUFFLES, ptx.LANE_0, together),
        planted("many, v41: no scale", MANY_V41, r"shl\.b32 (\s*%r\d+), %r\d+, 23;", r"mov.b32 \1, 0x3F800000;", together),
        planted("many, v41_fp4: all keys of one cache", MANY_FP4, ptx.BALLOTS, r"mov.b32 \1, 0;", each),
        planted("many: CTAs end behind 32 heads", MANY, CTA_ROWS, r"mov.b32 \1, 32;", together),
        planted("spread: CTAs begin 64 heads apart", SPREAD, FIRST_ROWS, r"mov.b32 \1, 6;", together),
        planted("many, cut: columns of a split are lost", SPLIT, SPLIT_STORES, "", together),
    ),
)
