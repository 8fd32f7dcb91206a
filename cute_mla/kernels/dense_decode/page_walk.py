"""Walks of the load role over the pages of its partition: with an entry of the block table a tile, or with those of several tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import tiles_of
from ..attention.scheduler import TileRange
from ..primitives.arithmetic import smaller
from ..primitives.copies import prefetch_line
from .operands import NO_PAGE, DenseDecodeOperands, LaneBox

TILE_SHIFT = TILE_KEYS.bit_length() - 1


@cute.jit
def for_each_tile(operands: DenseDecodeOperands, load_tile: cutlass.Constexpr[Callable[[LaneBox, Int32], None]]) -> Int32:
    """Call load_tile(this lane's box, number of the tile) for every tile of every work tile. Return the number of tiles.

    One warp; lane l has the box of keys that begins at l boxes.
    """
    schedule = operands.schedule
    req, begin_tile = schedule.first_work_tile()
    last = schedule.last_request()
    tile = Int32(0)
    while req <= last:
        request = operands.units.request(req)
        entry, row = first_entry(operands, begin_tile)
        # the entry is used by the length, known next; until then L2 may bring it
        prefetch_entry(operands, request, entry, begin_tile)
        run = TileRun.create(operands, schedule.tile_range(req, begin_tile))
        if run.tile != begin_tile:
            entry, row = first_entry(operands, run.tile)
        page = look_up(operands, request, entry, run.span.keys, run.unseen)
        for t in cutlass.range(run.span.tiles, unroll=1):
            # asked for a tile ahead: the answer takes longer than a stage takes to come free
            next_entry, next_row = operands.next_tile_entry(entry, row)
            next_page = look_up(operands, request, next_entry, run.span.keys - (t + 1) * TILE_KEYS)
            load_tile(LaneBox.create(operands, page, row), tile + t)
            page, entry, row = next_page, next_entry, next_row
        tile = tile + run.span.tiles
        work_tile = schedule.work_tile_of(run.span, req, begin_tile)
        req, begin_tile = work_tile.next_req, work_tile.next_tile
    return tile


@cute.jit
def for_each_tile_in_groups(
    operands: DenseDecodeOperands,
    load_tile: cutlass.Constexpr[Callable[[LaneBox, Int32], None]],
    begin_run: cutlass.Constexpr[Callable[[Int32, Int32], None] | None] = None,
) -> Int32:
    """Do as for_each_tile, but look up the entries of several tiles at once, lane l the l-th, so that the loop over tiles has no load.

    A group is as many tiles as 32 boxes hold. Its entries are asked for when the group before begins: the answer takes longer than what is
    in flight then. begin_run(request, number of the tile) is called when the first group of a run has been asked for.
    """
    schedule = operands.schedule
    req, number = schedule.first_work_tile()
    tile = Int32(0)
    while req <= schedule.last_request():
        rest = schedule.tile_range(req, number)
        begin, tiles, keys = rest.begin, rest.tiles, rest.keys
        while tiles > 0:
            run = TileRun.create(operands, TileRange(req, begin, tiles, keys, more=False))
            load_run(operands, req, run, tile, load_tile, begin_run)
            done = run.span.tiles
            tile, begin, tiles, keys = tile + done, begin + done, tiles - done, keys - done * TILE_KEYS
        work_tile = schedule.work_tile(req, number)
        schedule.release(number)
        req, number = work_tile.next_req, work_tile.next_tile
    return tile


@cute.jit
def load_run(
    operands: DenseDecodeOperands,
    req: Int32,
    run: TileRun,
    tile: Int32,
    load_tile: cutlass.Constexpr[Callable[[LaneBox, Int32], None]],
    begin_run: cutlass.Constexpr[Callable[[Int32, Int32], None] | None],
):
    """Call load_tile for every tile of a run. tile: number of the first."""
    lane = cute.arch.lane_idx()
    group = operands.box_keys() * cute.arch.WARP_SIZE // TILE_KEYS
    entry, row = operands.page_entry(run.tile * TILE_KEYS + lane * operands.box_keys())
    following = look_up_group(operands, req, run, Int32(0), cute.arch.shuffle_sync(entry, 0), cute.arch.shuffle_sync(row, 0))
    if cutlass.const_expr(begin_run is not None):
        begin_run(req, tile)
    for first in cutlass.range(0, run.span.tiles, group, unroll=1):
        first_entry = cute.arch.shuffle_sync(entry, 0)
        pages = cute.arch.shuffle_sync(following, lane)  # a result of its own: else each tile waits for the load that follows
        following = look_up_group(operands, req, run, first + group, *operands.page_entry((run.tile + first + group) * TILE_KEYS))
        for t in cutlass.range(first, smaller(first + group, run.span.tiles), unroll=1):
            page = cute.arch.shuffle_sync(pages, entry - first_entry)
            is_used = lane * operands.box_keys() < run.span.keys - t * TILE_KEYS
            if cutlass.const_expr(has_half_boxes(operands, run)):
                is_used = is_used & ((t > 0) | sees_box(operands, run.unseen))
            load_tile(LaneBox.create(operands, cutlass.select_(is_used, page, Int32(NO_PAGE)), row), tile + t)
            entry, row = operands.next_tile_entry(entry, row)


@cute.jit
def look_up_group(operands: DenseDecodeOperands, req: Int32, run: TileRun, first: Int32, entry: Int32, row: Int32) -> Int32:
    """Return the page of this lane's entry of a group of tiles, from the first-th of a run on. NO_PAGE where no key of it is in use.

    entry, row: of the group's first key.
    """
    pages = Int32(NO_PAGE)
    lane = cute.arch.lane_idx()
    remaining = smaller(run.span.keys - first * TILE_KEYS, operands.box_keys() * cute.arch.WARP_SIZE)
    behind = Int64(lane) * operands.args.page_size - row  # keys from the group's first to the page
    used = (remaining > 0) & (behind < remaining)
    is_seen = sees_box(operands, run.unseen)
    if cutlass.const_expr(has_half_boxes(operands, run)):
        is_seen = is_seen | (operands.args.page_size >= TILE_KEYS)  # of which the tile sees a part
    if used & ((first > 0) | is_seen):
        pages = (operands.table_row(req) + entry + lane).load()
    return pages


@cute.jit
def look_up_key(operands: DenseDecodeOperands, tile_range: TileRange, skipped: Int32, index: Int32) -> tuple[Int32, Int32]:
    """Return (page, row in it) of a key of a work tile; NO_PAGE for one that no query token sees, whose entry is not read.

    skipped: tiles of the request between those with keys that every token sees and those of its windows.
    """
    tile, is_seen = tile_range.begin + index // TILE_KEYS, index < tile_range.keys
    if cutlass.const_expr(operands.key_masks):
        unseen_begin, unseen_end = operands.unseen_keys(tile_range.tile(Int32(0)))
        tile = tile + cutlass.select_(tile < tiles_of(operands.args.sink_keys), Int32(0), skipped)
        is_seen = is_seen & ((index < unseen_begin) | (index >= unseen_end))
    entry, row = operands.page_entry(tile * TILE_KEYS + index % TILE_KEYS)
    page = Int32(NO_PAGE)
    if is_seen:
        page = (operands.table_row(tile_range.req) + entry).load()
    return page, row


@dataclass(frozen=True)
class TileRun:
    """First tiles of a work tile that follow one another in the request, without a skipped tile between them.

    span: these tiles, as if the rest were another work tile; its keys end with the run. tile: number of the first in the request, skipped
    tiles included. unseen: keys of the first tile that no query token sees, begin and end. Of the other tiles none has such keys. None: nor
    has the first one.
    """

    span: TileRange
    tile: Int32
    unseen: tuple[Int32, Int32] | None

    @staticmethod
    def create(operands: DenseDecodeOperands, tile_range: TileRange) -> TileRun:
        """Return the run that a work tile, or the rest of one, begins with."""
        if not operands.key_masks:
            return TileRun(tile_range, tile_range.begin, None)
        tiles, tile, unseen_begin, unseen_end = _find_run(operands, tile_range)
        cut = tiles < tile_range.tiles
        keys = cutlass.select_(cut, tiles * TILE_KEYS, tile_range.keys)
        return TileRun(replace(tile_range, tiles=tiles, keys=keys, more=tile_range.more | cut), tile, (unseen_begin, unseen_end))


@cute.jit
def _find_run(operands: DenseDecodeOperands, tile_range: TileRange) -> tuple[Int32, Int32, Int32, Int32]:
    """Return tiles, tile and unseen keys of a run. It ends before a tile with unseen keys: where sinks end or windows begin."""
    tiles, tile = tile_range.tiles, tile_range.begin
    unseen_begin, unseen_end = Int32(0), Int32(0)
    if operands.has_window():
        unseen_begin, unseen_end = operands.unseen_keys(tile_range.tile(Int32(0)))
        if unseen_begin <= unseen_end:  # equal where no tile has a hidden key, but tiles are skipped
            # tiles from here on: to the one in which the sinks end, and to that in which the windows begin
            to_last_sink, to_window = unseen_begin >> TILE_SHIFT, unseen_end >> TILE_SHIFT
            following = cutlass.select_(to_window > 0, to_window, tiles)
            tiles = smaller(tiles, cutlass.select_(to_last_sink > 0, to_last_sink, following))
            _, skipped = operands.schedule.lengths.keys_and_skipped(tile_range.req)
            tile = tile + cutlass.select_(tile < tiles_of(operands.args.sink_keys), Int32(0), skipped)
    return tiles, tile, unseen_begin, unseen_end


def has_half_boxes(operands: DenseDecodeOperands, run: TileRun) -> bool:
    """Return whether a window may leave out a box that is half of a tile, though the page has the other half."""
    return operands.most_box_keys < TILE_KEYS and run.unseen is not None


def sees_box(operands: DenseDecodeOperands, unseen: tuple[Int32, Int32] | None) -> Boolean:
    """Return whether a key of this lane's box of a tile may be seen. Only a box smaller than a tile may have none."""
    if unseen is None:
        return Boolean(True)
    offset = cute.arch.lane_idx() * operands.box_keys()
    return (offset < unseen[0]) | (offset + operands.box_keys() > unseen[1])


def first_entry(operands: DenseDecodeOperands, tile: Int32) -> tuple[Int32, Int32]:
    """Return (entry in the block table, row in that page) of this lane's box of a tile of a request."""
    return operands.page_entry(tile * TILE_KEYS + cute.arch.lane_idx() * operands.box_keys())


@cute.jit
def prefetch_entry(operands: DenseDecodeOperands, request: Int32, entry: Int32, tile: Int32):
    """Ask L2 for the block table's entry of this lane's box of a tile, if the table has room for it. Nothing is read."""
    offset = cute.arch.lane_idx() * operands.box_keys()
    if (offset < TILE_KEYS) & (Uint32(tile * TILE_KEYS + offset) < Uint32(operands.args.max_keys)):
        prefetch_line(operands.args.block_table + (Int64(request) * operands.args.table_stride + entry))


@cute.jit
def look_up(
    operands: DenseDecodeOperands, request: Int32, entry: Int32, remaining: Int32, unseen: tuple[Int32, Int32] | None = None
) -> Int32:
    """Return the page of this lane's box in a tile `remaining` keys before the end.

    The entry of a box without a key in use is never read: its page is NO_PAGE, for which the TMA writes zeros. unseen: keys not in use.
    """
    page = Int32(NO_PAGE)
    offset = cute.arch.lane_idx() * operands.box_keys()
    used = offset < smaller(remaining, Int32(TILE_KEYS))
    if used & sees_box(operands, unseen):
        page = (operands.args.block_table + (Int64(request) * operands.args.table_stride + entry)).load()
    return page
