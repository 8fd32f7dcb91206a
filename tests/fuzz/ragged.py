"""Decode calls with cu_seqlens_q: whether offsets and plans are right, and which results a call writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cute_mla.spec.dense_decode import unit_tokens
from cute_mla.spec.split_plan import RaggedQueries
from cute_mla.testing.operations.decode import token_ranges
from cute_mla.testing.split_plan_reference import reference_units

Arguments: TypeAlias = Mapping[str, Any]


def are_apart(ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether no token belongs to two requests."""
    used = sorted((first, end) for first, end in ranges if first < end)
    return all(end <= first for (_, end), (first, _) in pairwise(used))


def is_plan(arguments: Arguments) -> bool:
    """Return whether two tensors are a plan for a call: parts cover the tiles of its units in order, and a table has packed units."""
    q, rows, splits = arguments["q"], arguments["tile_scheduler_metadata"].tolist(), arguments["num_splits"].tolist()
    room, units = len(splits) - 1, len(q)
    if arguments.get("cu_seqlens_q") is not None:
        units = len(token_ranges(arguments))
        if arguments.get("indices") is None:
            requests, most = len(arguments["block_table"]), int(arguments["max_seqlen_q"])
            own = unit_tokens(most, q.shape[1] // arguments["k_cache"].shape[2])
            wanted = reference_units(arguments["cu_seqlens_q"].tolist(), RaggedQueries(requests, len(q), most, own))
            units, table, rows = len(wanted), rows[len(rows) - room :], rows[: len(rows) - room]
            if [tuple(row) for row in table[:units]] != [unit.row for unit in wanted]:
                return False
    elif not rows:
        return True
    place = (0, 0)
    for begin, end, begin_tile, end_tile, *_, is_open in rows:
        if begin == room:
            continue
        if (begin, begin_tile) != place or not begin <= end < units or end_tile < 0:
            return False
        place = (end + 1, 0) if is_open else (end, end_tile)
    return not units or (place == (units, 0) and splits[0] == 0 and splits == sorted(splits))


def used_tokens(arguments: Arguments) -> Tensor:
    """Return bool [total_q]: whether a query token belongs to a request."""
    used = torch.zeros(len(arguments["q"]), dtype=torch.bool)
    for first, end in token_ranges(arguments):
        used[first:end] = True
    return used


def of_used_rows(arguments: Arguments, verify: Callable[[Any], str]) -> Callable[[Any], str]:
    """Return a judge that leaves out what a call allocated for tokens of no request; where the caller passed it, it stays NaN."""
    used = used_tokens(arguments)
    given = [arguments.get(name) is not None for name in ("out", "lse")]

    def judge(results: Any) -> str:
        if isinstance(results, tuple) and len(results) == len(given):
            for result, is_given in zip(results, given, strict=True):
                if not is_given and len(result) == len(used):
                    result[~used] = math.nan
        return verify(results)

    return judge
