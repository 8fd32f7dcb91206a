"""Bugs in dense prefill with a mask of keys, for Hopper, Blackwell and RTX boards: the mask, the search for visible tiles, items in parts.

What these kernels share with dense prefill has its bugs in dense_prefill_sm90.py, dense_prefill_sm100.py and dense_prefill_sm120.py.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90, SM100, SM120
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Planted, Suite, alone, each_in, planted, together, together_in

# One CTA walks items of three tiles, none and one; every row sees another key, and the rows of a tile see one of every tile only together.
WALK = DensePrefillCase(lengths=((130, 300), (0, 40), (64, 257), (5, 0), (3, 65)), mask="single", outputs="given", sm_count=1)
# The same with scores so far apart that a hidden one must not count in a row's maximum.
STEEP = replace(WALK, values="cliff")
# Of an item's two parts only the first has a visible tile, and another item follows.
GAPS = DensePrefillCase(lengths=((1, 4200), (0, 9), (2, 40)), mask="gaps", outputs="given", sm_count=1)

# So many items and parts that every ring of them is gone round.
MANY = DensePrefillCase(lengths=((5, 64), (140, 100), (0, 3), (130, 140)) * 2, mask="single", outputs="given", sm_count=1)
PASSED = replace(MANY, causal=True)  # warps of RTX boards pass tiles that others attend to

# A hidden score becomes -inf, as a copy: limits of keys change scores in place.
SHOWN = r"selp\.f32 \t(%r\d+), (?!\1,)(%r\d+), 0fFF800000, %p\d+;"
SHOWN_BY_NOT = r"selp\.f32 \t(%r\d+), 0fFF800000, (%r\d+), %p\d+;"
MOVED = r"vote\.sync\.any\.pred \t(%p\d+), %p\d+, -1;"
COPY = r"mov.b32 \1, \2;"
SEARCHED = r"vote\.sync\.all\.pred \t(%p\d+), %p\d+, -1;"
VISIBLE = r"(vote\.sync\.ballot\.b32 \t%r\d+, )%p\d+, -1;"
LOW_FIELDS = r"(and\.b32 \t%r\d+, %r\d+, )858993459;"
LOW_HALVES = r"(and\.b32 \t%r\d+, %r\d+, )252645135;"

UNBROKEN = {"walk": WALK, "steep": STEEP, "gaps": GAPS, "many": MANY}


def common() -> tuple[Planted, ...]:
    """Return the bugs of every architecture."""
    return (
        planted("no mask of keys", WALK, SHOWN_BY_NOT, COPY, together),
        planted("the search for visible tiles stops at the first rows", WALK, SEARCHED, r"setp.eq.u32 \1, 0, 0;", alone(0), count=1),
    )


SUITE_SM90 = Suite(
    SM90,
    UNBROKEN,
    (
        *common(),
        planted("missing wait", MANY, ptx.WAITS, ptx.NO_WAIT, or_case=GAPS),
        # The last arrival releases values after all items; nobody waits for it.
        planted("missing arrival", MANY, ptx.ARRIVALS, "", each_in(0, -1), or_case=GAPS),
        planted("mask of one score missing", WALK, SHOWN_BY_NOT, COPY, alone(0, 20)),
        planted("mask of the first score missing", WALK, SHOWN, COPY, alone(0)),
        planted("fields of the wrong lane", WALK, LOW_FIELDS, r"\g<1>-858993460;", alone(0, 1)),
        planted("halves of the wrong lane", WALK, LOW_HALVES, r"\g<1>-252645136;", alone(0, 1)),
    ),
)
MAXIMUM = 128  # selects in front of the maximum, on Blackwell; those of the probabilities follow
# Without the waits for stages that are released with others that are waited for, and, of the mma role, for the last keys of tile 1, which
# tile 0 has waited for: both tiles multiply all visible key tiles.
WAITS = alone(*range(24), 25, 27, 29, 30, 31, 34, 35)
SUITE_SM100 = Suite(
    SM100,
    UNBROKEN,
    (
        *common(),
        planted("mask of one score missing", WALK, SHOWN_BY_NOT, COPY, alone(MAXIMUM, MAXIMUM + 20, -1)),
        planted("the reference follows hidden scores", STEEP, SHOWN_BY_NOT, COPY, together_in(0, MAXIMUM)),
        planted("the reference stays", STEEP, MOVED, r"setp.ne.u32 \1, 0, 0;", alone(0)),
        planted("missing wait", MANY, ptx.WAITS, ptx.NO_WAIT, WAITS, count=36, or_case=GAPS),
        planted("missing arrival", MANY, ptx.ARRIVALS, or_case=GAPS),
    ),
)
OWN_BITS = r"shr\.u32 \t(%r\d+), (%r\d+), %r\d+;(?=\s*(?:shr\.u32|and\.b32))"  # of the words of a lane's rows
SUITE_SM120 = Suite(
    SM120,
    {**UNBROKEN, "passed": PASSED},
    (
        *common(),
        planted("missing wait", PASSED, ptx.WAITS, ptx.NO_WAIT, or_case=GAPS),
        planted("missing arrival", MANY, ptx.ARRIVALS, or_case=GAPS),
        planted("mask of one score missing", WALK, SHOWN_BY_NOT, COPY, alone(0, 20)),
        planted("bits of another lane", WALK, OWN_BITS, r"mov.b32 \1, \2;", together),
    ),
)
SUITES = {"masked_prefill_sm90": SUITE_SM90, "masked_prefill_sm100": SUITE_SM100, "masked_prefill_sm120": SUITE_SM120}
