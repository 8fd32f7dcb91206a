"""Bugs in dQ of dense prefill for Blackwell, and in what it leaves to the kernel of dK and dV."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.testing.operations.dense_prefill_backward.case import DqCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each, in_case, one_by_one, planted, together

# One CTA walks items of one key tile, two, three and none, more than there are stages and posted items; rows that see nothing.
WALK = DqCase(lengths=((130, 200), (0, 40), (5, 0), (64, 257), (3, 65)), causal=True, outputs="given", sm_count=1)
LATE = replace(WALK, lengths=((3, 65), (130, 200), (0, 40), (5, 0), (64, 257)))  # the first rounds have no rows
WIDE = replace(WALK, d_qk=256)
# The first item has one tile: its Q must not be overwritten, and no keys are waited for.
SHORT = replace(WALK, lengths=((130, 100), (64, 257), (3, 200)))
HOLES = replace(WALK, holes=True, empty_lse=float("-inf"))
HEADS = replace(WALK, lengths=((130, 70), (3, 65)), h_kv=2, group=2, sm_count=4)

# In the order of the PTX. None: a wait that survivors.toml explains.
WAITS: tuple[str | None, ...] = (
    "item_ready of attend", "statistics_ready", "scores_ready", "dprobs_ready", "first item_ready of rows", None, "item_ready of rows",
    "statistics_free", "dq_ready", "item_ready of mma", "query_ready", "scores_free", "key_ready", "key_ready of columns 64",
    "key_ready of columns 128", "dq_free", "dscores_ready", "dout_ready", "value_ready", "value_ready of columns 64", "item_free",
    "key_free", "key_free of columns 64", "key_free of columns 128", "query_free", None, "item_ready of values",
    "value_free", "value_free of columns 64", None, None,
)  # fmt: skip
ROUNDS = {"query_free": SHORT, "statistics_free": LATE, "dq_free": LATE}
MASKS = r"selp\.f32 (\s*%r\d+), (%r\d+), 0f00000000, %p\d+;"
INFINITE = r"selp\.f32 (\s*%r\d+), 0f7F800000, (%r\d+), %p\d+;"
DELTAS = r"selp\.f32 (\s*(%r\d+)), 0f00000000, (?!\2)(%r\d+), %p\d+;"
TAKEN = r"mov.b32 \1, \2;"
STATISTICS = r"st\.shared\.b32 (\s*\[%r\d+)\+(\d+)\], (%r\d+);"  # lse and delta, of the first item and of the others
POSTED = r"st\.shared\.v4\.b32 (\s*\[[^]]*\]), \{(%r\d+), (%r\d+), (%r\d+), (%r\d+)\};"  # more, head, KV head, row; rows, key, keys, limit

SUITE = Suite(
    SM100,
    {"walk": WALK, "late": LATE, "short": SHORT, "holes": HOLES, "heads": HEADS, "wide": WIDE},
    (
        # synchronisation
        *one_by_one("missing wait: ", in_case(WALK, WAITS, ROUNDS), ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, ptx.ARRIVALS, "", each, count=12),
        planted("missing commit", WALK, ptx.COMMITS, "", each, count=10),
        planted("missing wait for the store of dS", WALK, ptx.STORE_WAITS, count=1),
        planted("missing proxy fence after clearing", WALK, ptx.PROXY_FENCES, "", count=1),
        planted("too few bytes", WALK, r"(mov\.b32 \s*%r\d+, )(?:16384|49152|32768);(?=\s*mbarrier)", r"\g<1>512;", count=7),
        # numbers
        planted("no mask", WALK, MASKS, TAKEN, together),
        planted("first mask missing", WALK, MASKS, TAKEN, alone(0, 32)),
        planted("lse taken for one in base 2", WALK, ptx.LOG2_E, ptx.ONE, together),
        planted("lse of -inf taken as it is", HOLES, INFINITE, TAKEN, each, count=2),
        planted("delta of a row without gradient", HOLES, DELTAS, r"mov.b32 \1, \3;", each, count=2),
        planted("no delta", WALK, DELTAS, r"mov.b32 \1, 0;", each, count=2),
        planted("delta of half a row", WALK, r"shfl\.sync\.bfly\.b32 (\s*%r\d+), (%r\d+), 4, 31, -1;", r"mov.b32 \1, 0;", alone(0, -1)),
        planted(
            "dS not multiplied by P",
            WALK,
            r"mul\.rn\.f32x2 (\s*%rd\d+), %rd\d+, (%rd\d+);(?=\s*mov\.b64 \s*\{%r\d+, %r\d+\}, %rd\d+;\s*add\.rn)",
            r"mov.b64 \1, \2;",
            alone(0, -1),
        ),
        planted(
            "an exponential without its scale",
            WALK,
            r"fma\.rn\.f32x2 (\s*%rd\d+), (%rd\d+), %rd5, %rd6;",
            r"add.rn.f32x2 \1, \2, %rd6;",
            alone(0, -1),
            count=32,
        ),
        planted(
            "an exponential without lse",
            WALK,
            r"fma\.rn\.f32x2 (\s*%rd\d+), (%rd\d+), %rd5, %rd6;",
            r"mul.rn.f32x2 \1, \2, %rd5;",
            alone(0, -1),
        ),
        planted("dQ not scaled", WALK, r"ld\.param\.b32 (\s*%r\d+), \[\w+_param_25\];", r"mov.b32 \1, 0x3F800000;"),
        planted("halves of a pair exchanged", WALK, ptx.PAIRS, r"\1, \3, \2;", alone(0, -1)),
        planted("dQ begins with what was there", WALK, r"setp\.ne\.b32 (\s*%p\d+), %r2618, 0;(?=\s*shl)", r"mov.pred \1, -1;", count=1),
        planted(
            "S begins with what was there",
            WALK,
            ptx.FRESH_PRODUCTS,
            r"mov.pred \1, -1;",
            each,
            count=2,
        ),
        # indices
        planted("statistics exchanged", WALK, STATISTICS, r"st.shared.b32 \1+229376], \3;", alone(1, 3), count=4),
        planted("statistics not stored", WALK, r"st\.global\.b32 [^;]*;", "", each, count=4),
        planted(
            "statistics of all heads in one place", HEADS, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_24\];", r"mov.b64 \1, 0;", together
        ),
        planted("dQ of all heads in one place", HEADS, r"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_23\];", r"mov.b64 \1, 0;"),
        *(
            planted(f"{name} of the first head", HEADS, rf"ld\.param\.b64 (\s*%rd\d+), \[\w+_param_{index}\];", r"mov.b64 \1, 0;", together)
            for name, index in (("dout", 17), ("out", 19), ("lse", 21))
        ),
        planted("keys of the query head", HEADS, POSTED, r"st.shared.v4.b32 \1, {\2, \3, \3, \5};", alone(0), count=2),
        planted("rows of the first item", WALK, POSTED, r"st.shared.v4.b32 \1, {\2, \3, \4, 0};", alone(0)),
        planted(
            "one row too many",
            HEADS,
            POSTED,
            r"{ .reg .b32 %one; add.s32 %one, \2, 1; st.shared.v4.b32 \1, {%one, \3, \4, \5}; }",
            alone(1),
        ),
        planted(
            "a key too many", WALK, POSTED, r"{ .reg .b32 %one; add.s32 %one, \5, 1; st.shared.v4.b32 \1, {\2, \3, \4, %one}; }", alone(1)
        ),
        *(
            planted(f"box of columns {column} from the first", WALK, ptx.BOXES.format(column), r"mov.b32 \1, 0;", each)
            for column in (64, 128)
        ),
        planted("keys past the end not cleared", WALK, ptx.ZERO_STORES, "", together, count=12),
        planted("first box of keys not cleared", WALK, ptx.ZERO_STORES, "", alone(0, 4, 8)),
        planted(
            "second half of dS over the first",
            WALK,
            r"shl\.b32 (\s*%r\d+), %r\d+, 5;(?=\s*add\.s32 \s*%r\d+, %r\d+, %r\d+;\s*add\.s32 \s*%r\d+, %r\d+, 448;)",
            r"mov.b32 \1, 0;",
            count=1,
        ),
        planted("second half of S read twice", WALK, r"add\.s32 (\s*%r27, )%r23, 128;", r"add.s32 \g<1>%r23, 96;", count=1),
        planted("second half of a Q tile from the first rows", WALK, r"add\.s32 (\s*%r119, %r113, )64;", r"add.s32 \g<1>0;", count=1),
        # Heads of 256 columns: tiles of 64 keys. Not the waits that survivors.toml explains, or that only other lengths show.
        planted(
            "wide: missing wait",
            WIDE,
            ptx.WAITS,
            ptx.NO_WAIT,
            alone(2, 17, 24, *range(2), 3, 4, 6, *range(8, 16), *range(18, 24), *range(25, 28), *range(30, 35)),
            count=37,
        ),
        planted("wide: missing arrival", WIDE, ptx.ARRIVALS, "", each, count=12),
        planted("wide: missing commit", WIDE, ptx.COMMITS, "", each),
        planted("wide: keys past the end not cleared", WIDE, ptx.ZERO_STORES, "", together),
    ),
)
