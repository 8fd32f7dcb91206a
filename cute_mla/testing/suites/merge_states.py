"""Suites of merge_states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

from ...spec.merge_states import HEAD_DIMS, LISTED_STATES, ROWS_PER_BLOCK
from ..cases.base import DTYPES
from ..cases.merge_states import MergeStatesCase, StateForm, StateLayout
from .entries import OpSuites, SimulatorReduction

_MINUS_INF = float("-inf")
_HEADS = (1, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 1, 128)
_STATES = (1, 2, 3, LISTED_STATES)

SMOKE: tuple[MergeStatesCase, ...] = (
    # Every dtype and width, listed and stacked, with every layout of the states.
    MergeStatesCase(states=3, tokens=5, h_q=3, layout="sliced", empty="some"),
    MergeStatesCase("fp16", states=3, tokens=4, h_q=9, form="stacked", layout="odd", empty="some", outputs="odd"),
    MergeStatesCase(head_dim=128, states=LISTED_STATES, batch=2, tokens=3, h_q=8, layout="heads_first", outputs="strided"),
    MergeStatesCase("fp16", head_dim=128, states=3, batch=2, tokens=3, h_q=7, layout="odd", empty="some", empty_lse=_MINUS_INF),
    MergeStatesCase("fp16", states=LISTED_STATES, tokens=2, h_q=17, layout="heads_first", outputs="given"),
    MergeStatesCase(head_dim=128, states=2, batch=3, tokens=2, h_q=5, form="stacked", layout="sliced", outputs="odd"),
    # One state, and more states than a call can list.
    MergeStatesCase(states=1, tokens=3, h_q=128, outputs="given"),
    MergeStatesCase("fp16", head_dim=128, states=40, tokens=2, h_q=3, form="stacked", empty="some"),
    # Results in the place of a state; rows that are empty in all states; no rows.
    MergeStatesCase(states=3, batch=2, tokens=2, h_q=9, in_place=True, empty="some", empty_lse=_MINUS_INF),
    MergeStatesCase("fp16", head_dim=128, states=2, tokens=3, h_q=16, in_place=True),
    MergeStatesCase(states=2, tokens=2, h_q=3, empty="all", outputs="strided"),
    MergeStatesCase(states=2, tokens=0, h_q=3),
)


def _grid() -> Iterator[MergeStatesCase]:
    """Yield every layout over numbers of heads and states, in every variant."""
    for dtype, head_dim, form, layout in product(DTYPES, HEAD_DIMS, get_args(StateForm), get_args(StateLayout)):
        for h_q, states in product(_HEADS, _STATES):
            yield MergeStatesCase(dtype, head_dim=head_dim, form=form, layout=layout, h_q=h_q, states=states, empty="some")


def full_cases() -> list[MergeStatesCase]:
    """Return every case of the full suite once."""
    return list(dict.fromkeys([*SMOKE, *_grid()]))


# All cases are small: the simulated device runs the full suite.
OP_SUITES = OpSuites(SMOKE, full_cases, SimulatorReduction(lambda case: True))
