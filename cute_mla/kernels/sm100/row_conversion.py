"""e4m3 columns of a CTA's half of a key tile on SM100: copied to their stage as they are, converted there to 16-bit columns.

Passes, swizzle and lanes: sm100/row_copy.py. A lane copies 16 bytes to where the first of the two chunks belongs that they become.
Two tiles later the same lane reads them back and writes both chunks: nobody else touches that place, so a wait for the lane's own
copies is all the order it takes. The chunks lie side by side but for the swizzle: a lane stores one after the other, and its
neighbours in a quad of lanes those two further. So that eight lanes which store at the same time meet eight places, they have keys
whose rows differ in the other bits of the swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, cute

from ...spec.mla import ELEMENT_BYTES
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.rows import aligned
from .config import BOX_BYTES, CTA_COLUMNS, SIXTEEN_BIT, VECTOR
from .row_copy import CHUNK, CHUNKS_PER_ROW, LANES, ROW_BYTES, WARP_KEYS, LaneKeys, WarpRows, both, copy_runs, start_copy

BOX_LANES = BOX_COLUMNS // CHUNK  # that fetch the e4m3 columns of one box and key
KEYS_AT_ONCE = LANES // (BOX_LANES * SIXTEEN_BIT.latent_boxes)  # of one pass over latent columns


@dataclass(frozen=True)
class E4m3Columns:
    """16 columns of a key a lane and pass.

    source: byte of a row at which this lane's columns begin. held: whether this CTA holds them; None: always. Zeros are copied for
    columns that it does not hold. passes: copies of a lane and tile. key: of those of a pass, this lane's. at_once: keys of a pass.
    box: of the stage. chunk: which 16 columns of the box.
    """

    source: Int32
    held: Boolean | None
    passes: int
    key: Int32
    at_once: int
    box: Int32
    chunk: Int32

    def key_of(self, step: int) -> Int32:
        """Return the lane's key of a pass."""
        return self.key + step * self.at_once

    def copy(self, step: int, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Start a copy of one pass to the warp's rows of a stage; zeros for keys that do not count."""
        row = keys.row_of(self.key_of(step))
        start_copy(self._target(step, 0, rows), row + self.source, both(row != 0, self.held), CHUNK)

    def load(self, step: int, rows: cute.Pointer) -> cute.Tensor:
        """Return the bytes that this lane has copied in one pass."""
        words = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
        cute.autovec_copy(_chunk(self._target(step, 0, rows), words), words)
        return words

    def write(self, step: int, rows: cute.Pointer, words: cute.Tensor) -> None:
        """Write the lane's columns of one pass, by now 16-bit, to the warp's rows of a stage."""
        for half in range(ELEMENT_BYTES):
            part = cute.make_tensor(words.iterator + half * VECTOR, cute.make_layout(VECTOR))
            cute.autovec_copy(part, _chunk(self._target(step, half, rows), part))

    def _target(self, step: int, half: int, rows: cute.Pointer) -> cute.Pointer:
        key = self.key_of(step)
        place = (ELEMENT_BYTES * self.chunk + half) ^ (key % CHUNKS_PER_ROW)
        return rows + (self.box * BOX_BYTES + key * ROW_BYTES + place * CHUNK)


def latent_e4m3_columns(rank: Int32) -> E4m3Columns:
    """Return the mover of a CTA's half of the latent columns, where a row begins with them, one byte each.

    A pass has two keys, even and odd, in alternating quads of lanes.
    """
    lane = cute.arch.lane_idx()
    box, chunk = lane // (BOX_LANES * KEYS_AT_ONCE), lane % BOX_LANES
    source = rank * CTA_COLUMNS + box * BOX_COLUMNS + chunk * CHUNK
    return E4m3Columns(source, None, WARP_KEYS // KEYS_AT_ONCE, lane // BOX_LANES % KEYS_AT_ONCE, KEYS_AT_ONCE, box, chunk)


@dataclass(frozen=True)
class ConvertedTile:
    """A warp's share of a tile, part of which is converted in its stage.

    converted: runs of columns, each with copy, load and store of a pass. copied: runs of which nothing is left to do.
    """

    converted: tuple[Any, ...]
    copied: tuple[Any, ...] = ()

    def copy(self, rows: WarpRows, keys: Any) -> None:
        """Start the copies of a tile."""
        copy_runs(self.converted + self.copied, rows, keys)

    def finish(self, rows: WarpRows) -> None:
        """Convert a tile that this warp's copies have brought. All loads come first: ptxas moves none ahead of a store."""
        passes = [(run, step) for run in self.converted for step in range(run.passes)]
        loaded = [run.load(step, rows.first) for run, step in passes]
        for (run, step), words in zip(passes, loaded, strict=True):
            run.store(step, rows.first, words)


def _chunk(place: cute.Pointer, words: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(aligned(place, CHUNK), dtype=Int32), words.layout)
