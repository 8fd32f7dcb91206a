"""split_plan in plain Python, and the loop of its consumers: what the kernel must produce and what a plan must satisfy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cute_mla.spec.mla import ceil_div
from cute_mla.spec.split_plan import (
    NO_SPLIT_LIMIT,
    PART_BEGIN_REQ,
    PART_BEGIN_SPLIT,
    PART_BEGIN_TILE,
    PART_END_OPEN,
    PART_END_REQ,
    PART_END_TILE,
    PIECE_OVERHEAD_TILES,
    TILE_KEYS,
)


@dataclass(frozen=True)
class Plan:
    """parts: num_parts rows of PLAN_COLUMNS; num_splits: batch + 1 first accumulator rows."""

    parts: tuple[tuple[int, ...], ...]
    num_splits: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """The key tiles [begin, end) of one request, done at once; row: its accumulator row, None when written directly."""

    request: int
    begin: int
    end: int
    row: int | None


def actual_tiles(length: int) -> int:
    """Key tiles that a length occupies."""
    return ceil_div(max(length, 0), TILE_KEYS)


def planned_tiles(length: int) -> int:
    """Key tiles that the plan reckons with: at least one, since an empty request must still write its output."""
    return max(actual_tiles(length), 1)


def reference_boundaries(lengths: Sequence[int], num_parts: int, split_tiles: int) -> list[tuple[int, int]]:
    """The num_parts + 1 boundaries (request, tile) between parts."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + planned_tiles(length) + PIECE_OVERHEAD_TILES)
    step = ceil_div(starts[-1], num_parts)
    boundaries = []
    for part in range(num_parts + 1):
        cost = min(part * step, starts[-1])
        if cost == starts[-1]:
            boundaries.append((len(lengths), 0))
            continue
        request = bisect_right(starts, cost) - 1
        tile = max(cost - starts[request] - PIECE_OVERHEAD_TILES, 0)
        boundaries.append((request, tile - tile % split_tiles if split_tiles < NO_SPLIT_LIMIT else tile))
    return boundaries


def reference_plan(lengths: Sequence[int], num_parts: int, split_tiles: int = NO_SPLIT_LIMIT, max_splits: int = 0) -> Plan:
    """The plan for these lengths, boundary by boundary."""
    batch = len(lengths)
    boundaries = reference_boundaries(lengths, num_parts, split_tiles)
    invariant = split_tiles < NO_SPLIT_LIMIT
    cuts = [0] * batch
    parts = []
    for begin, end in pairwise(boundaries):
        begin_split = 0
        if begin[1] > 0:
            cuts[begin[0]] += 1
            begin_split = 0 if invariant else _pieces_before(boundaries, begin)
        parts.append(_part(lengths, begin, end, begin_split))
    # Boundary 0 cuts nothing and the last boundary is the end of the batch, so the loop above has seen every cut.
    rows = [0]
    for count in cuts:
        rows.append(rows[-1] + (max_splits if invariant else count + 1 if count else 0))
    return Plan(tuple(parts), tuple(rows))


def _pieces_before(boundaries: list[tuple[int, int]], begin: tuple[int, int]) -> int:
    """Pieces of a request that lie before a cut of it."""
    return len({tile for request, tile in boundaries if request == begin[0] and 0 < tile <= begin[1]})


def _part(lengths: Sequence[int], begin: tuple[int, int], end: tuple[int, int], begin_split: int) -> tuple[int, ...]:
    batch = len(lengths)
    if begin == end:
        return (batch, batch, 0, 0, 0, 0, 0, 0)
    end_open = end[1] == 0
    end_req = end[0] - 1 if end_open else end[0]
    end_tile = planned_tiles(lengths[end_req]) if end_open else end[1]
    first, last = begin[1] > 0, not end_open
    if begin[0] == end_req:
        first = last = first or last
    return (begin[0], end_req, begin[1], end_tile, begin_split, int(first), int(last), int(end_open))


def pieces(plan: Plan, lengths: Sequence[int], split_tiles: int) -> Iterator[tuple[int, Piece]]:
    """What every part does with these lengths, which may differ from the planned ones: (part, piece), as the decode
    kernels walk it. A piece may be empty: it then says so in its accumulator row, or writes an empty output."""
    batch = len(lengths)
    for index, part in enumerate(plan.parts):
        if part[PART_BEGIN_REQ] >= batch:
            continue
        for request in range(part[PART_BEGIN_REQ], part[PART_END_REQ] + 1):
            tiles = actual_tiles(lengths[request])
            first = part[PART_BEGIN_TILE] if request == part[PART_BEGIN_REQ] else 0
            closed = request == part[PART_END_REQ] and not part[PART_END_OPEN]
            end = min(part[PART_END_TILE], tiles) if closed else tiles
            split = part[PART_BEGIN_SPLIT] if request == part[PART_BEGIN_REQ] else 0
            for piece in _request_pieces(plan, request, (first, end, tiles), split, split_tiles):
                yield index, piece


def _request_pieces(plan: Plan, request: int, span: tuple[int, int, int], split: int, split_tiles: int) -> Iterator[Piece]:
    first, end, tiles = span
    base = plan.num_splits[request]
    if split_tiles < NO_SPLIT_LIMIT:
        if tiles <= split_tiles:
            if first == 0:
                yield Piece(request, 0, end, None)
            return
        for begin in range(first, end, split_tiles):
            yield Piece(request, begin, min(begin + split_tiles, end), base + begin // split_tiles)
        return
    direct = plan.num_splits[request + 1] == base
    yield Piece(request, first, max(end, first), None if direct else base + split)
