"""Bugs in dK and dV of dense prefill for Hopper."""

from __future__ import annotations

from cute_mla.spec.arch import SM90
from tests.mutation.planted import patterns as ptx
from tests.mutation.planted.cases_dkdv import ELEMENTS, FULL, HEADS, SAID, WALK, WIDE
from tests.mutation.planting import Suite, alone, each, in_case, one_by_one, planted, together

# In the order of the PTX.
WAITS = (
    "query_free", "query_landed", "dout_free", "dout_landed", "key_free", "key_free of the end", "first key_ready", "query_ready",
    "dout_ready", "key_ready",
)  # fmt: skip
ARRIVALS = (
    "query_ready", "dout_ready", "key_ready without rows", "key_ready of the end", "query_free", "dout_free", "key_free",
    "key_free without rows",
)  # fmt: skip
TURNS = r"bar\.arrive\s+%r\d+, 256;"
PRODUCTS = ("dV and dK of the tile before", "S", "dP", "dV and dK of the last tile")
COMPLETE = r"(wgmma\.wait_group\.sync\.aligned\s+)0;"
ALL_BUT_ONE = r"(wgmma\.wait_group\.sync\.aligned\s+)1;"
MASKS = r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+), %p\d+;"
POSTED = r"st\.shared\.v2\.b32 (\s*\[[^]]*\]), \{(%r\d+), (%r\d+)\};"  # KV head and first key; tiles and hidden rows

SUITE = Suite(
    SM90,
    {"walk": WALK, "full": FULL, "said": SAID, "heads": HEADS, "elements": ELEMENTS, "wide": WIDE},
    (
        *one_by_one("missing wait: ", in_case(WALK, WAITS), ptx.WAITS, ptx.NO_WAIT),
        *one_by_one("missing arrival: ", in_case(WALK, ARRIVALS), ptx.ARRIVALS),
        planted("turn not passed on", WALK, TURNS),
        planted("turn not awaited", WALK, r"bar\.sync\s+%r\d+, 256;"),
        *one_by_one(
            "missing wait for ",
            in_case(WALK, PRODUCTS),
            COMPLETE,
            r"\g<1>1;",
        ),
        # Not the one before dP: that before S lies behind all that was written to its registers.
        planted("missing fence", WALK, r"wgmma\.fence\.sync\.aligned;", "", alone(0, 2), count=3),
        # P and dS are 0 there, and 0 times NaN is NaN.
        planted("rows past the end not cleared", FULL, ptx.ZERO_STORES, "", together),
        planted("statistics past the end not cleared", FULL, r"st\.shared\.b32 [^;]*;", "", together),
        planted("missing proxy fence after clearing", FULL, ptx.PROXY_FENCES, "", each, count=2),
        planted("too few bytes", WALK, ptx.EXPECTED_BYTES, r"\g<1>512;"),
        planted("no mask", WALK, MASKS, r"mov.b32 \1, \2;", together),
        planted("first mask missing", WALK, MASKS, r"mov.b32 \1, \2;", alone(0)),
        planted("dK not scaled", WALK, r"ld\.param\.b32 (\s*%r\d+), \[\w+_param_13\];", r"mov.b32 \1, 0x3F800000;"),
        planted("rows without statistics", SAID, r"ld\.param\.b32 (\s*%r\d+), \[\w+_param_20\];", r"mov.b32 \1, 0x7FFFFFFF;", together),
        # Two CTAs then write the rows of dK and dV of the first head, as if they added up there.
        planted("dK and dV of all heads in one place", HEADS, POSTED, r"st.shared.v2.b32 \1, {0, \3};", alone(0), count=2),
        planted("keys of all items in one place", WALK, POSTED, r"st.shared.v2.b32 \1, {\2, 0};", alone(0)),
        planted("rows not masked by their place", WALK, POSTED, r"st.shared.v2.b32 \1, {\2, 0};", alone(-1)),
        planted("elements of rows of dV", ELEMENTS, r"st\.global\.b16 [^;]*;", "", alone(0, -1)),
        # Heads of 256 columns, whose warpgroups share the keys: first the hand-over of P.
        planted("wide: missing wait", WIDE, ptx.WAITS, ptx.NO_WAIT, alone(12, 8, 7, *range(7), 9, 10, 11, 13), count=14),
        planted("wide: missing arrival", WIDE, ptx.ARRIVALS, "", alone(6, 4, 10, *range(4), 5, *range(7, 10), *range(11, 15)), count=15),
        planted("wide: missing wait for the scores or the sum", WIDE, COMPLETE, r"\g<1>1;", each, count=4),
        planted("wide: missing wait for the sum of the tile before", WIDE, ALL_BUT_ONE, r"\g<1>2;", each, count=2),
        planted("wide: missing fence", WIDE, r"wgmma\.fence\.sync\.aligned;", "", each, count=4),
        planted("wide: too few bytes", WIDE, ptx.EXPECTED_BYTES, r"\g<1>512;", each, count=3),
    ),
)
