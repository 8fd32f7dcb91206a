"""The operation merge_states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .... import reference
from ....api import merge_states
from ...compare import MERGED_BF16, MERGED_FP16, MERGED_LSE, Tolerance
from ..operation import Operation, Result, empty_lse, outputs_of
from ..requests import Call, Picks, own_rows
from .case import MergeStatesCase, MergeStatesTensors, make_merge_states_tensors
from .suites import OP_SUITES


def _arguments(case: MergeStatesCase, tensors: MergeStatesTensors, workspace: Tensor | None) -> dict[str, Any]:
    outs, lses = tensors.outs, tensors.lses
    if case.in_place:  # the call overwrites a state, and the next run needs it
        outs, lses = outs.clone(), lses.clone()
    return {
        "outs": outs if case.form == "stacked" else list(outs),
        "lses": lses if case.form == "stacked" else list(lses),
        **({"out": outs[1], "lse": lses[1]} if case.in_place else outputs_of(tensors, "out", "lse")),
        "empty_lse": empty_lse(case),
    }


def _results_of(case: MergeStatesCase, arguments: Mapping[str, Any], returned: Any) -> Result:
    """Return out and lse, copies if they overwrote a state."""
    out, lse = returned
    return (out.clone(), lse.clone()) if case.in_place else (out, lse)


def _expected(arguments: Mapping[str, Any]) -> Result:
    outs, lses = (torch.stack([*states]) if len(states) else states for states in (arguments["outs"], arguments["lses"]))
    return reference.merge_states(outs, lses, arguments["empty_lse"])


def _bounds(case: MergeStatesCase) -> Mapping[str, Tolerance]:
    """Return the tolerances of one rounding of out: at most 2^-9 of an element in bf16, 2^-12 in fp16."""
    out = replace(MERGED_BF16, row_tol=2.5e-3) if case.dtype == "bf16" else replace(MERGED_FP16, row_tol=3.5e-4)
    return {"out": out, "lse": MERGED_LSE}


def _taken(case: MergeStatesCase, tensors: MergeStatesTensors, picks: Picks, moved: bool) -> Call:
    """Take tokens of a call. moved: rows further apart."""
    outs, lses = (tensor[:, list(picks)] for tensor in (tensors.outs, tensors.lses))
    if moved:
        outs, lses = (torch.stack([tensor, tensor], dim=2)[:, :, 0] for tensor in (outs, lses))
    return replace(case, tokens=len(picks)), MergeStatesTensors(outs, lses)


MERGE_STATES = Operation(
    MergeStatesCase,
    OP_SUITES,
    make_merge_states_tensors,
    merge_states,
    _arguments,
    _expected,
    results_of=_results_of,
    bounds=_bounds,
    taken=_taken,
    of=own_rows,
    requests=lambda case: case.tokens,
)
