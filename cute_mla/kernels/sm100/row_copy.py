"""16-bit columns of rows of a cache on their way to a CTA's half of a key tile in shared memory, on SM100.

Each of the four gather warps has 16 neighbouring keys of every tile; lane l knows where key l % 16 lies. Columns are copied
by cp.async two tiles ahead, in passes of 16 bytes a lane. What arrives in shared memory are rows of 128 swizzled bytes: chunk
c of row r lies at place c ^ (r % 8). Lanes are dealt out so that the eight lanes which store at the same time meet eight
different places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.typing import AddressSpace
from cutlass.experimental import primitives

from ...spec.mla import ELEMENT_BYTES
from .config import BOX_BYTES, CTA_COLUMNS, CTA_ROPE, SIXTEEN_BIT

WARP_KEYS = 16  # of a tile, for one of the four gather warps
CHUNK = 16  # bytes of one access
ROW_BYTES = 128
CHUNKS_PER_ROW = ROW_BYTES // CHUNK
LANES = 32


@dataclass(frozen=True)
class LaneKeys:
    """The keys of a warp: lane l has key l % 16. row: address in gmem, 0 for a key that does not count."""

    row: Int64

    def row_of(self, key: Int32) -> Int64:
        """Return the address of a key's row."""
        return from_lane(self.row, key)

    def seen(self) -> Int32:
        """Return a bit per key, from bit 0 on: whether it counts. The upper 16 bits are other keys'."""
        return cute.arch.vote_ballot_sync(self.row != 0)


@dataclass(frozen=True)
class WarpRows:
    """A warp's rows of a stage. first: first byte of the first row, in the first box. number: of those of all stages and warps."""

    first: cute.Pointer
    number: Int32


@dataclass(frozen=True)
class CopiedColumns:
    """16-bit columns, `chunks` 16-byte chunks of each key from byte `first` of its row on, to boxes from `box` on.

    held: whether this CTA holds them; None: always. Zeros are copied for columns that it does not hold. key: of those of a pass, this
    lane's. chunk: the lane's chunk of that key.
    """

    chunks: int
    box: int | Int32
    first: Int32
    held: Boolean | None
    key: Int32
    chunk: Int32

    @staticmethod
    def create(chunks: int, box: int | Int32, first: Int32, held: Boolean | None = None) -> CopiedColumns:
        """Return the mover of so many chunks. chunks: 4, or a multiple of 8."""
        lane = cute.arch.lane_idx()
        # half a row a key: the lanes that store together take keys j and j + 4, whose swizzled halves differ
        halves = (lane >> 3) | ((lane >> 2) & 1) << 2
        key = halves if chunks < CHUNKS_PER_ROW else lane // chunks
        return CopiedColumns(chunks, box, first, held, key, lane % chunks)

    @property
    def passes(self) -> int:
        """Return the copies of a lane and tile."""
        return WARP_KEYS * self.chunks // LANES

    def copy(self, step: int, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Start a copy of one pass to the warp's rows of a stage; zeros for keys that do not count."""
        key = self.key + step * max(LANES // self.chunks, 1)
        row = keys.row_of(key)
        box = self.box + self.chunk // CHUNKS_PER_ROW
        place = (self.chunk % CHUNKS_PER_ROW) ^ (key % CHUNKS_PER_ROW)
        target = rows + (box * BOX_BYTES + key * ROW_BYTES + place * CHUNK)
        start_copy(target, row + (self.first + self.chunk * CHUNK), both(row != 0, self.held), CHUNK)


@dataclass(frozen=True)
class CopiedTile:
    """A warp's share of a tile of 16-bit columns, of which nothing is left to do once it is copied."""

    runs: tuple[CopiedColumns, ...]

    def copy(self, rows: WarpRows, keys: LaneKeys) -> None:
        """Start the copies of a tile."""
        copy_runs(self.runs, rows, keys)

    def finish(self, rows: WarpRows) -> None:
        """Do nothing: the bytes are the columns."""


def copy_runs(runs: tuple[Any, ...], rows: WarpRows, keys: LaneKeys) -> None:
    """Start the copies of a tile. runs: of columns, each with the copy of a pass."""
    for run in runs:
        for step in range(run.passes):
            run.copy(step, rows.first, keys)


def latent_columns(rank: Int32) -> CopiedColumns:
    """Return the mover of a CTA's half of the latent columns, where a row begins with them."""
    return CopiedColumns.create(CTA_COLUMNS * ELEMENT_BYTES // CHUNK, 0, rank * (CTA_COLUMNS * ELEMENT_BYTES))


def rope_columns(first: int, rank: Int32) -> CopiedColumns:
    """Return the mover of a CTA's half of the RoPE columns that lie from byte `first` of a row on, in the box behind the values."""
    return CopiedColumns.create(CTA_ROPE * ELEMENT_BYTES // CHUNK, SIXTEEN_BIT.latent_boxes, first + rank * (CTA_ROPE * ELEMENT_BYTES))


def from_lane(value: Int64, lane: Int32) -> Int64:
    """Return a lane's 64-bit number."""
    low = cute.arch.shuffle_sync(Int32(value & 0xFFFFFFFF), lane)
    high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def both(first: Boolean, second: Boolean | None) -> Boolean:
    """Return whether two conditions hold, of which the second may be missing."""
    return first if second is None else first & second


def start_copy(target: cute.Pointer, address: Int64, present: Boolean, nbytes: int) -> None:
    """Start a copy of 4 or 16 bytes of gmem to shared memory, or of zeros."""
    primitives.cp_async_shared_global(
        target.raw_ptr(),
        cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=nbytes).raw_ptr(),
        nbytes,
        primitives.LoadCacheModifier.CG if nbytes == CHUNK else primitives.LoadCacheModifier.CA,
        cp_size=cutlass.select_(present, Int32(nbytes), Int32(0)),
    )
