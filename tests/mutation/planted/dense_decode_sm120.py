"""Bugs in dense decode for RTX boards."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM120
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, each, planted, together

# One CTA walks three requests: keys past the end, rows that do not see the last keys.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(140, 70, 3), h_q=7, causal=True, sinks="drawn", sm_count=1)
RISING = replace(WALK, batch=1, lengths=(140,), values="rising")  # the references move
BOTH_ROWS = replace(WALK, h_q=11, sm_count=2)  # two CTAs, the second one with rows that do not exist
BROKEN = replace(WALK, lengths=(64, 180, 100), page_size=16, broken=True)  # pages of a request are below 0
WINDOW = replace(WALK, lengths=(400, 70, 3), page_size=16, window=60, window_sink=5)  # tiles are skipped, keys that nobody sees are NaN
E4M3 = replace(WALK, operands="fp8_cache")
E4M3_QUERIES = replace(WALK, operands="fp8")
PHASES = r"xor\.b32 \s*(%r\d+), \1, 1;"  # of the stage that warps bring
SYNCS = r"bar\.sync \s*1, 128;"  # behind Q, behind the maxima, behind P, behind the sums
SEEN_FIRST = r"selp\.f32 (\s*%r\d+), (%r\d+), 0fFF800000, %p\d+;"  # of keys whose bit is tested for not being 0
HIDDEN_FIRST = r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+), %p\d+;"  # for being 0; and lse of splits
FACTORS = r"selp\.f32 (\s*%r\d+), %r\d+, 0f3F800000, %p\d+;"
SCALE_OF_Q = r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_4\];"
ADDRESSES = r"selp\.b64 (\s*%rd\d+), (%rd\d+), 0, %p\d+;"

SUITE = Suite(
    SM120,
    {"walk": WALK, "rising": RISING, "two CTAs": BOTH_ROWS, "broken": BROKEN, "window": WINDOW, "e4m3": E4M3, "e4m3 queries": E4M3_QUERIES},
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
    ),
)
