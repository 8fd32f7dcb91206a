"""The operands of the masked prefill kernels: those of dense prefill, whose items have a mask over their keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import reduce
from operator import or_

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from ...spec.masked_prefill import MASK_WORD_KEYS, MaskedPrefillArguments
from ..dense_prefill.operands import DensePrefillItem, ItemQueue, TileWalk
from ..primitives.arithmetic import larger, smaller

PART_TILES = 32  # key tiles of a part of an item: a word of bits


@dataclass(frozen=True)
class MaskedTileWalk(TileWalk):
    """Visible tiles of 32: those that a row of the item sees something of, from the last to the first.

    first: the first of the 32. rTiles: bits of the tiles to come, and the tile that the walk is at.
    """

    first: Int32
    rTiles: cute.Tensor

    def advance(self) -> None:
        """Go to the first tile, or on to the next one. There is one."""
        bit = highest_bit(self.rTiles[0])
        self.rTiles[0] = self.rTiles[0] ^ (Int32(1) << bit)
        self.rTiles[1] = self.first + bit

    def tile(self, i: Int32) -> Int32:
        """Return the tile that the walk is at."""
        return self.rTiles[1]

    def next_tile(self) -> Int32:
        """Return the next tile, if there is one."""
        return self.first + highest_bit(self.rTiles[0])


def highest_bit(bits: Int32) -> Int32:
    """Return the number of the highest bit that is set; -1 if none is."""
    return Int32(PART_TILES - 1) - Int32(cute.arch.clz(bits))


@dataclass(frozen=True)
class MaskedItem(DensePrefillItem):
    """A part of an item: PART_TILES of its key tiles, in whose place others of the item may come before and after.

    visible: bit i: a row of the block sees something of tile first_tile + i. opening, closing: whether the part is the item's first and
    last, 0 or 1. Of an item's parts only the last may have no visible tile.
    """

    visible: Int32
    first_tile: Int32
    opening: Int32
    closing: Int32

    @property
    def in_parts(self) -> bool:
        """Return whether items come in parts, each of which has some of the key tiles."""
        return True

    @property
    def complete(self) -> Boolean:
        """Return whether the item ends with this walk."""
        return self.closing != 0

    @property
    def leading(self) -> Int32:
        """Return 1 if the walk begins with the item's first tile, else 0."""
        return self.opening

    def walk(self, count: Int32) -> MaskedTileWalk:
        """Return the visible tiles."""
        rTiles = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        rTiles[0], rTiles[1] = self.visible, self.first_tile
        return MaskedTileWalk(cute.arch.popc(self.visible), self.first_tile, rTiles)

    def tiles_of(self, rows: Int32, count: Int32) -> Int32:
        """Return how many of the tiles are multiplied with some rows of the block: all visible ones, if the sequence has the rows."""
        return cutlass.select_(rows > 0, cute.arch.popc(self.visible), Int32(0))

    def has_queries(self) -> Boolean:
        """Return whether Q is needed, and has not been needed before."""
        return (self.opening != 0) & (self.visible != 0)

    def is_empty(self, count: Int32) -> Boolean:
        """Return whether the item has no tile at all."""
        return (self.opening != 0) & (self.visible == 0)

    def opens(self, i: Int32) -> Boolean:
        """Return whether the i-th tile of the walk is the item's first."""
        return (i == 0) & (self.opening != 0)

    def follows(self, i: Int32) -> Boolean:
        """Return whether another tile of the item comes in front of the i-th of the walk, if there is an i-th."""
        return i >= self.opening

    def shows(self, tile: Int32) -> Boolean:
        """Return whether the walk comes to the last tile of the item's keys, which is `tile`."""
        return (self.visible != 0) & (self.first_tile + highest_bit(self.visible) == tile)

    def accumulated(self, tiles: Int32) -> Boolean:
        """Return whether anything has been multiplied for rows of the block."""
        return (tiles > 0) | (self.opening == 0)

    def number(self, i: Int32) -> Int32:
        """Return 0 for the item's first tile, else a positive number."""
        return i + 1 - self.opening

    def rounds(self, count: Int32) -> Int32:
        """Return the steps of a role that multiplies for the tile before in each: at least one where an item begins."""
        return larger(count, self.opening)

    def closes(self, i: Int32, count: Int32) -> Boolean:
        """Return whether the i-th of `count` tiles of the walk is the item's last, as far as this part knows."""
        return (i == count - 1) & (self.closing != 0)

    def closes_late(self) -> Boolean:
        """Return whether this part says that the one before it was the item's last with tiles."""
        return (self.opening == 0) & (self.visible == 0)

    def items_after(self, done: Int32) -> Int32:
        """Return the number of items with tiles that are complete."""
        return done + self.closing


def keys_with_bits(args: MaskedPrefillArguments) -> Int32:
    """Return the keys of a sequence that the mask has bits for."""
    return args.mask_words * MASK_WORD_KEYS


def in_register(flag: Boolean) -> Int32:
    """Return a flag in a register: predicates hold bits of the mask while scores are masked."""
    return cutlass.select_(flag, Int32(1), Int32(0))


@dataclass(frozen=True)
class MaskRows:
    """The words of the mask, int32 (total_q, words). stride: words from a token to the next."""

    first: cute.Pointer
    stride: Int64
    words: Int32

    @staticmethod
    def of(args: MaskedPrefillArguments) -> MaskRows:
        """Return the mask of a call."""
        return MaskRows(args.key_mask, args.mask_stride_token, args.mask_words)

    def token(self, item: DensePrefillItem, row: Int32) -> Int32:
        """Return the token of a row of the item's block, or the last that the sequence has."""
        return item.first_row + smaller(row, item.rows - 1)

    def row_of(self, token: Int32) -> cute.Pointer:
        """Return word 0 of a token."""
        return self.first + Int64(token) * self.stride

    def row(self, item: DensePrefillItem, row: Int32) -> cute.Pointer:
        """Return word 0 of a row of the item's block, or of the last that the sequence has."""
        return self.row_of(self.token(item, row))

    def last_word(self, item: DensePrefillItem) -> Int32:
        """Return the last word of a row that has a bit of the item's keys. The item has keys."""
        return Int32(Uint32(item.keys - 1) // MASK_WORD_KEYS)


ROWS_AT_ONCE = 4  # of the block, whose words a lane loads before it looks at any


@dataclass(frozen=True)
class MaskedItemQueue(ItemQueue):
    """The coming parts of items of a CTA. mask: of the call. tile_keys, item_rows: of a key tile, of an item."""

    kind: type[DensePrefillItem] = MaskedItem
    mask: MaskRows | None = None
    tile_keys: int = 0
    item_rows: int = 0

    @cute.jit
    def post_item(self, turn: Int32, item: DensePrefillItem) -> Int32:
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

    def nothing(self) -> DensePrefillItem:
        """Return an item without rows and keys, of one part."""
        return self.part(DensePrefillItem(*[Int32(0)] * len(fields(DensePrefillItem))), Int32(0), Int32(0), Int32(1), Int32(1))

    def part(self, item: DensePrefillItem, visible: Int32, first: Int32, opening: Int32, closing: Int32) -> MaskedItem:
        """Return a part of an item."""
        numbers = [getattr(item, field.name) for field in fields(DensePrefillItem)]
        return MaskedItem(*[*numbers, visible, first, opening, closing])

    @cute.jit
    def visible_tiles(self, item: DensePrefillItem, first: Int32, tiles: Int32) -> Int32:
        """Return the bits of those of 32 tiles from `first` on that a row of the item sees something of. One warp: a tile a lane.

        Stops when a bit of each has been found. Bits past the item's last key, in its word, count too: such a tile is multiplied for
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
