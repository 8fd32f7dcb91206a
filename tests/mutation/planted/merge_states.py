"""Bugs in the merge of states.

One source serves all architectures, so each bug is planted in the kernel of one of them, in turn.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.testing.operations.merge_states.case import MergeStatesCase
from tests.mutation.planting import in_turn, planted, together

EMPTY = MergeStatesCase(states=3, tokens=4, empty="some", outputs="given")  # rows with lse inf or -inf and NaN in out, some in all states
LISTED = replace(EMPTY, states=8, h_q=9, head_dim=128)
STACKED = replace(EMPTY, states=70, form="stacked")  # more than a warp has lanes

SECOND_STATE = r"setp\.(eq|ne)\.(b32|s32)\s+(%p\d+), (%r\d+), 1;"

BUGS = [
    bug
    for name, case in (("", EMPTY), ("listed: ", LISTED))
    for bug in (
        planted(f"{name}infinite lse has weight", case, "0f7F800000", "0f7F7FFFFF", together),
        planted(f"{name}wrong logarithm", case, "0f3F317218", "0f3F800000", together),
        planted(f"{name}first state twice", case, SECOND_STATE, r"setp.\1.\2 \3, \4, 77;", together),
    )
]
UNBROKEN = ({"empty": EMPTY, "listed": LISTED}, {"stacked": STACKED})

SUITES = in_turn("merge_states", UNBROKEN, BUGS)
