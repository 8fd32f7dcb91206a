"""Walks the pieces of work that a plan gives to one part: request by request, split by split.

Every role of a decode kernel walks the same pieces in the same order, so the roles need no messages about what to do next.
What a role knows of its part and piece is read again where it is needed, a few loads from L2 per piece, so that only a
cursor lives in registers through the main loop.

Callers may hand in any numbers as a plan, so what is read of it is clipped here: requests to the batch, tiles to what a
length can have, rows to the accumulators. Every role of every CTA of a part reads the same numbers, and the cursor only
moves on, so no plan makes a kernel hang or leave its operands. The lengths are clipped likewise (attention/lengths.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_decode import MAX_KEYS
from ...spec.split_plan import (
    INVARIANT_SPLIT_TILES,
    PART_BEGIN_REQ,
    PART_BEGIN_SPLIT,
    PART_BEGIN_TILE,
    PART_END_OPEN,
    PART_END_REQ,
    PART_END_TILE,
    PLAN_COLUMNS,
    TILE_KEYS,
)
from ..primitives.registers import kept
from .lengths import Lengths, clip, larger, smaller

MOST_TILES = MAX_KEYS // TILE_KEYS  # of any request
assert INVARIANT_SPLIT_TILES & (INVARIANT_SPLIT_TILES - 1) == 0, "tiles are rounded by masks and divided by shifts"
assert TILE_KEYS & (TILE_KEYS - 1) == 0, "keys are divided by shifts"


@dataclass(frozen=True)
class Extent:
    """What the main loop needs of a piece: tiles to do, and the keys in the cache from its first tile on. more: whether the same
    part has another piece of the request, the next one."""

    tiles: Int32
    keys: Int32
    more: Boolean | bool


@dataclass(frozen=True)
class Piece:
    """Where the results of a piece go, and what follows it.

    length: keys in the request's cache. direct: nobody else works on the request, so the piece writes the output; otherwise
    it writes row `accum_row` of the split accumulators. next_req, next_tile: where the following piece begins.
    """

    length: Int32
    direct: Boolean | bool
    accum_row: Int32
    next_req: Int32
    next_tile: Int32

    @property
    def always_direct(self) -> bool:
        """Whether nothing is ever split, known when compiling: `if piece.direct` is a branch at run time all the same."""
        return self.direct is True


def tiles_of(keys: Int32) -> Int32:
    """Tiles that hold so many keys."""
    return (keys + (TILE_KEYS - 1)) >> (TILE_KEYS.bit_length() - 1)


@dataclass(frozen=True)
class Schedule:
    """What decides the pieces: the plan of split_plan and the lengths as they are now. The integers: spec.dense_decode."""

    plan: cute.Pointer  # int32 [num_parts, 8]
    num_splits: cute.Pointer  # int32 [batch + 1]
    lengths: Lengths
    batch: Int32
    max_splits: Int32
    accum_rows: Int32

    @property
    def invariant(self) -> Boolean:
        """Whether requests are cut at multiples of INVARIANT_SPLIT_TILES, wherever the plan cuts them."""
        return self.max_splits > 0

    def _plan_row(self) -> cute.Pointer:
        """This CTA's part: the row of the plan at its z index. Worked out at every call, lest the address lives in registers
        through the main loop."""
        return self.plan + kept(cute.arch.block_idx()[2]) * PLAN_COLUMNS

    def _cut_tile(self, row: cute.Pointer, column: int) -> Int32:
        """A tile at which this CTA's part begins or ends: where the plan says, or the last place before it where a
        batch-invariant call may cut."""
        tile = clip((row + column).load(), Int32(MOST_TILES))
        return tile & cutlass.select_(self.invariant, Int32(-INVARIANT_SPLIT_TILES), Int32(-1))

    @cute.jit
    def first_piece(self) -> tuple[Int32, Int32]:
        """(request, tile) at which this CTA's part begins; a request past the last one if it has no work.

        Of a request whose last tiles were this part's, there may be nothing left: by the length as it is now, or by rounding.
        That takes an empty piece where all splits that were planned are merged; a batch-invariant call merges only those of
        the length, and the row of an empty one may be another part's."""
        row = self._plan_row()
        req = clip((row + PART_BEGIN_REQ).load(), self.batch)
        tile = self._cut_tile(row, PART_BEGIN_TILE)
        if self.invariant:
            _, part_end, _ = self._piece_bounds(smaller(req, self.batch - 1), tile)
            if (tile > 0) & (part_end <= tile):
                req, tile = req + 1, Int32(0)
        return req, tile

    @staticmethod
    def _ends_inside(row: cute.Pointer) -> Boolean:
        """Whether this CTA's part ends at a tile of its last request, and not with it."""
        return (row + PART_END_OPEN).load() == 0

    def last_request(self) -> Int32:
        """The last request of this CTA's part; less than the first one if the part has no work."""
        row = self._plan_row()
        rounded_away = self.invariant & self._ends_inside(row) & (self._cut_tile(row, PART_END_TILE) == 0)
        last = (row + PART_END_REQ).load() - cutlass.select_(rounded_away, Int32(1), Int32(0))
        return smaller(last, self.batch - 1)

    def _piece_bounds(self, req: Int32, begin_tile: Int32) -> tuple[Int32, Int32, Int32]:
        """(keys in the cache, end tile of the part within the request, end tile of the piece), by the lengths as they are now."""
        length = self.lengths.keys(req)
        tiles = tiles_of(length)
        row = self._plan_row()
        cut = (req == (row + PART_END_REQ).load()) & self._ends_inside(row)
        part_end = cutlass.select_(cut, smaller(self._cut_tile(row, PART_END_TILE), tiles), tiles)
        next_multiple = (begin_tile | (INVARIANT_SPLIT_TILES - 1)) + 1
        return length, part_end, cutlass.select_(self.invariant, smaller(part_end, next_multiple), part_end)

    def extent(self, req: Int32, begin_tile: Int32) -> Extent:
        """The main loop's view of the piece that begins at (req, begin_tile)."""
        length, part_end, end = self._piece_bounds(req, begin_tile)
        return Extent(tiles=larger(end - begin_tile, Int32(0)), keys=length - begin_tile * TILE_KEYS, more=end < part_end)

    def piece(self, req: Int32, begin_tile: Int32) -> Piece:
        """The epilogue's view of the piece that begins at (req, begin_tile)."""
        return self.piece_of(self.extent(req, begin_tile), req, begin_tile)

    def piece_of(self, extent: Extent, req: Int32, begin_tile: Int32) -> Piece:
        """The same where its extent is at hand."""
        length = extent.keys + begin_tile * TILE_KEYS
        first_row = (self.num_splits + req).load()
        is_whole = cutlass.select_(
            self.invariant,
            length <= INVARIANT_SPLIT_TILES * TILE_KEYS,
            (self.num_splits + (req + 1)).load() == first_row,
        )
        row = self._plan_row()
        begin_split = cutlass.select_(req == (row + PART_BEGIN_REQ).load(), (row + PART_BEGIN_SPLIT).load(), Int32(0))
        invariant_row = req * self.max_splits + (begin_tile >> (INVARIANT_SPLIT_TILES.bit_length() - 1))
        return Piece(
            length=length,
            direct=is_whole | (self.accum_rows == 0),
            accum_row=clip(cutlass.select_(self.invariant, invariant_row, first_row + begin_split), self.accum_rows - 1),
            next_req=cutlass.select_(extent.more, req, req + 1),
            next_tile=cutlass.select_(extent.more, begin_tile + extent.tiles, Int32(0)),
        )
