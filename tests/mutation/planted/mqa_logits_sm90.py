"""Bugs in the indexer's logits for Hopper."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each, each_in, in_case, one_by_one, planted, together

# One CTA walks eight items of four tokens, some without keys, over 14 tiles: more than there are stages of either pipeline.
ROWS = MqaLogitsCase(tokens=14, keys=700, windows="edges", outputs="given", sm_count=1)
UNCLEAN = replace(ROWS, clean=False)
FEWER_HEADS = replace(ROWS, heads=33, layout="strided")  # NaN beside the weights
# Row blocks whose tokens see nothing of the first tiles, or of the last ones.
SEQUENCES = MqaLogitsCase(tokens=12, keys=1300, windows="sequences", outputs="given", sm_count=1)
RELATIVE = MqaLogitsCase(tokens=14, keys=300, windows="edges", clean=False, columns=131, outputs="given", sm_count=1)
# Requests with a last item of one token, lengths about the borders of pages and tiles, every third page outside the cache.
PAGES = MqaLogitsCase(
    requests=5, tokens=9, heads=32, keys=700, page_size=16, lengths="edges", outputs="given", sm_count=1, broken=True
)  # fmt: skip
PER_TOKEN = replace(PAGES, per_token=True)

# In the order of the PTX.
WAITS = ("first item_ready", "key_ready", "item_ready", "item_free", "key_free", "item_free of the end")
COMPLETE = r"(wgmma\.wait_group\.sync\.aligned\s+)0;"
LANDED = r"cp\.async\.mbarrier\.arrive\.noinc[^;]*;"
COPY_SIZES = r"(cp\.async\.c[ag]\.shared\.global [^;]*, (\d+)), %r\d+;"
WHOLE = r"\1, \2;"  # also of what is not there
SUMS = r"fma\.rn\.f32 (\s*%r\d+), %r\d+, %r\d+, ((?:%r\d+|0f00000000));"
MAGNITUDES = r"abs\.f32 (%r\d+, %r\d+);"
EXCHANGES = r"(shfl\.sync\.bfly\.b32 [^;]*), ([12]), 31, -1;"
HALF = "0f3F000000"
SCALES = r"(ld\.shared\.b32 [^;]*%r\d+)\];"
MASKS = r"selp\.f32 (\s*%r\d+), (%r\d+), 0fFF800000, %p\d+;"
FILLS = r"(st\.global\.b32 [^;]*), -8388608;"
SECOND_QUERIES = r"(cp\.async\.bulk\.tensor\.3d[^;]*\{%r\d+, %r\d+, (%r\d+)\}\], \[[^]]*\];\s*cp\.async\.bulk[^;]*\{%r\d+, %r\d+), %r\d+\}"
WINDOWS = r"setp\.ge\.s32 (\s*%p\d+, (%r\d+), %r\d+);\s*setp\.lt\.s32 (\s*%p\d+, \2, %r\d+);(?=\s*and\.pred)"
HIDDEN = r"(sub\.s32 \s*(%r\d+), %r\d+, %r\d+;\s*add\.s32 \s*%r\d+, \2), 1;"
ORIGIN = r"selp\.b32 (\s*%r\d+), 0, %r\d+, %p\d+;"
NO_PAGE = r"selp\.b32 (\s*%r\d+), (%r\d+), -1, %p\d+;"

SUITE = Suite(
    SM90,
    {
        "rows": ROWS,
        "unclean": UNCLEAN,
        "sequences": SEQUENCES,
        "fewer heads": FEWER_HEADS,
        "relative": RELATIVE,
        "pages": PAGES,
        "per token": PER_TOKEN,
    },
    (
        *one_by_one("missing wait: ", in_case(ROWS, WAITS), ptx.WAITS, ptx.NO_WAIT),
        *one_by_one("pages: missing wait: ", in_case(PAGES, WAITS), ptx.WAITS, ptx.NO_WAIT),
        # Of the tile that was scored, of one that no token of the row block sees, of an item, of the end.
        planted("missing arrival", ROWS, ptx.ARRIVALS, "", each, count=4),
        planted("pages: missing arrival", PAGES, ptx.ARRIVALS, "", alone(0, 2, 3), count=4),
        planted("missing arrival of copies", ROWS, LANDED, "", each, count=3),
        planted("pages: missing arrival of copies", PAGES, LANDED, "", each, count=3),
        planted("too few bytes", ROWS, ptx.EXPECTED_BYTES, r"\g<1>512;", count=2),
        planted("missing wait for a product", ROWS, COMPLETE, r"\g<1>1;", count=1),
        planted("missing fence before a product", ROWS, r"wgmma\.fence\.sync\.aligned;", "", count=1),
        planted("absent weights and scales copied", FEWER_HEADS, COPY_SIZES, WHOLE, together),
        planted("a copy missing", ROWS, COPY_SIZES, r"\1, 0;", each_in(0), count=12),
        planted("pages: scales of absent pages copied", PAGES, COPY_SIZES, WHOLE, alone(-1), count=9),
        planted("pages: a copy missing", PAGES, COPY_SIZES, r"\1, 0;", each_in(0), count=9),
        planted("a column dropped", ROWS, SUMS, r"mov.b32 \1, \2;", alone(0, 1, 15, 16, -1), count=64),
        planted("pages: a column dropped", PAGES, SUMS, r"mov.b32 \1, \2;", alone(0, 8, -1), count=64),
        planted("no relu", ROWS, MAGNITUDES, r"mov.b32 \1;", together),
        planted("no relu of a column", ROWS, MAGNITUDES, r"mov.b32 \1;", alone(0, 40, -1), count=64),
        planted("twice the logits", ROWS, HALF, ptx.ONE, count=1),
        planted("the next key's scale", ROWS, SCALES, r"\1+4];", count=1),
        planted("pages: the next key's scale", PAGES, SCALES, r"\1+4];", count=1),
        planted("no exchange", ROWS, EXCHANGES, r"\1, 0, 31, -1;", each, count=3),
        planted("pages: no exchange", PAGES, EXCHANGES, r"\1, 0, 31, -1;", each, count=6),
        planted("no mask", ROWS, MASKS, r"mov.b32 \1, \2;", together),
        planted("zeros for what is not seen", ROWS, MASKS, r"selp.f32 \1, \2, 0f00000000, %p1;", together, count=1),
        planted("zeros where nothing is scored", SEQUENCES, FILLS, r"\1, 0;", each, count=2),
        planted("columns not filled", SEQUENCES, FILLS, "", each, count=2),
        planted("the first row block's queries twice", ROWS, SECOND_QUERIES, r"\1, \2}", count=1),
        planted("the window begins a key late", ROWS, WINDOWS, r"setp.gt.s32 \1; setp.lt.s32 \3;", together, count=1),
        planted("the window ends a key late", ROWS, WINDOWS, r"setp.ge.s32 \1; setp.le.s32 \3;", together, count=1),
        planted("unclean: the window ends a key late", UNCLEAN, WINDOWS, r"setp.ge.s32 \1; setp.le.s32 \3;", together, count=1),
        planted("pages: a window ends a key late", PAGES, WINDOWS, r"setp.ge.s32 \1; setp.le.s32 \3;", each, count=2),
        # The item's first token, its tokens, first and last tile; the number of tiles comes last.
        planted("the item of lane 0", ROWS, ptx.SHUFFLES, ptx.LANE_0, alone(0, 1, 3, 4, -1), count=9),
        planted("pages: tokens see too little", PAGES, HIDDEN, r"\1, 0;", together, count=1),
        planted("pages: pages outside the cache used", PAGES, NO_PAGE, r"mov.b32 \1, \2;", together, count=1),
        planted("pages: page 0 of a tile for all", PAGES, ptx.SHUFFLES, ptx.LANE_0, alone(-2, -3)),
        planted("relative: columns from key 0 on", RELATIVE, ORIGIN, r"mov.b32 \1, 0;", alone(0)),
    ),
)
