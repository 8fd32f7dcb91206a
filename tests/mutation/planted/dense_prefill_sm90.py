"""Bugs in dense prefill for Hopper."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each_in, in_case, one_by_one, planted, together

# One CTA walks items of two tiles, one and none; rows that see nothing, and a maximum that moves from tile to tile.
WALK = DensePrefillCase(
    lengths=((130, 129), (0, 40), (64, 257), (5, 0), (3, 65)), causal=True, values="falling", outputs="given", sm_count=1
)

# In the order of the PTX.
WAITS = (
    "first item_ready of keys", "key_free", "item_ready of keys", "first item_ready of values", "value_free", "value_landed",
    "item_ready of values", "item_free", "item_free of the end", "first item_ready of queries", "query_free of warpgroup 0",
    "query_free of warpgroup 1", "item_ready of queries", "first item_ready of attend", "query_ready", "key_ready", "value_ready",
    "item_ready of attend", "value_ready of the last item",
)  # fmt: skip
# The waits for all products.
PRODUCTS = ("P V of the tile before", "P V of the last tile but one", "P V of the last item")
COMPLETE = r"(wgmma\.wait_group\.sync\.aligned\s+)0;"
ALL_BUT_ONE = r"(wgmma\.wait_group\.sync\.aligned\s+)1;"
MASKS = r"selp\.f32 \t(%r\d+), \1, 0fFF800000, %p\d+;"
# Heads of 256 columns: tiles of 80 keys.
WIDE_WALK = replace(WALK, d_qk=256)

SUITE = Suite(
    SM90,
    {"walk": WALK, "wide walk": WIDE_WALK},
    (
        *one_by_one("missing wait: ", in_case(WALK, WAITS), ptx.WAITS, ptx.NO_WAIT),
        # The last arrival releases values after all items; nobody waits for it.
        planted("missing arrival", WALK, ptx.ARRIVALS, "", each_in(0, -1)),
        planted("turn not passed on", WALK, r"bar\.arrive\s+%r\d+, 256;"),
        # Without the first one, only the order in which the warpgroups issue would change.
        planted("turn not awaited", WALK, r"bar\.sync\s+%r\d+, 256;", "", each_in(1)),
        *one_by_one("missing wait for ", in_case(WALK, PRODUCTS), COMPLETE, r"\g<1>1;"),
        planted("missing wait for scores", WALK, ALL_BUT_ONE, r"\g<1>2;"),
        # The one behind an item's rows orders reads only.
        *(
            planted(f"missing fence before {name}", WALK, r"wgmma\.fence\.sync\.aligned;", "", alone(index), count=3)
            for index, name in ((0, "scores"), (2, "P V of the last item"))
        ),
        # P is 0 there, and 0 times NaN is NaN.
        planted("values past the end not cleared", WALK, r"st\.shared\.v4\.b32 .*\{0, 0, 0, 0\};", "", together),
        planted("missing proxy fence after clearing", WALK, ptx.PROXY_FENCES, "", count=1),
        planted("too few bytes", WALK, ptx.EXPECTED_BYTES, r"\g<1>512;"),
        planted("no mask", WALK, MASKS, "", together),
        planted("first mask missing", WALK, MASKS, "", alone(0)),
        planted("logarithms in base 2", WALK, ptx.LN_2, ptx.ONE, together),
        *one_by_one("wide: missing wait: ", in_case(WIDE_WALK, WAITS), ptx.WAITS, ptx.NO_WAIT),
        *one_by_one("wide: missing wait for ", in_case(WIDE_WALK, PRODUCTS), COMPLETE, r"\g<1>1;"),
        planted("wide: missing wait for scores", WIDE_WALK, ALL_BUT_ONE, r"\g<1>2;"),
        planted("wide: turn not passed on", WIDE_WALK, r"bar\.arrive\s+%r\d+, 256;"),
        planted("wide: values past the end not cleared", WIDE_WALK, r"st\.shared\.v4\.b32 .*\{0, 0, 0, 0\};", "", together),
        planted("wide: missing proxy fence after clearing", WIDE_WALK, ptx.PROXY_FENCES, "", count=1),
        planted("wide: too few bytes", WIDE_WALK, ptx.EXPECTED_BYTES, r"\g<1>512;"),
        planted("wide: no mask", WIDE_WALK, MASKS, "", together),
        planted("wide: first mask missing", WIDE_WALK, MASKS, "", alone(0)),
    ),
)
