"""Walks the pieces of work that a plan gives to one part: request by request, split by split.

Every role of a decode kernel walks the same pieces in the same order, so the roles need no messages about what to do next.
What a role knows of its part and piece is read again where it is needed, a few loads from L2 per piece, so that only a
cursor lives in registers through the main loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.split_plan import (
    NO_SPLIT_LIMIT,
    PART_BEGIN_REQ,
    PART_BEGIN_SPLIT,
    PART_BEGIN_TILE,
    PART_END_OPEN,
    PART_END_REQ,
    PART_END_TILE,
    PLAN_COLUMNS,
    TILE_KEYS,
)


@dataclass(frozen=True)
class Schedule:
    """What decides the pieces: the plan of split_plan and the lengths as they are now."""

    plan: cute.Pointer  # int32 [num_parts, 8]
    num_splits: cute.Pointer  # int32 [batch + 1]
    cache_seqlens: cute.Pointer  # int32 [batch]
    batch: Int32
    split_tiles: Int32


@dataclass(frozen=True)
class Extent:
    """What the main loop needs of a piece: tiles to do, and the keys in the cache from its first tile on."""

    tiles: Int32
    keys: Int32


@dataclass(frozen=True)
class Piece:
    """Where the results of a piece go, and what follows it.

    length: keys in the request's cache. direct: nobody else works on the request, so the piece writes the output; otherwise
    it writes row `accum_row` of the split accumulators. next_req, next_tile: where the following piece begins.
    """

    length: Int32
    direct: Boolean
    accum_row: Int32
    next_req: Int32
    next_tile: Int32


def smaller(a: Int32, b: Int32) -> Int32:
    """The lesser of two integers."""
    return cutlass.select_(a < b, a, b)


def larger(a: Int32, b: Int32) -> Int32:
    """The greater of two integers."""
    return cutlass.select_(a > b, a, b)


def plan_row(schedule: Schedule) -> cute.Pointer:
    """This CTA's part: the row of the plan at its z index."""
    return schedule.plan + cute.arch.block_idx()[2] * PLAN_COLUMNS


def first_piece(schedule: Schedule) -> tuple[Int32, Int32]:
    """(request, tile) at which this CTA's part begins."""
    row = plan_row(schedule)
    return (row + PART_BEGIN_REQ).load(), (row + PART_BEGIN_TILE).load()


def last_request(schedule: Schedule) -> Int32:
    """The last request of this CTA's part; less than the first one if the part has no work."""
    return smaller((plan_row(schedule) + PART_END_REQ).load(), schedule.batch - 1)


def piece_bounds(schedule: Schedule, req: Int32, begin_tile: Int32) -> tuple[Int32, Int32, Int32]:
    """(keys in the cache, end tile of the part within the request, end tile of the piece), by the lengths as they are now."""
    row = plan_row(schedule)
    length = larger((schedule.cache_seqlens + req).load(), Int32(0))
    tiles = (length + (TILE_KEYS - 1)) // TILE_KEYS
    cut = (req == (row + PART_END_REQ).load()) & ((row + PART_END_OPEN).load() == 0)
    part_end = cutlass.select_(cut, smaller((row + PART_END_TILE).load(), tiles), tiles)
    end = smaller(part_end, (begin_tile // schedule.split_tiles + 1) * schedule.split_tiles)
    return length, part_end, end


def read_extent(schedule: Schedule, req: Int32, begin_tile: Int32) -> Extent:
    """The main loop's view of the piece that begins at (req, begin_tile)."""
    length, _, end = piece_bounds(schedule, req, begin_tile)
    return Extent(tiles=larger(end - begin_tile, Int32(0)), keys=length - begin_tile * TILE_KEYS)


def read_piece(schedule: Schedule, req: Int32, begin_tile: Int32) -> Piece:
    """The epilogue's view of the piece that begins at (req, begin_tile)."""
    length, part_end, end = piece_bounds(schedule, req, begin_tile)
    more = end < part_end
    first_row = (schedule.num_splits + req).load()
    direct = cutlass.select_(
        schedule.split_tiles < NO_SPLIT_LIMIT,
        (length <= schedule.split_tiles * TILE_KEYS) & (begin_tile == 0),
        (schedule.num_splits + (req + 1)).load() == first_row,
    )
    row = plan_row(schedule)
    begin_split = cutlass.select_(req == (row + PART_BEGIN_REQ).load(), (row + PART_BEGIN_SPLIT).load(), Int32(0))
    return Piece(
        length=length,
        direct=direct,
        accum_row=first_row + begin_split + begin_tile // schedule.split_tiles,
        next_req=cutlass.select_(more, req, req + 1),
        next_tile=cutlass.select_(more, end, Int32(0)),
    )
