"""Bugs in dense prefill for RTX boards."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM120
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, each_in, in_case, one_by_one, planted, together

# One CTA walks items of several tiles, one and none; rows that see nothing, warps that pass tiles, a maximum that moves in every tile.
WALK = DensePrefillCase(
    lengths=((130, 129), (0, 40), (64, 257), (5, 0), (3, 65)), causal=True, values="falling", outputs="given", sm_count=1
)
NARROW = replace(WALK, d_qk=128)  # three stages
WIDE = replace(WALK, d_qk=256)  # Q comes in two rounds, and lanes keep a quarter of it in shared memory
NORMAL = replace(WALK, values="normal")  # the last row of 64 sees one key of its first tile, as much as any other

# In the order of the PTX.
WAITS = (
    "first item_ready of keys", "key_free of Q", "key_free of the rest of Q", "key_free", "item_ready of keys",
    "first item_ready of values", "value_free", "tail_landed", "item_ready of values", "item_free", "item_free of the end",
    "first item_ready of attend", "Q", "the rest of Q", "key_ready", "value_ready", "key_ready of a passed tile",
    "item_ready of attend",
)  # fmt: skip
MASKS = r"selp\.f32 (\s*%r\d+), (%r\d+), 0fFF800000, %p\d+;"
FACTORS = r"selp\.f32 (\s*%r\d+), %r\d+, 0f3F800000, %p\d+;"
PIECES = r"selp\.b32 (\s*%r\d+), 24576, 0, %p\d+;"
KEPT = r"(st\.shared\.v4\.b32 \s*\[%r\d+)\+4096\]"
ROUNDS = r"setp\.ne\.b32 (\s*%p\d+), (%r\d+), 1;(?=\s*xor)"
PASSED = r"setp\.gt\.s32 (\s*%p\d+), (%r\d+), (%r\d+);(?=\s*or\.pred)"

SUITE = Suite(
    SM120,
    {"walk": WALK, "narrow": NARROW, "wide": WIDE, "normal": NORMAL},
    (
        *one_by_one("missing wait: ", in_case(WALK, WAITS), ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, ptx.ARRIVALS),
        planted("turn not passed on", WALK, r"bar\.arrive\s+%r\d+, 256;"),
        planted("turn not awaited", WALK, r"bar\.sync\s+%r\d+, 256;"),
        planted("missing arrival with three stages", NARROW, ptx.ARRIVALS),
        planted("missing wait for Q in two rounds", WIDE, ptx.WAITS, ptx.NO_WAIT, each_in(14, 18), count=22),
        planted("missing arrival with Q in two rounds", WIDE, ptx.ARRIVALS),
        planted("a step of kept Q over another", WIDE, KEPT, r"\1]", together, count=2),
        planted("Q of the second round for every warp", WIDE, ROUNDS, r"setp.ne.b32 \1, \2, \2;", count=1),
        # P is 0 there, and 0 times NaN is NaN.
        planted("values past the end not cleared", WALK, ptx.ZERO_STORES, "", together),
        planted("too few bytes", WALK, ptx.EXPECTED_BYTES, r"\g<1>512;"),
        planted("Q of the first rows alone", WALK, PIECES, r"mov.b32 \1, 0;", together, count=1),
        planted("no mask", WALK, MASKS, r"mov.f32 \1, \2;", together),
        planted("a tile of which one key is seen is passed", NORMAL, PASSED, r"setp.ge.s32 \1, \2, \3;", count=1),
        planted("no rescale", WALK, FACTORS, r"mov.f32 \1, 0f3F800000;", together),
        planted("logarithms in base 2", WALK, ptx.LN_2, ptx.ONE, together),
    ),
)
