"""Bugs in the kernels that write the indexer's keys and prepare its queries.

One source serves all architectures, so each bug is planted in the kernel of one of them, in turn.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.testing.operations.index_write.case import IndexWriteCase
from tests.mutation.planting import each, in_turn, planted, together

NASTY = IndexWriteCase(values="nasty", hadamard=True)
EXPONENTS = replace(NASTY, rope="interleaved", hadamard=False, scale_format="ue8m0", page_size=16, pages=5)
QUERIES = IndexWriteCase(rows="queries", tokens=9, heads=5, hadamard=True)
NASTY_QUERIES = replace(QUERIES, values="nasty", hadamard=False)

BELOW = r"setp\.gt\.s64\s+(%p\d+), (%rd\d+), -1;"
BEYOND = r"setp\.lt\.s64\s+(%p\d+), (%rd\d+), (%rd\d+);"
EXCHANGED = r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 8,"
ALWAYS = r"setp.gt.s64 \1, \2, -9223372036854775807;"

BUGS = (
    planted("slots or positions below 0 taken", NASTY, BELOW, ALWAYS, each),
    planted("slots or positions beyond the last taken", NASTY, BEYOND, ALWAYS, each),
    planted("lanes left out of a sum or a maximum", NASTY, EXCHANGED, r"\1, 0,", each),
    planted("variance of another mean", NASTY, r"\b1006632960\b", "1006640000", together),
    planted("root left out", NASTY, r"sqrt\.rn\.f32\s+(%r\d+), (%r\d+);", r"mov.b32 \1, \2;", together),
    planted("other sign of sines and differences", QUERIES, r"setp\.ne\.s32 p, (%r\d+), 0;", r"setp.eq.s32 p, \1, 0;", together),
    planted("rotated with another lane", QUERIES, r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 4,", r"\1, 2,", together),
    planted("columns behind the rotary ones rotated", EXPONENTS, r"setp\.lt\.u32\s+(%p\d+, %r\d+), 8;", r"setp.lt.u32 \1, 16;", together),
    planted("factor of the transformation", NASTY, r"0f3DB504F3", "0f3E3504F3", together),
    planted("no least magnitude", NASTY_QUERIES, r"(max\.s32\s+%r\d+, %r\d+), 113;", r"\1, 0;", together),
    planted("scale not rounded up to a power of two", EXPONENTS, r"\b2097151\b", "0", together),
    planted("infinity taken for a number", NASTY_QUERIES, r"\b2139095040\b", "2139095042", together),
    planted("one exponent of four", EXPONENTS, r"\b16843009\b", "1", together),
    planted("other largest e4m3", QUERIES, r"\b2097151\b", "3145727", together),
    planted("tokens of other heads", QUERIES, r"div\.s32\s+(%r\d+), (%r\d+), %r\d+;", r"div.s32 \1, \2, 1;", together),
)
UNBROKEN = ({"keys": NASTY, "queries": QUERIES}, {"exponents": EXPONENTS, "nasty": NASTY_QUERIES})

SUITES = in_turn("index_write", UNBROKEN, BUGS)
