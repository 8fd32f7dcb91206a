"""Reference of split_plan in plain Python, and of the loop in which the decode kernels process a plan."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..spec.mla import ceil_div
from ..spec.split_plan import (
    MOST_WHOLE_REQUESTS,
    PART_BEGIN_REQ,
    PART_BEGIN_SPLIT,
    PART_BEGIN_TILE,
    PART_END_OPEN,
    PART_END_REQ,
    PART_END_TILE,
    PIECE_OVERHEAD_TILES,
    TILE_KEYS,
    RaggedQueries,
    whole_slack,
)


@dataclass(frozen=True)
class SplitPlan:
    """The plan of a decode batch. parts: num_parts rows of PLAN_COLUMNS; num_splits: batch + 1 first accumulator rows."""

    parts: tuple[tuple[int, ...], ...]
    num_splits: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The key tiles [begin, end) of one request that one part processes; row: their accumulator row, None if the part writes the output."""

    request: int
    begin: int
    end: int
    row: int | None


def actual_tiles(length: int) -> int:
    """Return the number of key tiles of a length."""
    return ceil_div(max(length, 0), TILE_KEYS)


def planned_tiles(length: int) -> int:
    """Return the number of key tiles in the plan: at least one, since an empty request must still write its output."""
    return max(actual_tiles(length), 1)


def reference_boundaries(
    lengths: Sequence[int], num_parts: int, eighths: int = 0, overhead: int = PIECE_OVERHEAD_TILES
) -> list[tuple[int, int]]:
    """Return the num_parts + 1 boundaries (request, tile) of the parts. eighths: the argument whole_eighths. overhead: of a start."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + planned_tiles(length) + overhead)
    step = ceil_div(starts[-1], num_parts)
    if len(lengths) <= MOST_WHOLE_REQUESTS:
        whole = whole_boundaries(starts, num_parts, step + max(whole_slack(starts[-1], len(lengths), overhead), step * eighths // 8))
        if whole[-1] == len(lengths):
            return [(request, 0) for request in whole]
    boundaries = []
    for part in range(num_parts + 1):
        cost = min(part * step, starts[-1])
        if cost == starts[-1]:
            boundaries.append((len(lengths), 0))
            continue
        request = bisect_right(starts, cost) - 1
        tile = max(cost - starts[request] - overhead, 0)
        boundaries.append((request, tile))
    return boundaries


def whole_boundaries(starts: Sequence[int], num_parts: int, cap: int) -> list[int]:
    """Return num_parts + 1 boundaries, each a request, if every part takes as many whole requests as cost at most cap.

    starts: cost of all requests before each request, and the total. The last boundary is less than the batch if it does not fit.
    """
    boundaries = [0]
    for _ in range(num_parts):
        boundaries.append(bisect_right(starts, starts[boundaries[-1]] + cap) - 1)
    return boundaries


@dataclass(frozen=True)
class Unit:
    """A work unit: `tokens` query tokens of a request, `later` of the request behind them. all_tokens: of the request. most: of a unit."""

    request: int
    first_token: int
    tokens: int
    all_tokens: int
    later: int
    most: int

    @property
    def row(self) -> tuple[int, ...]:
        """Return the unit's row of the table."""
        return self.request, self.first_token, self.tokens, self.all_tokens, self.later, self.first_token + self.tokens - self.most, 0, 0


def reference_units(cu_seqlens_q: Sequence[int], ragged: RaggedQueries) -> list[Unit]:
    """Return the units of packed query tokens, request by request. Offsets are clipped to the tokens that there are."""
    units = []
    for request, (first, end) in enumerate(pairwise(min(max(offset, 0), ragged.total_q) for offset in cu_seqlens_q)):
        tokens = min(max(end - first, 0), ragged.max_seqlen_q)
        for earlier in range(0, tokens, ragged.unit_tokens):
            own = min(tokens - earlier, ragged.unit_tokens)
            units.append(Unit(request, first + earlier, own, tokens, tokens - earlier - own, ragged.unit_tokens))
    return units[: ragged.units]


def reference_plan(
    lengths: Sequence[int], num_parts: int, room: int | None = None, eighths: int = 0, overhead: int = PIECE_OVERHEAD_TILES
) -> SplitPlan:
    """Return the plan for these lengths, computed boundary by boundary.

    room: for requests, those that there are not included. eighths: the argument whole_eighths. overhead: piece_overhead of the
    architecture.
    """
    batch = len(lengths)
    room = batch if room is None else room
    boundaries = reference_boundaries(lengths, num_parts, eighths, overhead)
    cuts = [0] * batch
    parts = []
    for begin, end in pairwise(boundaries):
        begin_split = 0
        if begin[1] > 0:
            cuts[begin[0]] += 1
            begin_split = _pieces_before(boundaries, begin)
        parts.append(_part(lengths, begin, end, begin_split) if begin != end else (room, room, 0, 0, 0, 0, 0, 0))
    # Boundary 0 splits no request and the last boundary is the end of the batch: the loop above has seen every cut.
    rows = [0]
    for count in cuts:
        rows.append(rows[-1] + (count + 1 if count else 0))
    return SplitPlan(tuple(parts), (*rows, *rows[-1:] * (room - batch)))


def _pieces_before(boundaries: list[tuple[int, int]], begin: tuple[int, int]) -> int:
    """Return the number of pieces of a request before one of its cuts."""
    return len({tile for request, tile in boundaries if request == begin[0] and 0 < tile <= begin[1]})


def _part(lengths: Sequence[int], begin: tuple[int, int], end: tuple[int, int], begin_split: int) -> tuple[int, ...]:
    end_open = end[1] == 0
    end_req = end[0] - 1 if end_open else end[0]
    end_tile = planned_tiles(lengths[end_req]) if end_open else end[1]
    first, last = begin[1] > 0, not end_open
    if begin[0] == end_req:
        first = last = first or last
    return (begin[0], end_req, begin[1], end_tile, begin_split, int(first), int(last), int(end_open))


def pieces(plan: SplitPlan, lengths: Sequence[int], split_tiles: int | None = None, max_splits: int = 0) -> Iterator[tuple[int, Piece]]:
    """Yield (part, piece) for all parts, in the order of the decode kernels. Lengths may differ from the planned lengths.

    An empty piece marks its accumulator row as empty, or writes an empty output.
    split_tiles: None, or the multiple to which a batch-invariant call rounds cuts down, with max_splits accumulator rows per request.
    """
    for index, part in enumerate(plan.parts):
        begin, end = _cuts(part, split_tiles)
        for request in range(begin[0], len(lengths)):
            if (request, 0) >= end:
                break
            tiles = actual_tiles(lengths[request])
            first = begin[1] if request == begin[0] else 0
            last = min(end[1], tiles) if request == end[0] else tiles
            if split_tiles is None:
                split = part[PART_BEGIN_SPLIT] if request == begin[0] else 0
                row, after = plan.num_splits[request], plan.num_splits[request + 1]
                yield index, Piece(request, first, max(first, last), None if row == after else row + split)
            else:
                for piece in _invariant_pieces(request, (first, last, tiles), split_tiles, max_splits):
                    yield index, piece


def _cuts(part: tuple[int, ...], split_tiles: int | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return begin and end of a part, each (request, tile); the end is exclusive."""
    begin, end = (part[PART_BEGIN_REQ], part[PART_BEGIN_TILE]), (part[PART_END_REQ], part[PART_END_TILE])
    if split_tiles is not None:
        begin, end = ((request, tile - tile % split_tiles) for request, tile in (begin, end))
    return begin, (end[0] + 1, 0) if part[PART_END_OPEN] else end


def _invariant_pieces(request: int, span: tuple[int, int, int], split_tiles: int, max_splits: int) -> Iterator[Piece]:
    first, last, tiles = span
    if tiles <= split_tiles:
        if first == 0:
            yield Piece(request, 0, last, None)
        return
    for begin in range(first, last, split_tiles):
        yield Piece(request, begin, min(begin + split_tiles, last), request * max_splits + begin // split_tiles)
