"""The operation merge_states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ... import reference
from ...api import merge_states
from ..cases.merge_states import MergeStatesCase, MergeStatesTensors, make_merge_states_tensors
from .operation import Operation, Result, empty_lse, output_argument


def _arguments(case: MergeStatesCase, tensors: MergeStatesTensors, workspace: Tensor | None) -> dict[str, Any]:
    outs, lses = tensors.outs, tensors.lses
    if case.in_place:  # the call overwrites a state, and the next run needs it
        outs, lses = outs.clone(), lses.clone()
    return {
        "outs": outs if case.form == "stacked" else list(outs),
        "lses": lses if case.form == "stacked" else list(lses),
        "out": outs[1] if case.in_place else output_argument(tensors, "out"),
        "lse": lses[1] if case.in_place else output_argument(tensors, "lse"),
        "empty_lse": empty_lse(case),
    }


def _results_of(case: MergeStatesCase, arguments: Mapping[str, Any], returned: Any) -> Result:
    """Return out and lse, copies if they overwrote a state."""
    out, lse = returned
    return (out.clone(), lse.clone()) if case.in_place else (out, lse)


def _reference(case: MergeStatesCase, tensors: MergeStatesTensors) -> Result:
    return reference.merge_states(tensors.outs, tensors.lses, empty_lse(case))


MERGE_STATES = Operation(make_merge_states_tensors, merge_states, _arguments, _reference, results_of=_results_of)
