"""Bugs in the indexer's logits for Blackwell."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each_in, one_by_one, planted, together

# One CTA each, which has items of two row blocks and of one, long enough to go round the ring of keys, and tiles that no token sees.
PAGES = MqaLogitsCase(heads=33, requests=3, tokens=5, keys=1300, page_size=16, lengths="edges", broken=True, sm_count=1)
FULL = replace(PAGES, lengths="full", broken=False)
ROWS = MqaLogitsCase(heads=64, tokens=10, keys=700, windows="edges", sm_count=1)
SEQUENCES = MqaLogitsCase(heads=64, tokens=5, keys=900, windows="sequences", clean=False, outputs="given", sm_count=1)
PACKED = replace(ROWS, tokens=6, keys=300, windows="sequences")  # of which the second begins in the second tile of a pair
WHOLE = replace(ROWS, tokens=6, keys=300, windows="whole")
RELATIVE = replace(SEQUENCES, windows="random", columns=301)

# In the order of the PTX: a barrier, and a case that notices that nobody waits for it. None: it comes when the last products are over
# and their scores have been read, so that nothing changes here.
WAITS = (
    ("item_ready of score", PAGES),
    ("scores_ready of the first of a pair of rounds", PAGES),
    ("scores_ready of the second of a pair of rounds", PAGES),
    ("scores_ready of a last round", PAGES),
    ("scores_ready of a group without a tile", PAGES),
    ("item_ready of mma", PAGES),
    ("query_ready", PAGES),
    ("key_ready of a round of a tile", PAGES),
    ("scale_ready of a round of a tile", PAGES),
    ("scores_free of the first group", PAGES),
    ("scores_free of the second group", PAGES),
    ("key_ready of the first of two tiles", PAGES),
    ("scale_ready of the first of two tiles", PAGES),
    ("scores_free for the first of two tiles", PAGES),
    ("key_ready of the second of two tiles", PAGES),
    ("scale_ready of the second of two tiles", PAGES),
    ("scores_free for the second of two tiles", PAGES),
    ("item_ready of load", PAGES),
    ("query_free", PAGES),
    ("key_free", PAGES),
    ("key_free before the CTA ends", None),
    ("query_free before the CTA ends", None),
    ("item_free", PAGES),
    ("item_free behind the last item", PAGES),
    ("item_ready of fill", PAGES),
)
COPIES_LANDED = r"cp\.async\.mbarrier\.arrive\.noinc[^;]*;"
SECOND_QUERY = r"(\[%r\d+\+16384\], \[%rd\d+, \{%r\d+, %r\d+, )%r\d+\}"  # coordinates of the box of the second row block
CHECKED_PAGES = r"selp\.b32 (\s*%r\d+), (%r\d+), -1, %p\d+;(?=\s*cvt\.s64)"  # whose scales are copied
ENTRIES = r"setp\.ge\.s32 (\s*%p\d+), (%r\d+), %r\d+;(?=\s*mov\.b32 \s*%r\d+, -1;)"  # of the block table: those behind the last key
PRESENT = r"(cp\.async\.ca\.shared\.global \s*\[[^]]*\], \s*\[[^]]*\], 4), %r\d+;"  # copies of scales, then of weights
FIRST_WEIGHTS = 4  # the copies before it are of scales
HALF = "0f3F000000"
MAGNITUDES = r"abs\.f32 (\s*%r\d+), (%r\d+);"
MAXIMA = r"max\.NaN\.f32 (\s*%r\d+), (%r\d+), 0f00000000;"
MINUS_INFINITY = "0fFF800000"
FILLED = r"(st\.global\.b32 \s*\[[^]]*\]), -8388608;"
KEYS_SEEN = r"setp\.lt\.u32 (\s*%p\d+), (%r\d+), (%r\d+);(?=(?:[^;]*;){0,5}?\s*selp\.f32 [^;]*0fFF800000)"

SUITE = Suite(
    SM100,
    {"pages": PAGES, "full": FULL, "rows": ROWS, "whole": WHOLE, "sequences": SEQUENCES, "relative": RELATIVE, "packed": PACKED},
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing commit", PAGES, ptx.COMMITS),
        planted("weights or scales handed over before they have landed", PAGES, COPIES_LANDED),
        planted("missing waits for loads", PAGES, ptx.LOAD_WAITS, "", together),
        planted("missing fence before scores are released", PAGES, ptx.FENCES_BEFORE, "", each_in(0, -1)),
        planted("missing fence behind a wait", PAGES, ptx.FENCES_AFTER, "", each_in(0, -1)),
        planted("bytes of half of a tile", PAGES, ptx.EXPECTED_BYTES, r"\1 8192;"),
        planted("scores on top of those before", PAGES, ptx.FRESH_PRODUCTS, r"mov.pred \1, -1;"),
        planted("Q of another row block", PAGES, SECOND_QUERY, r"\g<1>0}", count=1),
        planted("scale of a page behind the last one", PAGES, CHECKED_PAGES, r"mov.b32 \1, \2;"),
        planted("entries of the block table behind the last key", FULL, ENTRIES, r"setp.lt.s32 \1, \2, -1;", alone(-1), count=2),
        planted("scale of a key that is not there", PAGES, PRESENT, r"\1, 4;", each_in(0, FIRST_WEIGHTS)),
        planted("weight of a head that is not there", PAGES, PRESENT, r"\1, 4;", each_in(FIRST_WEIGHTS + 1)),
        planted("twice the relu of some heads", WHOLE, HALF, ptx.ONE),
        planted("no magnitude", WHOLE, MAGNITUDES, r"mov.b32 \1, \2;", alone(0, -1)),
        planted("no maximum", WHOLE, MAXIMA, r"mov.b32 \1, \2;", alone(0, -1)),
        planted("0 beside the keys that a token sees", ROWS, MINUS_INFINITY, "0f00000000"),
        planted("0 in tiles that no token sees", ROWS, FILLED, r"\1, 0;", together),
        planted("keys in front of those that a token sees", ROWS, KEYS_SEEN, r"setp.lt.s32 \1, \2, \3;", or_case=PACKED),
    ),
)
