"""Schedulers, which say what a CTA works on, and the operands that roles over a latent take for it.

Of decode: the work tiles that a plan gives to one partition, request by request, split by split.
Every role of a decode kernel walks the same work tiles in the same order, so the roles need no messages about what to do next.
What a role knows of its partition and work tile is read again where it is needed, a few loads from L2 per work tile, so that only a
cursor lives in registers through the main loop.

Callers may hand in any numbers as a plan, so what is read of it is clipped here: requests to the batch, tiles to what a
length can have, rows to the accumulators. Every role of every CTA of a partition reads the same numbers, and the cursor only
moves on, so no plan makes a kernel hang or leave its operands. The lengths are clipped likewise (lengths.py).

Of sparse prefill: query tokens, each a work tile of its own, with the same interface.
The CTAs that share the heads of a token are a group. Group z of n takes the tokens z, z + n, z + 2 n and so on: tokens that
are worked on at the same time are neighbours, whose keys are often the same, and no order has to be agreed upon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from ...spec.dense_decode import MAX_KEYS, TILE_ROWS
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
from ..primitives.arithmetic import clip, larger, pin_register, smaller
from ..primitives.copies import LINE_BYTES, prefetch_line
from ..primitives.rows import load_or
from .lengths import Lengths, RowRange, RowTile, tiles_of

BOX_COLUMNS = 64  # 16-bit columns of a 128-byte swizzled box
INT32_BYTES = 4
MAX_TILES = MAX_KEYS // TILE_KEYS  # of any request

assert INVARIANT_SPLIT_TILES & (INVARIANT_SPLIT_TILES - 1) == 0, "tiles are rounded by masks and divided by shifts"
assert TILE_KEYS & (TILE_KEYS - 1) == 0, "keys are divided by shifts"


def first_query_row() -> Int32:
    """Return the first row of this CTA, among all rows that its CTAs share out along x."""
    return cute.arch.block_idx()[0] * TILE_ROWS


@dataclass(frozen=True)
class KeyTile:
    """One key tile of a request. first: number of its first key. remaining: keys of the request from the tile on, but for skipped tiles."""

    req: Int32
    first: Int32
    remaining: Int32


@dataclass(frozen=True)
class TileRange:
    """The main loop's view of a work tile: key tiles to do, and the keys in the cache from its first key tile on.

    req: the request. begin: its first tile. more: whether the next work tile of the same partition belongs to the same request.
    """

    req: Int32
    begin: Int32
    tiles: Int32
    keys: Int32
    more: Boolean | bool

    def tile(self, index: Int32) -> KeyTile:
        """Return one of the tiles. index: counted from the first."""
        return KeyTile(self.req, (self.begin + index) * TILE_KEYS, self.keys - index * TILE_KEYS)


@dataclass(frozen=True)
class WorkTile:
    """The epilogue's view of a work tile: where its results go, and what follows it.

    length: keys in the request's cache. direct: no other work tile belongs to the request, so this one writes the output; otherwise
    it writes row `accum_row` of the split accumulators. next_req, next_tile: where the following work tile begins.
    """

    length: Int32
    direct: Boolean | bool
    accum_row: Int32
    next_req: Int32
    next_tile: Int32

    @property
    def always_direct(self) -> bool:
        """Return whether nothing is ever split, known when compiling: `if work_tile.direct` is a branch at run time all the same."""
        return self.direct is True


@dataclass(frozen=True)
class SplitKvSchedule:
    """The plan of split_plan and the lengths as they are now, which together decide the work tiles. The integers: spec.dense_decode.

    row_tile: what cuts the last tiles off work tiles, none of which is left out for that; None when compiling: all rows see all tiles.
    """

    plan: cute.Pointer  # int32 [num_parts, 8]
    num_splits: cute.Pointer  # int32 [batch + 1]
    lengths: Lengths
    batch: Int32
    max_splits: Int32
    accum_rows: Int32
    row_tile: RowTile | None = None

    @property
    def invariant(self) -> Boolean:
        """Return whether requests are cut at multiples of INVARIANT_SPLIT_TILES, wherever the plan cuts them."""
        return self.max_splits > 0

    def _plan_row(self) -> cute.Pointer:
        """Return the row of the plan for this CTA's partition, at its z index.

        Computed at every call, lest the address lives in registers through the main loop.
        """
        return self.plan + pin_register(cute.arch.block_idx()[2]) * PLAN_COLUMNS

    @cute.jit
    def prefetch(self):
        """Ask L2 for the row of the plan, and for the lengths and splits of the first requests. One warp, before anything is read."""
        first = cute.arch.lane_idx() * (LINE_BYTES // INT32_BYTES)
        if first < self.batch:
            prefetch_line(self.num_splits + first)
            if cutlass.const_expr(self.lengths.extra is None):  # else lengths may be null
                prefetch_line(self.lengths.lengths + first)
        if first == 0:
            prefetch_line(self._plan_row())

    def _cut_tile(self, row: cute.Pointer, column: int) -> Int32:
        """Return a tile at which this CTA's partition begins or ends.

        It lies where the plan says, or at the last tile before it where a batch-invariant call may cut.
        """
        tile = clip((row + column).load(), Int32(MAX_TILES))
        return tile & cutlass.select_(self.invariant, Int32(-INVARIANT_SPLIT_TILES), Int32(-1))

    @cute.jit
    def first_work_tile(self) -> tuple[Int32, Int32]:
        """Return (request, tile) at which this CTA's partition begins; a request past the last one if it has no work.

        Of a request whose last tiles belong to this partition, nothing may be left: by the length as it is now, or by rounding. That
        gives an empty work tile where all planned splits are merged. A batch-invariant call merges only the splits of the length, and
        the row of an empty one may belong to another partition.
        """
        row = self._plan_row()
        req = clip((row + PART_BEGIN_REQ).load(), self.batch)
        tile = self._cut_tile(row, PART_BEGIN_TILE)
        if self.invariant & (tile > 0):
            _, part_end, _ = self._work_tile_bounds(smaller(req, self.batch - 1), tile)
            if part_end <= tile:
                req, tile = req + 1, Int32(0)
        return req, tile

    @staticmethod
    def _ends_inside(row: cute.Pointer) -> Boolean:
        """Return whether this CTA's partition ends at a tile of its last request, and not with it."""
        return (row + PART_END_OPEN).load() == 0

    def last_request(self) -> Int32:
        """Return the last request of this CTA's partition; less than the first one if the partition has no work."""
        row = self._plan_row()
        rounded_away = self.invariant & self._ends_inside(row) & (self._cut_tile(row, PART_END_TILE) == 0)
        last = (row + PART_END_REQ).load() - cutlass.select_(rounded_away, Int32(1), Int32(0))
        return smaller(last, self.batch - 1)

    def _work_tile_bounds(self, req: Int32, begin_tile: Int32) -> tuple[Int32, Int32, Int32]:
        """Return (keys in the cache, end tile of the partition within the request, end tile of the work tile).

        All follow the lengths as they are now.
        """
        row = self._plan_row()
        cut = (req == (row + PART_END_REQ).load()) & self._ends_inside(row)
        cut_tile = self._cut_tile(row, PART_END_TILE)
        length = self.lengths.keys(req)  # behind the loads above, since it may branch
        tiles = tiles_of(length)
        part_end = cutlass.select_(cut, smaller(cut_tile, tiles), tiles)
        next_multiple = (begin_tile | (INVARIANT_SPLIT_TILES - 1)) + 1
        return length, part_end, cutlass.select_(self.invariant, smaller(part_end, next_multiple), part_end)

    def tile_range(self, req: Int32, begin_tile: Int32) -> TileRange:
        """Return the main loop's view of the work tile that begins at (req, begin_tile)."""
        length, part_end, end = self._work_tile_bounds(req, begin_tile)
        seen = end if self.row_tile is None else self.row_tile.seen_tiles(end, length)
        return TileRange(req, begin_tile, larger(seen - begin_tile, Int32(0)), keys=length - begin_tile * TILE_KEYS, more=end < part_end)

    def work_tile(self, req: Int32, begin_tile: Int32) -> WorkTile:
        """Return the epilogue's view of the work tile that begins at (req, begin_tile)."""
        return self.work_tile_of(self.tile_range(req, begin_tile), req, begin_tile)

    def work_tile_of(self, tile_range: TileRange, req: Int32, begin_tile: Int32) -> WorkTile:
        """Return work_tile(req, begin_tile), whose tile range is at hand."""
        length = tile_range.keys + begin_tile * TILE_KEYS
        first_row = (self.num_splits + req).load()
        is_whole = cutlass.select_(
            self.invariant,
            length <= INVARIANT_SPLIT_TILES * TILE_KEYS,
            (self.num_splits + (req + 1)).load() == first_row,
        )
        row = self._plan_row()
        begin_split = cutlass.select_(req == (row + PART_BEGIN_REQ).load(), (row + PART_BEGIN_SPLIT).load(), Int32(0))
        invariant_row = req * self.max_splits + (begin_tile >> (INVARIANT_SPLIT_TILES.bit_length() - 1))
        return WorkTile(
            length=length,
            direct=is_whole | (self.accum_rows == 0),
            accum_row=clip(cutlass.select_(self.invariant, invariant_row, first_row + begin_split), self.accum_rows - 1),
            next_req=cutlass.select_(tile_range.more, req, req + 1),
            next_tile=cutlass.select_(tile_range.more, self._tile_behind(tile_range, begin_tile), Int32(0)),
        )

    def release(self, begin_tile: Int32) -> None:
        """Do nothing: this warp is done with a work tile, of which no record is kept."""

    def _tile_behind(self, tile_range: TileRange, begin_tile: Int32) -> Int32:
        """Return the tile at which the next work tile of the same request begins.

        That is where a batch-invariant call may cut, though no row may see the tiles before. The load role also ends runs of tiles for a
        window, with which rows see all of them.
        """
        behind = begin_tile + tile_range.tiles
        if self.row_tile is None:
            return behind
        return cutlass.select_(self.row_tile.hides_tiles(), (begin_tile | (INVARIANT_SPLIT_TILES - 1)) + 1, behind)


@dataclass(frozen=True)
class TokenSchedule:
    """The tokens of a call, in place of requests.

    lengths: int32 [tokens], clipped to `limit`; null at run time: every token has `limit` keys. first: where a launch takes the tokens from
    there on, up to `tokens`; None: all.
    """

    lengths: cute.Pointer
    limit: Int32
    tokens: Int32
    first: Int32 | None = None

    def prefetch(self) -> None:
        """Do nothing: there is no plan."""

    def first_work_tile(self) -> tuple[Int32, Int32]:
        """Return (token, tile) at which this CTA's work begins."""
        token = cute.arch.block_idx()[2]
        return (token if self.first is None else token + self.first), Int32(0)

    def last_request(self) -> Int32:
        """Return the last token of all."""
        return self.tokens - 1

    def keys(self, token: Int32) -> Int32:
        """Return the keys of a token."""
        return clip(load_or(self.lengths, token, self.limit), self.limit)

    def tile_range(self, token: Int32, begin_tile: Int32) -> TileRange:
        """Return all of a token, whose first tile is 0."""
        keys = self.keys(token)
        return TileRange(token, begin_tile, tiles_of(keys), keys, more=False)

    def work_tile(self, token: Int32, begin_tile: Int32) -> WorkTile:
        """Return the epilogue's view of a token, which is never split."""
        return self.work_tile_of(self.tile_range(token, begin_tile), token, begin_tile)

    def work_tile_of(self, tile_range: TileRange, token: Int32, begin_tile: Int32) -> WorkTile:
        """Return work_tile(token, begin_tile), whose tile range is at hand."""
        return WorkTile(
            length=tile_range.keys,
            direct=True,
            accum_row=Int32(0),
            next_req=token + cute.arch.grid_dim()[2],
            next_tile=Int32(0),
        )

    def release(self, begin_tile: Int32) -> None:
        """Do nothing, as in SplitKvSchedule."""


class LatentOperands:
    """Rows of q, out and lse of a request (in sparse prefill of a query token, in dense decode of a unit), and the work of this CTA.

    An op's operands have the arguments by meaning, and _offset. Some members are of some ops only: a role asks for them where its op has
    them. Accumulators exist where a request may be split, sinks in the sparse ops.
    """

    args: Any
    schedule: Any  # SplitKvSchedule or TokenSchedule: the work tiles of this CTA

    @property
    def scale_log2(self) -> Float32:
        """Return the factor of the scores, log2 units."""
        return self.args.scale_log2

    @property
    def empty_lse(self) -> Float32:
        """Return the lse of a row that attends to nothing."""
        return self.args.empty_lse

    @property
    def attn_sink(self) -> cute.Pointer:
        """Return fp32 [rows], natural log; a null pointer without sinks."""
        return self.args.attn_sink

    @property
    def out_accum(self) -> cute.Pointer:
        """Return the fp32 rows of the split accumulators, contiguous."""
        return self.args.out_accum

    @property
    def lse_accum(self) -> cute.Pointer:
        """Return the lse of every row of the split accumulators."""
        return self.args.lse_accum

    def row_at(self, place: Int32, req: Int32) -> Int32:
        """Return the query row of a request at a place of this CTA's products, on SM100; one past the last where there is none."""
        return first_query_row() + place

    def first_row(self) -> Int32:
        """Return the first query row of this CTA, where it multiplies with keys on M."""
        return first_query_row()

    def rows(self) -> Int32:
        """Return the number of query rows that share this CTA's keys, those of a request that lacks some of them included."""
        return self.args.h_q

    def row_range(self, req: Int32) -> RowRange:
        """Return the query rows of a request that exist."""
        return RowRange(self, req, self.rows())

    def q_row(self, req: Int32, row: Int32, *first_token: Int32) -> cute.Pointer:
        """Return element 0 of a query row. first_token: as Units.missing_and_first has it, where an op has units."""
        return self.element("q", req, row, *first_token)

    def out_row(self, req: Int32, row: Int32, *first_token: Int32) -> cute.Pointer:
        """Return element 0 of an output row."""
        return self.element("out", req, row, *first_token)

    def lse_of(self, req: Int32, row: Int32, *first_token: Int32) -> cute.Pointer:
        """Return the lse of a query row."""
        return self.element("lse", req, row, *first_token)

    def element(self, name: str, req: Int32, row: Int32, *first_token: Int32) -> cute.Pointer:
        """Return the first element of a query row in the argument of a name, whose strides go by batch, token and head."""
        batch, token, head = (getattr(self.args, f"{name}_stride_{axis}") for axis in ("batch", "token", "head"))
        return getattr(self.args, name) + self._offset((batch, token, head), req, row, *first_token)

    def _offset(self, strides: tuple[Int64, Int64, Int64], req: Int32, row: Int32, *first_token: Int32) -> Int64:
        raise NotImplementedError

    def accum_row(self, work_tile: WorkTile, row: Int32) -> Int64:
        """Return the number of a query row in the split accumulators."""
        raise NotImplementedError
