"""Bugs in the kernels that normalise, rotate and write keys.

One source serves all architectures, so each bug is planted in the kernel of one of them, in turn.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.testing.operations.cache_insert.case import CacheInsertCase
from tests.mutation.planting import each, in_turn, planted, together

LATENT = CacheInsertCase(values="nasty", tokens=30, kept="packed")
VALUES = replace(LATENT, cache="fp8_584", page_size=16, pages=9)
WIDE = replace(LATENT, cache="latent_1088")
EPS = replace(LATENT, cache="fp8_656", eps=0.5, kept="none")

BEYOND = r"setp\.lt\.s64\s+(%p\d+), (%rd\d+), (%rd\d+);"
ALWAYS = r"setp.gt.s64 \1, \2, -9223372036854775807;"

BUGS = (
    planted("slots or positions beyond the last taken", LATENT, BEYOND, ALWAYS, together),
    planted("half of the columns summed", VALUES, r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 16,", r"\1, 0,", together),
    planted("half of 1,024 columns summed", WIDE, r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 16,", r"\1, 0,", together),
    planted("root left out", EPS, r"sqrt\.rn\.f32\s+(%r\d+), (%r\d+);", r"mov.b32 \1, \2;", together),
    planted("quotient left out", LATENT, r"rcp\.rn\.f32\s+(%r\d+), (%r\d+);", r"mov.b32 \1, \2;", together),
    planted("sines added in both columns of a pair", VALUES, r"sub\.f32", "add.f32", together),
    planted("rotary columns of another lane", VALUES, r"(shfl\.sync\.idx\.b32\s+%r\d+, %r\d+), (%r\d+),", r"\1, 0,", each),
    planted("queries of one head more", EPS, r"div\.s32\s+(%r\d+), (%r\d+), (%r\d+);", r"div.s32 \1, \2, 2;", together),
    planted("positions below 0 taken", EPS, r"setp\.gt\.s64\s+(%p\d+), (%rd\d+), -1;", ALWAYS, together),
)
UNBROKEN = ({"latent": LATENT, "values": VALUES, "wide": WIDE}, {"eps": EPS})

SUITES = in_turn("cache_insert", UNBROKEN, BUGS)
