"""16-bit columns of rows of a cache on their way to a CTA's half of a key tile in shared memory, on SM100.

Each of the four gather warps has 16 neighbouring keys of every tile; lane l knows where key l % 16 lies. Columns are moved
in passes of one 16-byte access a lane: copied by cp.async, two tiles ahead, or, beside others that are converted, through
registers. What arrives in shared memory are rows of 128 swizzled bytes: chunk c of row r lies at place c ^ (r % 8). Lanes
are dealt out so that the eight lanes which store at the same time meet eight different places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.typing import AddressSpace
from cutlass.experimental import primitives

from ...spec.mla import ELEMENT_BYTES
from ..primitives.elements import aligned
from .config import BOX_BYTES, CTA_COLUMNS, CTA_ROPE, SIXTEEN_BIT, VECTOR

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
class CopiedColumns:
    """16-bit columns, `chunks` 16-byte chunks of each key from byte `first` of its row on, to boxes from `box` on.

    wanted: whether this CTA holds them; None: always. rChunks: one a pass. key: of those of a pass, this lane's. chunk: the
    lane's chunk of that key.
    """

    chunks: int
    box: int
    first: Int32
    wanted: Boolean | None
    rChunks: tuple[cute.Tensor, ...]
    key: Int32
    chunk: Int32

    @staticmethod
    def create(chunks: int, box: int, first: Int32, wanted: Boolean | None = None) -> CopiedColumns:
        """Return columns of which nothing has been fetched. chunks: 4, or a multiple of 8."""
        lane = cute.arch.lane_idx()
        # half a row a key: the lanes that store together take keys j and j + 4, whose swizzled halves differ
        halves = (lane >> 3) | ((lane >> 2) & 1) << 2
        key = halves if chunks < CHUNKS_PER_ROW else lane // chunks
        return CopiedColumns(chunks, box, first, wanted, make_chunks(WARP_KEYS * chunks // LANES), key, lane % chunks)

    @property
    def passes(self) -> int:
        """Return the loads of a lane and tile."""
        return len(self.rChunks)

    def fetch(self, step: int, keys: LaneKeys) -> None:
        """Start the load of one pass; zeros for keys that do not count."""
        row = keys.row_of(self._key(step))
        load_chunk(self.rChunks[step], row + (self.first + self.chunk * CHUNK), both(row != 0, self.wanted))

    def store(self, step: int, rows: cute.Pointer) -> None:
        """Write one pass to the warp's rows of a stage."""
        store_chunk(self._target(step, rows), self.rChunks[step], self.wanted)

    def copy(self, step: int, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Start a copy of one pass to the warp's rows of a stage; zeros for keys that do not count."""
        row = keys.row_of(self._key(step))
        source = gmem(Int32, row + (self.first + self.chunk * CHUNK), CHUNK)
        primitives.cp_async_shared_global(
            self._target(step, rows).raw_ptr(),
            source.raw_ptr(),
            CHUNK,
            primitives.LoadCacheModifier.CG,
            cp_size=cutlass.select_(row != 0, Int32(CHUNK), Int32(0)),
        )

    def _target(self, step: int, rows: cute.Pointer) -> cute.Pointer:
        key = self._key(step)
        box = self.box + self.chunk // CHUNKS_PER_ROW
        place = (self.chunk % CHUNKS_PER_ROW) ^ (key % CHUNKS_PER_ROW)
        return rows + (box * BOX_BYTES + key * ROW_BYTES + place * CHUNK)

    def _key(self, step: int) -> Int32:
        return self.key + step * max(LANES // self.chunks, 1)


@dataclass(frozen=True)
class CopiedTile:
    """A warp's share of a tile of 16-bit columns, which need no registers: their copies run for two more tiles."""

    runs: tuple[CopiedColumns, ...]
    lag: ClassVar[int] = 2

    def prepare(self, keys: LaneKeys) -> None:
        """Do nothing: a copy needs its stage."""

    def put(self, rows: cute.Pointer, keys: LaneKeys, following: LaneKeys) -> None:
        """Start the copies of a tile to the warp's rows of a stage, and waits for those of the tile `lag` before it."""
        self.start(rows, keys)
        self.finish()

    def start(self, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Start the copies of a tile."""
        for run in self.runs:
            for step in range(run.passes):
                run.copy(step, rows, keys)

    def finish(self) -> None:
        """Commit the copies of a tile as a group, and wait for those of the tile `lag` before it."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(self.lag)


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


def make_chunks(count: int) -> tuple[cute.Tensor, ...]:
    """Return the registers for so many 16-byte chunks."""
    return tuple(cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32) for _ in range(count))


def gmem(element: type[cutlass.Numeric], address: Int64, alignment: int) -> cute.Pointer:
    """Return an address as a pointer."""
    return cute.make_ptr(element, address, AddressSpace.gmem, assumed_align=alignment)


@cute.jit
def load_chunk(target: cute.Tensor, address: Int64, wanted: Boolean):
    """Load 16 bytes of gmem; zeros, and no access, unless wanted."""
    target.fill(0)
    if wanted:
        cute.autovec_copy(cute.make_tensor(gmem(Int32, address, CHUNK), target.layout), target)


def store_chunk(target: cute.Pointer, words: cute.Tensor, wanted: Boolean | None) -> None:
    """Store 16 bytes to shared memory, from the lanes that have some."""
    if wanted is None:
        cute.autovec_copy(words, cute.make_tensor(cute.recast_ptr(aligned(target, CHUNK), dtype=Int32), words.layout))
    else:
        store_wanted_chunk(target, words, wanted)


@cute.jit
def store_wanted_chunk(target: cute.Pointer, words: cute.Tensor, wanted: Boolean):
    """Store 16 bytes to shared memory, where not all lanes have some."""
    if wanted:
        store_chunk(target, words, None)
