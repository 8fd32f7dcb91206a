"""Bugs in dQ of dense prefill for Hopper, and in what it leaves to the kernel of dK and dV."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.testing.operations.dense_prefill_backward.case import DqCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each, in_case, one_by_one, planted, together

# One CTA walks items of three key tiles, of one and of none; rows that see nothing.
WALK = DqCase(lengths=((130, 200), (0, 40), (5, 0), (64, 257), (3, 65)), causal=True, outputs="given", sm_count=1)
WIDE = replace(WALK, d_qk=256)
HOLES = replace(WALK, holes=True, empty_lse=float("-inf"))
HEADS = replace(WALK, lengths=((130, 70), (3, 65)), h_kv=2, sm_count=4)  # a CTA for every item

# In the order of the PTX.
WAITS = (
    "first item_ready of keys", "key_free", "key_landed", "item_ready of keys", "first item_ready of values", "value_free",
    "item_ready of values", "item_free", "item_free of the end", "first item_ready of queries", "query_free of warpgroup 0",
    "query_free of warpgroup 1", "item_ready of queries", "first item_ready of attend", "query_ready", "key_ready", "value_ready",
    "item_ready of attend",
)  # fmt: skip
PRODUCTS = ("dQ of the tile before", "dP under a mask", "dP", "dQ of the last tile")
COMPLETE = r"(wgmma\.wait_group\.sync\.aligned\s+)0;"
MASKS = r"selp\.f32 (\s*%r\d+), (%r\d+), 0f00000000, %p\d+;"
INFINITE = r"selp\.f32 (\s*%r\d+), 0f7F800000, (%r\d+), %p\d+;"
DELTAS = r"selp\.f32 (\s*%r\d+), 0f00000000, (%r\d+), %p\d+;"
TAKEN = r"mov.b32 \1, \2;"

SUITE = Suite(
    SM90,
    {"walk": WALK, "holes": HOLES, "heads": HEADS, "wide": WIDE},
    (
        *one_by_one("missing wait: ", in_case(WALK, WAITS), ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, ptx.ARRIVALS, "", each, count=15),
        planted("turn not passed on", WALK, r"bar\.arrive\s+%r\d+, 256;"),
        planted("turn not awaited", WALK, r"bar\.sync\s+%r\d+, 256;"),
        *one_by_one(
            "missing wait for ",
            in_case(WALK, PRODUCTS),
            COMPLETE,
            r"\g<1>1;",
        ),
        planted("missing wait for S", WALK, r"(wgmma\.wait_group\.sync\.aligned\s+)1;", r"\g<1>2;"),
        planted("missing fence", WALK, r"wgmma\.fence\.sync\.aligned;", "", each, count=2),
        # dS is 0 there, and 0 times NaN is NaN.
        planted("keys past the end not cleared", WALK, ptx.ZERO_STORES, "", together),
        planted("missing proxy fence after clearing", WALK, ptx.PROXY_FENCES, "", count=1),
        planted("too few bytes", WALK, ptx.EXPECTED_BYTES, r"\g<1>512;"),
        planted("no mask", WALK, MASKS, TAKEN, together),
        planted("first mask missing", WALK, MASKS, TAKEN, alone(0)),
        planted("lse taken for one in base 2", WALK, ptx.LOG2_E, ptx.ONE, together),
        planted("lse of -inf taken as it is", HOLES, INFINITE, TAKEN, together, count=2),
        planted("delta of a row without gradient", HOLES, DELTAS, TAKEN, together, count=2),
        planted("no delta", WALK, DELTAS, r"mov.b32 \1, 0;", together),
        planted("delta of half a quad", WALK, r"shfl\.sync\.bfly\.b32 (\s*%r\d+), (%r\d+), 2, 31, -1;", r"mov.b32 \1, 0;", alone(5)),
        planted("dQ not scaled", WALK, r"ld\.param\.b32 (\s*%r\d+), \[\w+_param_25\];", r"mov.b32 \1, 0x3F800000;"),
        planted("statistics not stored", WALK, r"st\.global\.b32 [^;]*;", "", each, count=4),
        planted("statistics of all heads in one place", HEADS, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_24\];", r"mov.b64 \1, 0;"),
        planted("dQ of all heads in one place", HEADS, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_23\];", r"mov.b64 \1, 0;"),
        # Heads of 256 columns: one stage of V.
        planted("wide: missing wait", WIDE, ptx.WAITS, ptx.NO_WAIT, alone(5, 16, 1, 0, *range(2, 5), *range(6, 16), 17), count=18),
        planted("wide: missing arrival", WIDE, ptx.ARRIVALS, "", each, count=15),
        planted("wide: keys past the end not cleared", WIDE, ptx.ZERO_STORES, "", together),
    ),
)
