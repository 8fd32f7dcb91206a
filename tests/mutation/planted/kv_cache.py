"""Bugs in the kernels that write and gather keys.

One source serves all architectures, so each bug is planted in the kernel of one of them, in turn.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.testing.operations.cache_gather.case import CacheGatherCase
from cute_mla.testing.operations.cache_write.case import CacheWriteCase
from tests.mutation.planting import in_turn, planted, together

NASTY = CacheWriteCase(cache="fp8_656", values="nasty")
PAGES = CacheWriteCase(cache="fp8_584", values="nasty", page_size=16, pages=9)
FLAT = CacheWriteCase(cache="fp8_576", scale_of_cache=0.4)
ROWS = CacheGatherCase(cache="fp8_656", lengths=(30, 0, 40), starts=(5, 0, 17), page_size=16, pages=9)
BROKEN = replace(ROWS, broken=True)
WIDE = CacheWriteCase(cache="latent_1088")
WIDE_ROWS = replace(ROWS, cache="latent_1088")
MANY = CacheGatherCase(lengths=(*(0,) * 40, 3, *(0,) * 30, 2), page_size=16)

NEGATIVE_SLOT = r"setp\.lt\.s64\s+(%p\d+), (%rd\d+), 0;"
SLOT_BEYOND = r"setp\.ge\.s64\s+(%p\d+), (%rd\d+), (%rd\d+);"
DIVISION = r"div\.rn\.f32(\s+%r\d+, %r\d+), %r\d+;"
PAIRS = r"(cvt\.rn\.satfinite\.e4m3x2\.f32\s+%rs\d+), (%r\d+), (%r\d+);"
PAGE_BEYOND = r"(setp\.gt\.s32\s+%p\d+, %r\d+, -1;\s*)setp\.lt\.s32\s+(%p\d+), %r\d+, %r\d+;"
REQUEST_END = r"setp\.le\.s32\s+(%p\d+, %r\d+, %r\d+);(\s*vote)"
REQUEST_START = r"(ld\.global\.b32\s+%r\d+, \[%rd\d+)(\];\s*setp\.lt\.s32)"

BUGS = (
    planted("negative slots written", NASTY, NEGATIVE_SLOT, r"setp.lt.s64 \1, \2, -9223372036854775807;", together),
    planted("slots past the cache written", PAGES, SLOT_BEYOND, r"setp.lt.s64 \1, \2, -5;", together),
    planted("lane left out of the maximum", NASTY, r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 8,", r"\1, 0,", together),
    planted("half a group", PAGES, r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 4,", r"\1, 0,", together),
    planted("other largest e4m3", NASTY, r"0f43E00000", "0f43E10000", together),
    planted("no least power of two", PAGES, r"(max\.s32\s+%r\d+, %r\d+), 122;", r"\1, 0;", together),
    planted("infinity taken for a number", NASTY, r"\b213909504[01]\b|\b2139095039\b", "2139095042", together),
    planted("scale not rounded up to a power of two", PAGES, r"\b2097151\b", "0", together),
    planted("scale of the cache left out", FLAT, DIVISION, r"div.rn.f32\1, 0f3F800000;", together),
    planted("columns of a pair exchanged", NASTY, PAIRS, r"\1, \3, \2;", together),
    planted("last vector of 1,088 columns over another", WIDE, r"(st\.global\.v4\.b32\s+\[%rd\d+\+)1536\]", r"\g<1>1024]", together),
    planted("request that ends a row late", ROWS, REQUEST_END, r"setp.lt.s32 \1;\2", together),
    planted("32 requests at most", MANY, r"setp\.eq\.b32\s+(%p\d+), (%r\d+), -1;", r"setp.eq.b32 \1, \2, 77;", together),
    planted("pages below 0 read", BROKEN, r"setp\.gt\.s32\s+(%p\d+), (%r\d+), -1;", r"setp.gt.s32 \1, \2, -9;", together),
    planted("pages past the cache read", BROKEN, PAGE_BEYOND, r"\1setp.ge.s32 \2, 0, 0;", together),
    planted("another vector of 1,088 columns", WIDE_ROWS, r"(ld\.global\.v4\.b32[^;]*\[%rd\d+\+)1536\]", r"\g<1>1024]", together),
    planted("start of another request", ROWS, REQUEST_START, r"\1+4\2", together),
)
UNBROKEN = ({"write": NASTY, "wide": WIDE}, {"gather": ROWS, "broken": BROKEN, "wide_rows": WIDE_ROWS})

SUITES = in_turn("kv_cache", UNBROKEN, BUGS)
