"""e4m3 columns of a CTA's half of a key tile on their way through registers on SM100, where they become 16-bit columns.

Passes, swizzle and lanes: sm100/row_copy.py. Loads of 16 bytes become two chunks of shared memory, which lie side by side but for
the swizzle: a lane stores one after the other, and its neighbours in a quad of lanes those two further. So that eight lanes which
store at the same time meet eight places, they have keys whose rows differ in the other bits of the swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Boolean, Int32, cute

from ...spec.mla import ELEMENT_BYTES
from ..attention.tiles import BOX_COLUMNS
from .config import BOX_BYTES, CTA_COLUMNS, SIXTEEN_BIT
from .row_copy import CHUNK, CHUNKS_PER_ROW, LANES, ROW_BYTES, WARP_KEYS, LaneKeys, both, load_chunk, make_chunks, store_chunk

BOX_LANES = BOX_COLUMNS // CHUNK  # that fetch the e4m3 columns of one box and key
KEYS_AT_ONCE = LANES // (BOX_LANES * SIXTEEN_BIT.latent_boxes)  # of one pass over latent columns


@dataclass(frozen=True)
class E4m3Columns:
    """16 columns of a key a lane and pass.

    source: byte of a row at which this lane's columns begin. wanted: whether this lane has columns; None: always. rChunks: one a
    pass. key: of those of a pass, this lane's. at_once: keys of a pass. box: of the stage. chunk: which 16 columns of the box.
    """

    source: Int32
    wanted: Boolean | None
    rChunks: tuple[cute.Tensor, ...]
    key: Int32
    at_once: int
    box: Int32
    chunk: Int32

    @property
    def passes(self) -> int:
        """Return the loads of a lane and tile."""
        return len(self.rChunks)

    def key_of(self, step: int) -> Int32:
        """Return the lane's key of a pass."""
        return self.key + step * self.at_once

    def fetch(self, step: int, keys: LaneKeys) -> None:
        """Start the load of one pass; zeros for keys that do not count."""
        row = keys.row_of(self.key_of(step))
        load_chunk(self.rChunks[step], row + self.source, both(row != 0, self.wanted))

    def store_half(self, step: int, half: int, rows: cute.Pointer, words: cute.Tensor) -> None:
        """Write eight of the lane's columns, by now 16-bit, to the warp's rows of a stage."""
        key = self.key_of(step)
        place = (ELEMENT_BYTES * self.chunk + half) ^ (key % CHUNKS_PER_ROW)
        store_chunk(rows + (self.box * BOX_BYTES + key * ROW_BYTES + place * CHUNK), words, self.wanted)


def latent_e4m3_columns(rank: Int32) -> E4m3Columns:
    """Return the mover of a CTA's half of the latent columns, where a row begins with them, one byte each.

    A pass has two keys, even and odd, in alternating quads of lanes.
    """
    lane = cute.arch.lane_idx()
    box, chunk = lane // (BOX_LANES * KEYS_AT_ONCE), lane % BOX_LANES
    source = rank * CTA_COLUMNS + box * BOX_COLUMNS + chunk * CHUNK
    chunks = make_chunks(WARP_KEYS // KEYS_AT_ONCE)
    return E4m3Columns(source, None, chunks, lane // BOX_LANES % KEYS_AT_ONCE, KEYS_AT_ONCE, box, chunk)


@dataclass(frozen=True)
class ConvertedTile:
    """A warp's share of a tile on its way through registers, where columns are converted. It is complete at once.

    runs: of columns, each with fetch and store of a pass.
    """

    runs: tuple[Any, ...]
    lag: ClassVar[int] = 0

    def prepare(self, keys: Any) -> None:
        """Start all loads of the first tile."""
        for run in self.runs:
            for step in range(run.passes):
                run.fetch(step, keys)

    def put(self, rows: cute.Pointer, keys: Any, following: Any) -> None:
        """Write the tile to the warp's rows of a stage, pass by pass.

        The loads of the same pass of the following tile come after each pass in the source; ptxas moves most of them behind the stores.
        """
        for run in self.runs:
            for step in range(run.passes):
                run.store(step, rows)
                run.fetch(step, following)
