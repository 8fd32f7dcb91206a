"""How rows of a cache become a CTA's half of a key tile in shared memory, on SM100: what is 16-bit.

Each of the four gather warps has 16 neighbouring keys of every tile; lane l knows where key l % 16 lies. Columns are moved
in passes of one 16-byte access a lane: copied by cp.async, two tiles ahead, or, beside others that are converted, through
registers. What arrives in shared memory are rows of 128 swizzled bytes: piece c of row r lies at place c ^ (r % 8). Lanes
are dealt out so that the eight lanes which store at the same time meet eight different places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.typing import AddressSpace
from cutlass.experimental import primitives

from ..attention.tiles import ELEMENT_BYTES
from ..primitives.fragments import aligned
from .config import BOX_BYTES, CTA_COLUMNS, CTA_ROPE, SIXTEEN_BIT, VECTOR

WARP_KEYS = 16  # of a tile, for one of the four gather warps
PIECE = 16  # bytes of one access
ROW_BYTES = 128
PIECES_PER_ROW = ROW_BYTES // PIECE
LANES = 32


@dataclass(frozen=True)
class LaneKeys:
    """Where the keys of a warp lie: lane l has key l % 16. row: address in gmem, 0 for a key that does not count."""

    row: Int64

    def row_of(self, key: Int32) -> Int64:
        """Address of a key's row."""
        return from_lane(self.row, key)

    def seen(self) -> Int32:
        """A bit per key, from bit 0 on: whether it counts. The upper 16 bits are other keys'."""
        return cute.arch.vote_ballot_sync(self.row != 0)


@dataclass(frozen=True)
class CopiedColumns:
    """16-bit columns, `pieces` 16-byte pieces of each key from byte `first` of its row on, to boxes from `box` on.

    wanted: whether this CTA holds them; None: always. rPieces: one a pass. key: of those of a pass, this lane's. piece: the
    lane's piece of that key.
    """

    pieces: int
    box: int
    first: Int32
    wanted: Boolean | None
    rPieces: tuple[cute.Tensor, ...]
    key: Int32
    piece: Int32

    @staticmethod
    def create(pieces: int, box: int, first: Int32, wanted: Boolean | None = None) -> CopiedColumns:
        """Columns of which nothing has been fetched. pieces: 4, or a multiple of 8."""
        lane = cute.arch.lane_idx()
        # half a row a key: the lanes that store together take keys j and j + 4, whose swizzled halves differ
        halves = (lane >> 3) | ((lane >> 2) & 1) << 2
        key = halves if pieces < PIECES_PER_ROW else lane // pieces
        return CopiedColumns(pieces, box, first, wanted, make_pieces(WARP_KEYS * pieces // LANES), key, lane % pieces)

    @property
    def passes(self) -> int:
        """Loads of a lane and tile."""
        return len(self.rPieces)

    def fetch(self, step: int, keys: LaneKeys) -> None:
        """Starts the load of one pass; zeros for keys that do not count."""
        row = keys.row_of(self._key(step))
        load_piece(self.rPieces[step], row + (self.first + self.piece * PIECE), both(row != 0, self.wanted))

    def store(self, step: int, rows: cute.Pointer) -> None:
        """Writes one pass to the warp's rows of a slot."""
        store_piece(self._target(step, rows), self.rPieces[step], self.wanted)

    def copy(self, step: int, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Starts a copy of one pass to the warp's rows of a slot; zeros for keys that do not count."""
        row = keys.row_of(self._key(step))
        source = gmem(Int32, row + (self.first + self.piece * PIECE), PIECE)
        primitives.cp_async_shared_global(
            self._target(step, rows).raw_ptr(),
            source.raw_ptr(),
            PIECE,
            primitives.LoadCacheModifier.CG,
            cp_size=cutlass.select_(row != 0, Int32(PIECE), Int32(0)),
        )

    def _target(self, step: int, rows: cute.Pointer) -> cute.Pointer:
        key = self._key(step)
        box = self.box + self.piece // PIECES_PER_ROW
        place = (self.piece % PIECES_PER_ROW) ^ (key % PIECES_PER_ROW)
        return rows + (box * BOX_BYTES + key * ROW_BYTES + place * PIECE)

    def _key(self, step: int) -> Int32:
        return self.key + step * max(LANES // self.pieces, 1)


@dataclass(frozen=True)
class CopiedTile:
    """A warp's share of a tile of 16-bit columns, which need no registers: their copies run for two more tiles."""

    runs: tuple[CopiedColumns, ...]
    lag: ClassVar[int] = 2

    def prepare(self, keys: LaneKeys) -> None:
        """Nothing: a copy needs its slot."""

    def put(self, rows: cute.Pointer, keys: LaneKeys, following: LaneKeys) -> None:
        """Starts the copies of a tile to the warp's rows of a slot, and waits for those of the tile `lag` before it."""
        self.start(rows, keys)
        self.finish()

    def start(self, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Starts the copies of a tile."""
        for run in self.runs:
            for step in range(run.passes):
                run.copy(step, rows, keys)

    def finish(self) -> None:
        """Says that those of a tile have been started, and waits for those of the tile `lag` before it."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(self.lag)


def latent_columns(rank: Int32) -> CopiedColumns:
    """A CTA's half of the latent columns, where a row begins with them."""
    return CopiedColumns.create(CTA_COLUMNS * ELEMENT_BYTES // PIECE, 0, rank * (CTA_COLUMNS * ELEMENT_BYTES))


def rope_columns(first: int, rank: Int32) -> CopiedColumns:
    """A CTA's half of the RoPE columns that lie from byte `first` of a row on, in the box behind the values."""
    return CopiedColumns.create(CTA_ROPE * ELEMENT_BYTES // PIECE, SIXTEEN_BIT.latent_boxes, first + rank * (CTA_ROPE * ELEMENT_BYTES))


def from_lane(value: Int64, lane: Int32) -> Int64:
    """A lane's 64-bit number."""
    low = cute.arch.shuffle_sync(Int32(value & 0xFFFFFFFF), lane)
    high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def both(first: Boolean, second: Boolean | None) -> Boolean:
    """Whether two conditions hold, of which the second may be missing."""
    return first if second is None else first & second


def make_pieces(count: int) -> tuple[cute.Tensor, ...]:
    """Registers for so many 16-byte pieces."""
    return tuple(cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32) for _ in range(count))


def gmem(element: type[cutlass.Numeric], address: Int64, alignment: int) -> cute.Pointer:
    """An address as a pointer."""
    return cute.make_ptr(element, address, AddressSpace.gmem, assumed_align=alignment)


@cute.jit
def load_piece(target: cute.Tensor, address: Int64, wanted: Boolean):
    """16 bytes of gmem, or zeros, of which nothing is read."""
    target.fill(0)
    if wanted:
        cute.autovec_copy(cute.make_tensor(gmem(Int32, address, PIECE), target.layout), target)


def store_piece(target: cute.Pointer, words: cute.Tensor, wanted: Boolean | None) -> None:
    """16 bytes to shared memory, from the lanes that have some."""
    if wanted is None:
        cute.autovec_copy(words, cute.make_tensor(cute.recast_ptr(aligned(target, PIECE), dtype=Int32), words.layout))
    else:
        store_wanted_piece(target, words, wanted)


@cute.jit
def store_wanted_piece(target: cute.Pointer, words: cute.Tensor, wanted: Boolean):
    """The same where not all lanes do."""
    if wanted:
        store_piece(target, words, None)
