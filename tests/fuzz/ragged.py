"""Expected results of decode calls with cu_seqlens_q: those of requests one by one, and nothing for tokens of none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cute_mla.spec.dense_decode import unit_tokens
from cute_mla.spec.split_plan import RaggedQueries
from cute_mla.testing.compare import Tolerance
from cute_mla.testing.split_plan_reference import reference_units

Arguments: TypeAlias = Mapping[str, Any]
Expected: TypeAlias = tuple[tuple[Tensor, Tensor], dict[str, Tolerance]]

_PER_TOKEN = ("tree_mask",)  # operands with a row of each packed token
_PER_REQUEST = ("block_table", "cache_seqlens")
_SPARSE_PER_TOKEN = ("indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")


def token_ranges(arguments: Arguments) -> list[tuple[int, int]]:
    """Return the first query token and the end of each request, as the documentation has it: clipped, and max_seqlen_q tokens at most.

    In sparse decode every token up to the last offset has keys of its own, whatever request it belongs to.
    """
    total, most = len(arguments["q"]), int(arguments["max_seqlen_q"])
    offsets = arguments["cu_seqlens_q"].clamp(0, total).tolist()
    if arguments.get("indices") is not None:
        return [(token, token + 1) for token in range(offsets[-1])]
    return [(first, min(max(first, end), first + most)) for first, end in pairwise(offsets)]


def are_apart(ranges: Sequence[tuple[int, int]]) -> bool:
    """Return whether no token belongs to two requests."""
    used = sorted((first, end) for first, end in ranges if first < end)
    return all(end <= first for (_, end), (first, _) in pairwise(used))


def is_ragged_plan(arguments: Arguments) -> bool:
    """Return whether two tensors are a plan for these offsets: the table has their units, and the parts cover the tiles of each."""
    q, rows = arguments["q"], arguments["tile_scheduler_metadata"].tolist()
    splits = arguments["num_splits"].tolist()
    room, units = len(splits) - 1, len(token_ranges(arguments))
    if arguments.get("indices") is None:
        requests, most = len(arguments["block_table"]), int(arguments["max_seqlen_q"])
        own = unit_tokens(most, q.shape[1] // arguments["k_cache"].shape[2])
        wanted = reference_units(arguments["cu_seqlens_q"].tolist(), RaggedQueries(requests, len(q), most, own))
        units, table = len(wanted), rows[len(rows) - room :]
        rows = rows[: len(rows) - room]
        if [tuple(row) for row in table[:units]] != [unit.row for unit in wanted]:
            return False
    place = (0, 0)
    for begin, end, begin_tile, end_tile, *_, is_open in rows:
        if begin == room:
            continue
        if (begin, begin_tile) != place or not begin <= end < units or end_tile < 0:
            return False
        place = (end + 1, 0) if is_open else (end, end_tile)
    return not units or (place == (units, 0) and splits[0] == 0 and splits == sorted(splits))


def ragged_reference(arguments: Arguments, decode: Callable[[dict[str, Any]], Expected]) -> Expected:
    """Return out [total_q, h_q, d_v] and lse [total_q, h_q] of requests that are decoded one by one; NaN for tokens of no request."""
    q = arguments["q"]
    sparse = arguments.get("indices") is not None
    out = torch.full((*q.shape[:2], int(arguments["head_dim_v"])), math.nan)
    lse = torch.full(q.shape[:2], math.nan)
    _, tolerances = decode(_of_tokens(arguments, 0, slice(0, 0), sparse))
    for request, (first, end) in enumerate(token_ranges(arguments)):
        if first < end:
            (own_out, own_lse), tolerances = decode(_of_tokens(arguments, request, slice(first, end), sparse))
            out[first:end], lse[first:end] = own_out[0], own_lse[0].T
    return (out, lse), tolerances


def _of_tokens(arguments: Arguments, request: int, tokens: slice, sparse: bool) -> dict[str, Any]:
    """Return the arguments of a call of one request without cu_seqlens_q."""
    own = dict(arguments)
    own["q"] = own["q"][None, tokens]
    for name in _SPARSE_PER_TOKEN if sparse else _PER_TOKEN:
        if own.get(name) is not None:
            own[name] = own[name][tokens] if name.endswith("length") else own[name][None, tokens]
    for name in () if sparse else _PER_REQUEST:
        own[name] = own[name][request : request + 1]
    return own


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
