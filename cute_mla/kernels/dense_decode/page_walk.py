"""Walks of the load role over the pages of its partition: with an entry of the block table a tile, or with those of several tiles."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
from cutlass import Int32, Int64, cute

from ...spec.split_plan import TILE_KEYS
from ..primitives.integers import smaller
from .operands import NO_PAGE, LaneBox, Operands

WARP = 32


@cute.jit
def for_each_tile(operands: Operands, load_tile: cutlass.Constexpr[Callable[[LaneBox, Int32], None]]) -> Int32:
    """Call load_tile(this lane's box, number of the tile) for every tile of every work tile. Return the number of tiles.

    One warp; lane l has the box of keys that begins at l boxes.
    """
    schedule = operands.schedule
    req, begin_tile = schedule.first_work_tile()
    last = schedule.last_request()
    tile = Int32(0)
    while req <= last:
        tile_range = schedule.tile_range(req, begin_tile)
        entry, row = operands.page_entry(begin_tile * TILE_KEYS + cute.arch.lane_idx() * operands.box_keys())
        page = look_up(operands, req, entry, tile_range.keys)
        for t in cutlass.range(tile_range.tiles, unroll=1):
            # asked for a tile ahead: the answer takes longer than a stage takes to come free
            next_entry, next_row = operands.next_tile_entry(entry, row)
            next_page = look_up(operands, req, next_entry, tile_range.keys - (t + 1) * TILE_KEYS)
            load_tile(LaneBox.create(operands, page, row), tile + t)
            page, entry, row = next_page, next_entry, next_row
        tile = tile + tile_range.tiles
        work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
        req, begin_tile = work_tile.next_req, work_tile.next_tile
    return tile


@cute.jit
def for_each_tile_in_groups(operands: Operands, load_tile: cutlass.Constexpr[Callable[[LaneBox, Int32], None]]) -> Int32:
    """Do as for_each_tile, but look up the entries of several tiles at once, lane l the l-th, so that the loop over tiles has no load.

    A group is as many tiles as 32 boxes hold. The stages that are full hide the latency, once a group.
    """
    schedule = operands.schedule
    lane = cute.arch.lane_idx()
    req, begin_tile = schedule.first_work_tile()
    last = schedule.last_request()
    group_keys = operands.box_keys() * WARP
    group = group_keys // TILE_KEYS
    tile = Int32(0)
    while req <= last:
        tile_range = schedule.tile_range(req, begin_tile)
        entry, row = operands.page_entry(begin_tile * TILE_KEYS + lane * operands.box_keys())
        for first in cutlass.range(0, tile_range.tiles, group, unroll=1):
            first_entry = cute.arch.shuffle_sync(entry, 0)
            pages = Int32(NO_PAGE)
            behind = Int64(lane) * operands.args.page_size - cute.arch.shuffle_sync(row, 0)  # keys from the group's first to the page
            if behind < smaller(tile_range.keys - first * TILE_KEYS, group_keys):
                pages = (operands.table_row(req) + first_entry + lane).load()
            for t in cutlass.range(first, smaller(first + group, tile_range.tiles), unroll=1):
                page = cute.arch.shuffle_sync(pages, entry - first_entry)
                is_used = lane * operands.box_keys() < tile_range.keys - t * TILE_KEYS
                load_tile(LaneBox.create(operands, cutlass.select_(is_used, page, Int32(NO_PAGE)), row), tile + t)
                entry, row = operands.next_tile_entry(entry, row)
        tile = tile + tile_range.tiles
        work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
        req, begin_tile = work_tile.next_req, work_tile.next_tile
    return tile


@cute.jit
def look_up(operands: Operands, req: Int32, entry: Int32, left: Int32) -> Int32:
    """Return the page of this lane's box in a tile `left` keys before the end.

    The entry of a box without a key in use is never read: its page is NO_PAGE, of which the TMA makes zeros.
    """
    page = Int32(NO_PAGE)
    if cute.arch.lane_idx() * operands.box_keys() < smaller(left, Int32(TILE_KEYS)):
        page = (operands.args.block_table + (Int64(req) * operands.args.table_stride + entry)).load()
    return page
