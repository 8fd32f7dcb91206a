"""The load role's walk over the pages of its part, the same for every architecture."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
from cutlass import Int32, Int64, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import smaller
from .operands import NO_PAGE, LaneBox, Operands, count_boxes


@cute.jit
def load_pieces(operands: Operands, load_tile: cutlass.Constexpr[Callable[[LaneBox, Int32], None]]) -> Int32:
    """Calls load_tile(box of this lane, number of the tile) for every tile of every piece. One warp; lane l has the box of
    keys that begins at l boxes. Returns the tiles done."""
    schedule = operands.schedule
    req, begin_tile = schedule.first_piece()
    last = schedule.last_request()
    tile = Int32(0)
    while req <= last:
        extent = schedule.extent(req, begin_tile)
        entry, row = operands.place_in_table(begin_tile * TILE_KEYS)
        page = look_up(operands, req, entry, extent.keys)
        boxes = count_boxes(page)
        for t in cutlass.range(extent.tiles, unroll=1):
            # asked for a tile ahead: the answer takes longer than a slot takes to come free
            next_entry, next_row = operands.next_place(entry, row)
            next_page = look_up(operands, req, next_entry, extent.keys - (t + 1) * TILE_KEYS)
            load_tile(LaneBox.of(operands, page, row, boxes), tile + t)
            # counted here, after the loads: what uses a page at the top of the loop waits for the newest look-up too
            page, boxes = next_page, count_boxes(next_page)
            entry, row = next_entry, next_row
        tile = tile + extent.tiles
        piece = schedule.piece_of(extent, req, begin_tile)
        req, begin_tile = piece.next_req, piece.next_tile
    return tile


@cute.jit
def look_up(operands: Operands, req: Int32, entry: Int32, left: Int32) -> Int32:
    """The page of this lane's box in a tile `left` keys before the end; NO_PAGE if the box holds no key in use, whose
    entry is never read."""
    page = Int32(NO_PAGE)
    if cute.arch.lane_idx() * operands.box_keys() < smaller(left, Int32(TILE_KEYS)):
        page = (operands.block_table + (Int64(req) * operands.table_stride + entry)).load()
    return page
