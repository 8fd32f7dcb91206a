"""The operation topk_indices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .... import reference
from ....indexer import topk_indices
from ..operation import Operation, Result, operands_of, outputs_of
from ..requests import Call, Picks, own_rows
from .case import TopkIndicesCase, TopkIndicesTensors, make_topk_indices_tensors
from .suites import OP_SUITES


def _arguments(case: TopkIndicesCase, tensors: TopkIndicesTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {**operands_of(tensors, "logits", "lengths"), "topk": case.topk, **outputs_of(tensors, "out")}


def _expected(arguments: Mapping[str, Any]) -> Result:
    return (reference.topk_indices(arguments["logits"], arguments["lengths"], int(arguments["topk"])),)


def _taken(case: TopkIndicesCase, tensors: TopkIndicesTensors, picks: Picks, moved: bool) -> Call:
    """Take rows of a call. moved: further apart, from an odd number on."""
    logits, lengths = (tensor[list(picks)] for tensor in (tensors.logits, tensors.lengths))
    if moved:
        logits = torch.cat([logits[:, :1], logits, logits[:, :2]], dim=1)[:, 1:-2]
    return replace(case, rows=len(picks)), TopkIndicesTensors(logits, lengths)


TOPK_INDICES = Operation(
    TopkIndicesCase,
    OP_SUITES,
    make_topk_indices_tensors,
    topk_indices,
    _arguments,
    _expected,
    taken=_taken,
    of=own_rows,
    requests=lambda case: case.rows,
)
