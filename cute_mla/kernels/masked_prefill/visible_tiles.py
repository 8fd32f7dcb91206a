"""The board of the masked prefill kernels: it finds the key tiles that an item's rows see something of, and posts the item in parts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from operator import or_

from cutlass import Boolean, Int32, cute

from ...spec.masked_prefill import MASK_WORD_KEYS
from ..dense_prefill.board import Board
from ..dense_prefill.operands import WorkItem
from ..primitives.integers import smaller
from .operands import PART_TILES, MaskedItem, MaskRows

ROWS_AT_ONCE = 4  # of the block, whose words a lane loads before it looks at any


@dataclass(frozen=True)
class MaskedBoard(Board):
    """The coming parts of items of a CTA. mask: of the call. tile_keys, item_rows: of a key tile, of an item."""

    kind: type[WorkItem] = MaskedItem
    mask: MaskRows | None = None
    tile_keys: int = 0
    item_rows: int = 0

    @cute.jit
    def post_item(self, turn: Int32, item: WorkItem) -> Int32:
        """Post the parts of an item that have a visible tile, from the last keys to the first. Return the next turn.

        The last part says so. If nothing in front of a part is visible, a part without tiles follows it and says so: a part is posted
        before the rows in front of it have been looked at.
        """
        tiles = (item.keys + (self.tile_keys - 1)) // self.tile_keys
        parts, opening = (tiles + (PART_TILES - 1)) // PART_TILES, Int32(1)
        more = Boolean(True)
        while more:
            parts = parts - 1
            first = parts * PART_TILES
            visible = Int32(0)
            if parts >= 0:
                visible = self.visible_tiles(item, first, tiles)
            more = parts > 0
            if visible != 0 or not more:
                self.post(turn, Boolean(True), self.part(item, visible, first, opening, Int32(not more)))
                turn, opening = turn + 1, Int32(0)
        return turn

    def nothing(self) -> WorkItem:
        """Return an item without rows and keys, of one part."""
        return self.part(WorkItem(*[Int32(0)] * len(fields(WorkItem))), Int32(0), Int32(0), Int32(1), Int32(1))

    def part(self, item: WorkItem, visible: Int32, first: Int32, opening: Int32, closing: Int32) -> MaskedItem:
        """Return a part of an item."""
        numbers = [getattr(item, field.name) for field in fields(WorkItem)]
        return MaskedItem(*[*numbers, visible, first, opening, closing])

    @cute.jit
    def visible_tiles(self, item: WorkItem, first: Int32, tiles: Int32) -> Int32:
        """Return the bits of those of 32 tiles from `first` on that a row of the item sees something of. One warp: a tile a lane.

        Stops when a bit of each has been found. Bits behind the item's last key, in its word, count too: such a tile is multiplied for
        nothing.
        """
        words = self.tile_keys // MASK_WORD_KEYS
        tile = first + cute.arch.lane_idx()
        last = self.mask.last_word(item)
        places = [smaller(tile * words + word, last) for word in range(words)]
        rows, row = smaller(item.rows, Int32(self.item_rows)), Int32(0)
        found, searched = Int32(0), Boolean(False)
        while not searched:
            starts = [self.mask.row(item, row + i) for i in range(ROWS_AT_ONCE)]
            found = found | reduce(or_, [(start + place).load() for start in starts for place in places])
            row = row + ROWS_AT_ONCE
            searched = (row >= rows) | cute.arch.vote_all_sync((found != 0) | (tile >= tiles))
        return cute.arch.vote_ballot_sync((found != 0) & (tile < tiles))
