"""e4m3 columns of a CTA's half of a key tile on their way through registers on SM100, where they become 16-bit columns.

Passes, swizzle and lanes: sm100/row_copy.py. Loads of 16 bytes become two pieces of shared memory, which lie side by side but for
the swizzle: a lane stores one after the other, and its neighbours in a quad of lanes those two further. So that eight lanes which
store at the same time meet eight places, they have keys whose rows differ in the other bits of the swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Boolean, Int32, cute

from ..attention.tiles import BOX_COLUMNS, ELEMENT_BYTES
from .config import BOX_BYTES, CTA_COLUMNS, SIXTEEN_BIT
from .row_copy import LANES, PIECE, PIECES_PER_ROW, ROW_BYTES, WARP_KEYS, LaneKeys, both, load_piece, make_pieces, store_piece

BOX_LANES = BOX_COLUMNS // PIECE  # that fetch the e4m3 columns of one box and key
KEYS_AT_ONCE = LANES // (BOX_LANES * SIXTEEN_BIT.latent_boxes)  # of one pass over latent columns


@dataclass(frozen=True)
class E4m3Columns:
    """16 columns of a key a lane and pass.

    source: byte of a row at which this lane's columns begin. wanted: whether this lane has columns; None: always. rPieces: one a
    pass. key: of those of a pass, this lane's. at_once: keys of a pass. box: of the slot. piece: which 16 columns of the box.
    """

    source: Int32
    wanted: Boolean | None
    rPieces: tuple[cute.Tensor, ...]
    key: Int32
    at_once: int
    box: Int32
    piece: Int32

    @property
    def passes(self) -> int:
        """Loads of a lane and tile."""
        return len(self.rPieces)

    def key_of(self, step: int) -> Int32:
        """The lane's key of a pass."""
        return self.key + step * self.at_once

    def fetch(self, step: int, keys: LaneKeys) -> None:
        """Starts the load of one pass; zeros for keys that do not count."""
        row = keys.row_of(self.key_of(step))
        load_piece(self.rPieces[step], row + self.source, both(row != 0, self.wanted))

    def store_half(self, step: int, half: int, rows: cute.Pointer, words: cute.Tensor) -> None:
        """Writes eight of the lane's columns, by now 16-bit, to the warp's rows of a slot."""
        key = self.key_of(step)
        place = (ELEMENT_BYTES * self.piece + half) ^ (key % PIECES_PER_ROW)
        store_piece(rows + (self.box * BOX_BYTES + key * ROW_BYTES + place * PIECE), words, self.wanted)


def latent_e4m3_columns(rank: Int32) -> E4m3Columns:
    """A CTA's half of the latent columns, where a row begins with them, one byte each. A pass has two keys, even and odd, in
    alternating quads of lanes."""
    lane = cute.arch.lane_idx()
    box, piece = lane // (BOX_LANES * KEYS_AT_ONCE), lane % BOX_LANES
    source = rank * CTA_COLUMNS + box * BOX_COLUMNS + piece * PIECE
    pieces = make_pieces(WARP_KEYS // KEYS_AT_ONCE)
    return E4m3Columns(source, None, pieces, lane // BOX_LANES % KEYS_AT_ONCE, KEYS_AT_ONCE, box, piece)


@dataclass(frozen=True)
class ConvertedTile:
    """A warp's share of a tile on its way through registers, where columns are converted. It is complete at once.

    runs: of columns, each with fetch and store of a pass."""

    runs: tuple[Any, ...]
    lag: ClassVar[int] = 0

    def prepare(self, keys: Any) -> None:
        """Starts all loads of the first tile."""
        for run in self.runs:
            for step in range(run.passes):
                run.fetch(step, keys)

    def put(self, rows: cute.Pointer, keys: Any, following: Any) -> None:
        """Writes the tile to the warp's rows of a slot, pass by pass, each followed by the loads of the same pass of the
        following tile, in the order of the source: ptxas moves most of them behind the stores."""
        for run in self.runs:
            for step in range(run.passes):
                run.store(step, rows)
                run.fetch(step, following)
