"""Arguments that both decode ops take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...api import get_mla_metadata
from ...spec.split_plan import (
    PART_BEGIN_REQ,
    PART_BEGIN_SPLIT,
    PART_BEGIN_TILE,
    PART_END_OPEN,
    PART_END_REQ,
    PART_END_TILE,
    PLAN_COLUMNS,
    UNIT_ALL_TOKENS,
    UNIT_BASE,
    UNIT_FIRST_TOKEN,
    UNIT_LATER,
    UNIT_REQUEST,
    UNIT_TOKENS,
)
from ..cases.base import DecodeCase
from .dense_decode.case import DenseDecodeTensors
from .operation import Plan, Result, empty_lse, operands_of, outputs_of
from .sparse_decode.case import SparseDecodeTensors

_FAR_BELOW, _FAR_ABOVE = -(1 << 20), 1 << 30
# Columns of a part and numbers that no plan has there: before and behind all requests, tiles and rows of the accumulator. In a plan of six
# parts, those of the second half meet those of the first.
_WRONG_NUMBERS = (
    *((PART_BEGIN_REQ, -5), (PART_BEGIN_REQ, _FAR_ABOVE), (PART_BEGIN_TILE, -7), (PART_BEGIN_TILE, _FAR_ABOVE)),
    *((PART_END_REQ, -9), (PART_END_REQ, _FAR_ABOVE), (PART_END_TILE, _FAR_ABOVE), (PART_BEGIN_TILE, 1)),
    *((PART_BEGIN_SPLIT, _FAR_BELOW), (PART_BEGIN_SPLIT, _FAR_ABOVE), (PART_END_TILE, _FAR_ABOVE), (PART_END_TILE, -3)),
)
# Likewise of a unit. So few tokens that, times heads, the number of those that the unit lacks is no int32 and comes out negative.
_WRONG_UNITS = (
    *((UNIT_REQUEST, -5), (UNIT_REQUEST, _FAR_ABOVE), (UNIT_FIRST_TOKEN, _FAR_BELOW), (UNIT_FIRST_TOKEN, _FAR_ABOVE)),
    *((UNIT_TOKENS, -(1 << 30)), (UNIT_TOKENS, _FAR_ABOVE), (UNIT_ALL_TOKENS, _FAR_BELOW), (UNIT_LATER, _FAR_ABOVE)),
    *((UNIT_LATER, _FAR_BELOW), (UNIT_ALL_TOKENS, _FAR_ABOVE), (UNIT_BASE, _FAR_BELOW), (UNIT_BASE, _FAR_ABOVE)),
)


def decode_operands(case: DecodeCase, tensors: DenseDecodeTensors | SparseDecodeTensors) -> dict[str, Any]:
    """Return the arguments of both decode ops that decide on the results."""
    return {
        **operands_of(tensors, "q", "k_cache", "cu_seqlens_q"),
        "head_dim_v": case.d_v,
        "softmax_scale": case.softmax_scale,
        "empty_lse": empty_lse(case),
        "max_seqlen_q": case.max_seqlen_q,
    }


def plan_arguments(
    case: DecodeCase, tensors: DenseDecodeTensors | SparseDecodeTensors, workspace: Tensor | None, make_plan: Callable[[], Plan]
) -> dict[str, Any]:
    """Return the other arguments of both decode ops. make_plan: makes a plan of tensors, called if the case asks for one."""
    metadata, num_splits = get_mla_metadata() if case.metadata == "object" else _plan_tensors(case, make_plan())
    return {
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
        **outputs_of(tensors, "out", "lse"),
        "workspace": workspace,
        "batch_invariant": case.batch_invariant,
    }


def token_ranges(arguments: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the first packed query token and the end of each request: clipped to q, and max_seqlen_q tokens at most.

    In sparse decode every token up to the last offset has keys of its own, whatever request it belongs to.
    """
    total, most = len(arguments["q"]), int(arguments["max_seqlen_q"])
    offsets = arguments["cu_seqlens_q"].clamp(0, total).tolist()
    if arguments.get("indices") is not None:
        return [(token, token + 1) for token in range(offsets[-1])]
    return [(first, min(max(first, end), first + most)) for first, end in pairwise(offsets)]


def packed(arguments: Mapping[str, Any], results: Sequence[tuple[slice, Result]]) -> Result:
    """Return out fp32 [total_q, h_q, d_v] and lse fp32 [total_q, h_q] of results for packed tokens, [1, n, h_q, d_v] and [1, h_q, n].

    Rows of no request are NaN.
    """
    shape = arguments["q"].shape[:2]
    out, lse = torch.full((*shape, int(arguments["head_dim_v"])), math.nan), torch.full(shape, math.nan)
    for tokens, (own_out, own_lse) in results:
        out[tokens], lse[tokens] = own_out[0], own_lse[0].T
    return out, lse


def decode_results(case: DecodeCase, tensors: Any, results: Result, place: int) -> Result:
    """Return out and lse of the request at a place of a call."""
    first, end = (place, place + 1) if case.tokens is None else case.offsets[place : place + 2]
    return tuple(result[first:end] for result in results)


def _plan_tensors(case: DecodeCase, plan: Plan) -> Plan:
    """Copy a plan, as engines do that keep plans in buffers of their own, and overwrite the copy if the case says so."""
    metadata, num_splits = (torch.empty_like(part).copy_(part) for part in plan)
    if case.metadata == "overwritten":
        _overwrite_plan(metadata, num_splits, case.table_rows)
    return metadata, num_splits


def _overwrite_plan(metadata: Tensor, num_splits: Tensor, table_rows: int) -> None:
    """Write a plan that is none: each part has a request of its own turn, and a number or two that no plan has. So has each unit."""
    parts, batch = len(metadata) - table_rows, len(num_splits) - 1
    rows = torch.zeros(len(metadata), PLAN_COLUMNS, dtype=metadata.dtype)
    requests = torch.arange(parts) % max(batch, 1)
    rows[:parts, PART_BEGIN_REQ] = rows[:parts, PART_END_REQ] = requests
    rows[:parts, PART_END_OPEN] = requests == batch - 1
    rows[:parts, PART_END_TILE] = 2
    rows[parts:, UNIT_TOKENS] = rows[parts:, UNIT_ALL_TOKENS] = 1
    _spread(rows[:parts], _WRONG_NUMBERS)
    _spread(rows[parts:], _WRONG_UNITS)
    metadata.copy_(rows)
    num_splits.fill_(7)  # equal numbers: whole requests
    num_splits[:2] = torch.tensor((_FAR_BELOW, _FAR_ABOVE))[: batch + 1]


def _spread(rows: Tensor, numbers: Sequence[tuple[int, int]]) -> None:
    """Write numbers to their columns, each to the next row in a circle."""
    for index, (column, number) in enumerate(numbers if len(rows) else ()):
        rows[index % len(rows), column] = number
