"""Bugs in dense decode for RTX boards: the kernels for up to 16 rows, and those for more, with keys on M."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM120
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, each, planted, together

# One CTA walks three requests: keys past the end, rows that do not see the last keys.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(140, 70, 3), h_q=7, causal=True, sinks="drawn", sm_count=1)
RISING = replace(WALK, batch=1, lengths=(140,), values="rising")  # the references move
BOTH_ROWS = replace(WALK, h_q=11, batch_invariant=True, sm_count=2)  # two CTAs, the second one with rows that do not exist
BROKEN = replace(WALK, lengths=(64, 180, 100), page_size=16, broken=True)  # pages of a request are below 0
WINDOW = replace(WALK, lengths=(400, 70, 3), page_size=16, window=60, window_sink=5)  # tiles are skipped, keys that nobody sees are NaN
E4M3 = replace(WALK, operands="fp8_cache")
E4M3_QUERIES = replace(WALK, operands="fp8")
MANY = replace(WALK, h_q=35, sm_count=2)  # two CTAs, of the second one pairs have no row
MANY_RISING, MANY_BROKEN, MANY_WINDOW = (replace(case, h_q=9) for case in (RISING, BROKEN, WINDOW))
MANY_E4M3, MANY_E4M3_QUERIES = (replace(MANY, operands=operands) for operands in ("fp8_cache", "fp8"))
CUT = replace(MANY_RISING, sm_count=2, values="normal")
PHASES = r"xor\.b32 \s*(%r\d+), \1, 1;"  # of the stage that warps bring
SYNCS = r"bar\.sync \s*1, 128;"  # behind Q, behind the maxima, behind P, behind the sums
SEEN_FIRST = r"selp\.f32 (\s*%r\d+), (%r\d+), 0fFF800000, %p\d+;"  # of keys whose bit is tested for not being 0
HIDDEN_FIRST = r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+), %p\d+;"  # for being 0; and lse of splits
FACTORS = r"selp\.f32 (\s*%r\d+), %r\d+, 0f3F800000, %p\d+;"
SCALE_OF_Q = r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_4\];"
PAIR_SYNCS = r"bar\.sync \s*%r\d+, 64;"  # behind P, behind the weights
LANDED = r"cp\.async\.mbarrier\.arrive[^;]*;"
SOURCES = r"selp\.b32 (\s*%r\d+), 0, 16, %p\d+;"
SPLIT_STORES = r"st\.global\.b32 \s*\[[^]]*\], %r\d+;"
ADDRESSES = r"selp\.b64 (\s*%rd\d+), (%rd\d+), 0, %p\d+;"

SUITE = Suite(
    SM120,
    {
        "walk": WALK,
        "rising": RISING,
        "two CTAs": BOTH_ROWS,
        "broken": BROKEN,
        "window": WINDOW,
        "e4m3": E4M3,
        "e4m3 queries": E4M3_QUERIES,
        "many": MANY,
        "many, rising": MANY_RISING,
        "many, broken": MANY_BROKEN,
        "many, window": MANY_WINDOW,
        "many, e4m3": MANY_E4M3,
        "many, e4m3 queries": MANY_E4M3_QUERIES,
        "many, cut": CUT,
    },
    (
        planted("missing arrival", WALK, ptx.ARRIVALS, "", each),
        planted("missing wait for keys or for their place", WALK, ptx.WAITS, ptx.NO_WAIT, each),
        planted("missing barrier", WALK, SYNCS, "", each, count=4),
        planted("warps of a stage wait for the same phase of every tile", WALK, PHASES, "", together, count=1),
        planted("every second key unmasked", WALK, SEEN_FIRST, r"mov.f32 \1, \2;", together),
        planted("the others unmasked", WALK, HIDDEN_FIRST, r"mov.f32 \1, \2;", together),
        planted("sink in base 2", WALK, ptx.LOG2_E, ptx.ONE, together),
        planted("no rescale", RISING, FACTORS, r"mov.f32 \1, 0f3F800000;", together),
        planted("keys of another row of the page", WALK, ptx.SHUFFLES, ptx.LANE_0, together),
        planted("pages outside the cache are read", BROKEN, ADDRESSES, r"mov.b64 \1, \2;", together, count=1),
        planted("first page for a page below 0", BROKEN, ptx.PAGES, ptx.FIRST_PAGE, together),
        planted("e4m3: missing scale", E4M3, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_5\];", r"mov.b64 \1, 0;"),
        planted("e4m3: keys of another row of the page", E4M3, ptx.SHUFFLES, ptx.LANE_0, together),
        planted("e4m3: missing arrival", E4M3, ptx.ARRIVALS, "", each),
        planted("e4m3 queries: missing scale", E4M3_QUERIES, SCALE_OF_Q, r"mov.b64 \1, 0;"),
        planted("e4m3 queries: missing barrier", E4M3_QUERIES, SYNCS, "", each),
        planted("e4m3 queries: missing arrival", E4M3_QUERIES, ptx.ARRIVALS, "", each),
        planted("many: missing arrival", MANY, ptx.ARRIVALS, "", each),
        planted("many: missing wait for keys or for their place", MANY, ptx.WAITS, ptx.NO_WAIT, each),
        planted("many: missing barrier of a pair", MANY, PAIR_SYNCS, "", each, count=2),
        planted("many: copies without a signal", MANY, LANDED),
        planted("many: absent keys read", MANY, SOURCES, r"mov.b32 \1, 16;", together),
        planted("many: every second key unmasked", MANY, SEEN_FIRST, r"mov.f32 \1, \2;", together),
        planted("many: the others unmasked", MANY, HIDDEN_FIRST, r"mov.f32 \1, \2;", together),
        planted("many: sink in base 2", MANY, ptx.LOG2_E, ptx.ONE, together),
        planted("many: no rescale", MANY_RISING, FACTORS, r"mov.f32 \1, 0f3F800000;", together),
        planted("many: keys of another row of the page", MANY, ptx.SHUFFLES, ptx.LANE_0, together),
        planted("many: pages outside the cache are read", MANY_BROKEN, ADDRESSES, r"mov.b64 \1, \2;", each, count=2),
        planted("many: first page for a page below 0", MANY_BROKEN, ptx.PAGES, ptx.FIRST_PAGE, together),
        planted("many, cut: columns of a split are lost", CUT, SPLIT_STORES, "", together),
        planted("many, e4m3: missing arrival", MANY_E4M3, ptx.ARRIVALS, "", each),
        planted("many, e4m3: codes converted before they land", MANY_E4M3, ptx.COPY_WAITS),
        planted("many, e4m3: missing scale", MANY_E4M3, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_5\];", r"mov.b64 \1, 0;", each),
        planted("many, e4m3 queries: missing scale", MANY_E4M3_QUERIES, SCALE_OF_Q, r"mov.b64 \1, 0;"),
        planted("many, e4m3 queries: missing barrier of a pair", MANY_E4M3_QUERIES, PAIR_SYNCS, "", each, count=2),
    ),
)
