"""Bugs in the indexer's logits for RTX boards. Those of the load role, which Hopper has too, are planted in mqa_logits_sm90.py."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM120
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planted.mqa_logits_sm90 import (
    COPY_SIZES,
    EXCHANGES,
    FILLS,
    HALF,
    LANDED,
    MAGNITUDES,
    MASKS,
    SUMS,
    WAITS,
    WINDOWS,
)
from tests.mutation.planting import Suite, alone, each, in_case, one_by_one, planted, together

# One CTA walks four items of four tokens, the last of two, over 6 tiles: more than there are stages of either pipeline.
ROWS = MqaLogitsCase(tokens=14, keys=700, windows="edges", outputs="given", sm_count=1)
SEQUENCES = MqaLogitsCase(tokens=12, keys=1300, windows="sequences", outputs="given", sm_count=1)
UNCLEAN = replace(ROWS, clean=False)
# Requests with a last item of one token, lengths about the borders of pages and tiles, every third page outside the cache.
PAGES = MqaLogitsCase(
    requests=5, tokens=9, heads=32, keys=700, page_size=16, lengths="edges", outputs="given", sm_count=1, broken=True
)  # fmt: skip

PARTS = r"shl\.b32 (\s*%r\d+), %r\d+, %r\d+;"  # of a tile, of a warp: 1, 2 or 4
GROUP_QUERIES = r"shl\.b32 (\s*%r\d+), %r\d+, 13;"
GROUP_WEIGHTS = r"shl\.b32 (\s*%r\d+), %r\d+, 8;(?=(?:[^;]*;){1,8}?\s*ld\.shared\.v2)"
SCALES = r"(ld\.shared\.b32 [^;]*\+)81920\];"
STEPS = r"xor\.b32 (\s*%r\d+), (%r\d+), (?:32|64|96);"
PRODUCTS = (
    r"mma\.sync\.aligned\.kind[^{]*\{([^,}]*), ([^,}]*), ([^,}]*), ([^,}]*)\}, \{[^}]*\}, \{[^}]*\}, "
    r"\{([^,}]*), ([^,}]*), ([^,}]*), ([^,}]*)\}[^;]*;"
)
UNIT_SCALES = r"mov\.b32 (\s*%r\d+), 2139062143;"
DROPPED = r"mov.b32 \1, \5; mov.b32 \2, \6; mov.b32 \3, \7; mov.b32 \4, \8;"

SUITE = Suite(
    SM120,
    {"rows": ROWS, "sequences": SEQUENCES, "unclean": UNCLEAN, "pages": PAGES},
    (
        *one_by_one("missing wait: ", in_case(ROWS, WAITS), ptx.WAITS, ptx.NO_WAIT),
        *one_by_one("pages: missing wait: ", in_case(PAGES, WAITS), ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", ROWS, ptx.ARRIVALS, "", each, count=3),
        planted("pages: missing arrival", PAGES, ptx.ARRIVALS, "", each, count=3),
        planted("missing arrival of copies", ROWS, LANDED, "", each, count=3),
        planted("too few bytes", ROWS, ptx.EXPECTED_BYTES, r"\g<1>512;", count=2),
        planted("a copy missing", ROWS, COPY_SIZES, r"\1, 0;", each, count=12),
        planted("a product dropped", ROWS, PRODUCTS, DROPPED, alone(0, 9, 31), count=32),
        planted("a fourth of the products", ROWS, UNIT_SCALES, r"mov.b32 \1, 2122219134;", together),
        planted("the first columns of keys in another step", ROWS, STEPS, r"mov.b32 \1, \2;", each, count=3),
        planted("queries of the first group for all", ROWS, GROUP_QUERIES, r"mov.b32 \1, 0;", count=1),
        planted("weights of the first group for all", ROWS, GROUP_WEIGHTS, r"mov.b32 \1, 0;", count=1),
        planted("one part of a tile for each warp", ROWS, PARTS, r"mov.b32 \1, 1;", count=1),
        planted("pages: one part of a tile for each warp", PAGES, PARTS, r"mov.b32 \1, 1;", alone(0)),
        planted("a column dropped", ROWS, SUMS, r"mov.b32 \1, \2;", alone(0, 1, 15, -1), count=32),
        planted("pages: a column dropped", PAGES, SUMS, r"mov.b32 \1, \2;", alone(0, 8, -1), count=32),
        planted("no relu", ROWS, MAGNITUDES, r"mov.b32 \1;", together),
        planted("no relu of a column", ROWS, MAGNITUDES, r"mov.b32 \1;", alone(0, 20, -1), count=32),
        planted("twice the logits", ROWS, HALF, ptx.ONE, count=1),
        planted("the next key's scale", ROWS, SCALES, r"\g<1>81924];", count=1),
        planted("no exchange", ROWS, EXCHANGES, r"\1, 0, 31, -1;", each, count=2),
        planted("pages: no exchange", PAGES, EXCHANGES, r"\1, 0, 31, -1;", each, count=3),
        planted("no mask", ROWS, MASKS, r"mov.b32 \1, \2;", together),
        planted("zeros where nothing is scored", SEQUENCES, FILLS, r"\1, 0;", each, count=2),
        planted("columns not filled", SEQUENCES, FILLS, "", each, count=2),
        planted("the window begins a key late", ROWS, WINDOWS, r"setp.gt.s32 \1; setp.lt.s32 \3;", together, count=1),
        planted("unclean: the window ends a key late", UNCLEAN, WINDOWS, r"setp.ge.s32 \1; setp.le.s32 \3;", together, count=1),
    ),
)
