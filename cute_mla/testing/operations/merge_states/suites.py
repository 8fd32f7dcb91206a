"""Suites of merge_states."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import get_args

from ....spec.merge_states import HEAD_DIMS, LISTED_STATES, ROWS_PER_BLOCK, row_dtypes
from ...cases.base import DTYPES
from ...suites.cover import Choice, Factors, Variant, covers
from ...suites.entries import OpSuites
from .case import LseValues, MergeStatesCase, StateForm, StateLayout

KINDS = tuple((dtype, head_dim) for dtype in DTYPES for head_dim in HEAD_DIMS if dtype in row_dtypes(head_dim))
_MINUS_INF = float("-inf")
_HEADS = (1, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 1, 128)
_STATES = (1, 2, 3, LISTED_STATES)

_LAYOUTS: tuple[StateLayout, ...] = ("packed", "sliced", "odd", "heads_first")

# Forms with layouts of states.
_PLACES: tuple[tuple[StateForm, StateLayout], ...] = (
    ("listed", "packed"), ("listed", "odd"), ("listed", "heads_first"), ("listed", "far_tokens"),
    ("stacked", "sliced"), ("stacked", "odd"), ("stacked", "far_states"), ("stacked", "far_requests"), ("stacked", "far_heads"),
)  # fmt: skip

# Features of a case, by factor.
_FACTORS: Factors = {
    "states": (1, 3, LISTED_STATES, 33, 65),  # a warp reads 32 at a time
    "values": get_args(LseValues),
    "batch": (None, 2, 3),
    "tokens": (2, 3),
    "h_q": (3, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 1, 17),
    "place": _PLACES,
    "empty": ("none", "some"),
    "empty_lse": (None, _MINUS_INF),
    "outputs": ("allocated", "given", "strided", "odd", "far_requests", "far_tokens", "far_heads"),
}


def _small(choice: Choice) -> MergeStatesCase | None:
    """Return the case with these features; None if the values are not possible together."""
    rest = {name: value for name, value in choice.items() if name != "place"}
    (form, layout), many = choice["place"], choice["states"] > LISTED_STATES
    if many and (form == "listed" or choice["h_q"] > ROWS_PER_BLOCK):
        return None  # a state in a list has a pointer; rows of many states cost most
    if form == "stacked" and layout in ("odd", "far_states") and (not many or choice["values"] == "rising"):
        return None  # the loop over many states reads them by other instructions, and only those that have a weight
    if choice["batch"] is None and "far_requests" in (layout, choice["outputs"]):
        return None
    return MergeStatesCase(form=form, layout=layout, **rest)


VARIANTS = tuple(Variant(f"{dtype} d{head_dim}", {"dtype": dtype, "head_dim": head_dim}, _FACTORS) for dtype, head_dim in KINDS)

_MORE: tuple[MergeStatesCase, ...] = (
    # One state, and more states than a call can list.
    MergeStatesCase(states=1, tokens=3, h_q=128, outputs="given"),
    MergeStatesCase("fp16", head_dim=128, states=40, tokens=2, h_q=3, form="stacked", empty="some"),
    # Results in the place of a state; rows that are empty in all states; no rows.
    MergeStatesCase(states=3, batch=2, tokens=2, h_q=9, in_place=True, empty="some", empty_lse=_MINUS_INF),
    MergeStatesCase("fp16", head_dim=128, states=2, tokens=3, h_q=16, in_place=True),
    MergeStatesCase(states=2, tokens=2, h_q=3, empty="all", outputs="strided"),
    MergeStatesCase(states=2, tokens=0, h_q=3),
)
SMOKE: tuple[MergeStatesCase, ...] = tuple(dict.fromkeys([*_MORE, *covers(VARIANTS, _small)]))


def _grid() -> Iterator[MergeStatesCase]:
    """Yield every layout over numbers of heads and states, in every variant."""
    for (dtype, head_dim), form, layout in product(KINDS, get_args(StateForm), _LAYOUTS):
        for h_q, states in product(_HEADS, _STATES):
            yield MergeStatesCase(dtype, head_dim=head_dim, form=form, layout=layout, h_q=h_q, states=states, empty="some")


OP_SUITES = OpSuites(VARIANTS, SMOKE, _grid)
