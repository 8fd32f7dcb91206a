"""Bugs in dK and dV of dense prefill for Blackwell."""

from __future__ import annotations

from cute_mla.spec.arch import SM100
from tests.mutation.planted import patterns as ptx
from tests.mutation.planted.cases_dkdv import ELEMENTS, FULL, HEADS, SAID, WALK, WIDE
from tests.mutation.planting import Suite, alone, each, in_case, one_by_one, planted, together

# In the order of the PTX. None: a wait that survivors.toml explains.
WAITS: tuple[str | None, ...] = (
    "first key_ready of attend", "statistic_ready", "scores_ready", "dprobs_ready", "sums_ready", "key_ready of attend",
    "first key_ready of mma", None, "probs_ready", "rest_ready", "query_ready", "query_ready of columns 64", "query_ready of columns 128",
    "dscores_ready", "dout_ready", "dout_ready of columns 64", "key_ready of mma", "query_free", None, None, "statistic_free",
    "query_landed", None, "dout_free of columns 64", "dout_landed", "key_free", "key_free of the end",
)  # fmt: skip
ARRIVALS = (
    "key_free of attend", "probs_ready", "rest_ready", "statistic_free", "dscores_ready", "sums_free", "key_free of mma",
    "key_free of mma without tiles", "query_ready of a cleared box", "query_ready of cleared columns 64",
    "query_ready of cleared columns 128", "statistic_ready of cleared rows", "dout_ready of a cleared box",
    "dout_ready of cleared columns 64", "key_ready without tiles", "key_ready of the end",
)  # fmt: skip
MASKS = r"selp\.f32 (\s*(%r\d+)), 0f00000000, \2, %p\d+;"
EXPONENTS = r"fma\.rn\.f32x2 (\s*%rd\d+), (%rd\d+), %rd4, (%rd\d+);"
POSTED = r"st\.shared\.v2\.b32 (\s*\[[^]]*\]), \{(%r\d+|1), (%r\d+)\};"  # more, keys; KV head, first key; tiles, hidden rows

SUITE = Suite(
    SM100,
    {"walk": WALK, "full": FULL, "said": SAID, "heads": HEADS, "elements": ELEMENTS, "wide": WIDE},
    (
        # synchronisation
        *one_by_one("missing wait: ", in_case(WALK, WAITS), ptx.WAITS, ptx.NO_WAIT),
        *one_by_one("missing arrival: ", in_case(WALK, ARRIVALS), ptx.ARRIVALS),
        planted("missing commit", WALK, ptx.COMMITS, "", each, count=9),
        planted("missing wait for stores", WALK, ptx.STORE_WAITS, "", alone(0, 1, 3), count=4),  # 2: that behind it waits for both parts
        planted("missing proxy fence after clearing", FULL, ptx.PROXY_FENCES, "", each, count=2),
        planted("too few bytes", WALK, r"(mov\.b32 \s*%r\d+, )(?:12288|768|81920);(?=\s*mbarrier)", r"\g<1>512;", count=7),
        # numbers
        planted("no mask", WALK, MASKS, r"mov.b32 \1, \2;", together),
        planted("first mask missing", WALK, MASKS, r"mov.b32 \1, \2;", alone(0, 32)),
        planted("a key too many", WALK, r"setp\.gt\.s32 (\s*%p\d+, %r\d+, 1);(?=\s*selp\.f32)", r"setp.ge.s32 \1;", alone(0, 1)),
        planted("an exponential without its scale", WALK, EXPONENTS, r"add.rn.f32x2 \1, \2, \3;", alone(0, -1), count=24),
        planted("an exponential without lse", WALK, EXPONENTS, r"mul.rn.f32x2 \1, \2, %rd4;", alone(0, -1)),
        planted("scale without log2(e)", WALK, r"(ld\.param\.b32 \s*%r\d+, \[\w+_param_)14\];", r"\g<1>13];"),
        planted("no delta", WALK, "0fBF800000", "0f00000000", together),
        planted("delta added", WALK, "0fBF800000", ptx.ONE, together),
        planted(
            "dS not multiplied by P", WALK, r"mul\.rn\.f32x2 (\s*%rd\d+), %rd\d+, (%rd\d+);", r"mov.b64 \1, \2;", alone(0, 23), count=24
        ),
        planted("halves of a pair exchanged", WALK, ptx.PAIRS, r"\1, \3, \2;", alone(0, 16, 24, 40)),
        planted("dK not scaled", WALK, r"ld\.param\.b32 (\s*%r\d+), \[\w+_param_13\];", r"mov.b32 \1, 0x3F800000;"),
        planted(
            "dV not zero where no row sees", WALK, r"selp\.f32 (\s*%r\d+), (%r\d+), 0f00000000, %p\d+;", r"mov.b32 \1, \2;", alone(0, -1)
        ),
        planted(
            "lse of rows past the end left NaN",
            FULL,
            r"(st\.shared\.b32 \s*\[[^]]*\], )2139095040;",
            r"\g<1>2143289344;",
            together,
            count=3,
        ),
        planted("statistics past the end not cleared", FULL, r"st\.shared\.b32 [^;]*;", "", together, count=6),
        planted("dV begins with what was there", WALK, r"setp\.ne\.b32 (\s*%p15), %r210, 1;", r"mov.pred \1, -1;", count=1),
        planted("dK begins with what was there", WALK, r"setp\.ne\.b32 (\s*%p\d+), %r210, 1;(?=\s*mul)", r"mov.pred \1, -1;", count=1),
        planted(
            "S or dP begins with what was there",
            WALK,
            ptx.FRESH_PRODUCTS,
            r"mov.pred \1, -1;",
            each,
            count=2,
        ),
        # indices
        planted("rows without statistics", SAID, r"ld\.param\.b32 (\s*%r\d+), \[\w+_param_21\];", r"mov.b32 \1, 0x7FFFFFFF;", together),
        planted("dK and dV of all heads in one place", HEADS, POSTED, r"st.shared.v2.b32 \1, {0, \3};", alone(1), count=3),
        planted("keys of all items in one place", WALK, POSTED, r"st.shared.v2.b32 \1, {\2, 0};", alone(1)),
        planted("rows not masked by their place", WALK, POSTED, r"st.shared.v2.b32 \1, {\2, 0};", alone(2)),
        planted("no keys", WALK, POSTED, r"st.shared.v2.b32 \1, {\2, 0};", alone(0)),
        planted(
            "one head for all of the group",
            HEADS,
            r"add\.s32 (\s*%r\d+), %r\d+, (%r\d+);(?=\s*@%p\d+ bra \s*\$L__BB0_1(?:38|62);)",
            r"mov.b32 \1, \2;",
            each,
            count=2,
        ),
        planted(
            "statistics of the first head",
            HEADS,
            r"(cp\.async\.bulk\.tensor[^;{]*\{%r245, )%r243, (%r776\}[^;]*;)",
            r"\g<1>%r776, \2",
            count=1,
        ),
        planted("statistics of delta for lse", WALK, r"(ld\.shared\.b64 \s*%rd5, \[%r37\+)229760\];", r"\g<1>229376];", count=1),
        planted("statistics of the rows before", WALK, r"(ld\.shared\.v2\.b32 \s*[^;]*\[%r37\+)229504\];", r"\g<1>229376];", count=1),
        *(
            planted(f"box of columns {column} from the first", WALK, ptx.BOXES.format(column), r"mov.b32 \1, 0;", each)
            for column in (64, 128)
        ),
        planted("rows past the end not cleared", FULL, ptx.ZERO_STORES, "", together),
        planted("one box of rows past the end not cleared", FULL, ptx.ZERO_STORES, "", alone(0, -1)),
        planted("rest of P over its beginning", WALK, r"(tcgen05\.st[^;\[]*\[)%r30\]", r"\g<1>%r10]", count=1),
        planted("rest of dS over its beginning", WALK, r"(tcgen05\.st[^;\[]*\[)%r25\]", r"\g<1>%r13]", count=1),
        planted("second half of rows in the place of the first", WALK, r"mul\.lo\.s32 (\s*%r9), %r911, 48;", r"mov.b32 \1, 0;", count=1),
        planted(
            "second half of columns in the place of the first",
            WALK,
            r"mul\.wide\.s32 (\s*%rd\d+), %r1[57], 2;",
            r"mov.b64 \1, 0;",
            each,
            count=2,
        ),
        # Heads of 256 columns, whose dK and dV are an item each. Not the waits that survivors.toml explains.
        planted(
            "wide: missing wait",
            WIDE,
            ptx.WAITS,
            ptx.NO_WAIT,
            alone(3, 8, 14, *range(3), *range(4, 7), *range(9, 14), *range(15, 21), 25, 26, *range(30, 33)),
            count=33,
        ),
        planted("wide: missing arrival", WIDE, ptx.ARRIVALS, "", each, count=19),
        planted("wide: missing commit", WIDE, ptx.COMMITS, "", each, count=12),
        planted("wide: missing wait for stores", WIDE, ptx.STORE_WAITS, "", alone(0, 1, 3), count=4),
        planted("wide: too few bytes", WIDE, r"(mov\.b32 \s*%r\d+, )(?:8192|512|131072);(?=\s*mbarrier)", r"\g<1>256;", each, count=10),
        planted("elements of rows of dK and dV", ELEMENTS, r"st\.global\.b16 [^;]*;", "", alone(0, 32, -1)),
    ),
)
