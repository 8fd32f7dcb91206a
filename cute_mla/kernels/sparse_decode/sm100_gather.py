"""How rows of a cache become a CTA's half of a key tile in shared memory: the gather role's columns, on SM100.

Each of the four gather warps has 16 neighbouring keys of every tile; lane l knows where key l % 16 lies. The columns of a
key that its CTA holds fall into two runs, each of which is done in passes of one 16-byte access a lane. Where e4m3 is
converted, both go through registers, which are loaded one tile ahead; where nothing is, both are copied by cp.async, two
tiles ahead. What arrives in shared memory are rows of 128 swizzled bytes: piece c of row r lies at place c ^ (r % 8). Lanes
are dealt out so that the eight lanes which store at the same time meet eight different places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, cute
from cutlass.cute.typing import AddressSpace
from cutlass.experimental import primitives

from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT, D_ROPE
from ..parts.fragments import aligned, pack_pair
from ..parts.sm100_geometry import BOX_BYTES, CTA_COLUMNS, CTA_ROPE, LATENT_BOXES, PAIR, VECTOR
from ..parts.tiles import BOX_COLUMNS, ELEMENT_BYTES

WARP_KEYS = 16  # of a tile, for one of the four gather warps
PIECE = 16  # bytes of one access
ROW_BYTES = 128
PIECES_PER_ROW = ROW_BYTES // PIECE
LANES = 32
BOX_LANES = BOX_COLUMNS // PIECE  # that fetch the e4m3 columns of one box and key
KEYS_AT_ONCE = LANES // (BOX_LANES * LATENT_BOXES)  # of one pass over e4m3 columns
SCALE_WORD = 4  # bytes of an fp32 scale, or of the e8m0 scales of one CTA
HALVES = 2  # of a warp's lanes, and of a CTA's e4m3 columns where groups are wide
E8M0_SMALLEST = 0x00400000  # 2^-127, whose code is 0
E8M0_NAN = 0x7FC00000  # of code 255
E8M0_NAN_CODE = 255
FP32_EXPONENT = 23  # its lowest bit


@dataclass(frozen=True)
class LaneKeys:
    """Where the keys of a warp lie: lane l has key l % 16. row, scales: addresses in gmem, 0 for a key that does not count."""

    row: Int64
    scales: Int64

    def row_of(self, key: Int32) -> Int64:
        """Address of a key's row."""
        return from_lane(self.row, key)

    def seen(self) -> Int32:
        """A bit per key: whether it counts. In two copies, low and high."""
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
class ScaledColumns:
    """e4m3 columns, which become 16-bit: value x scale in fp32, rounded once.

    A pass has two keys, even and odd, in alternating quads of lanes, and 16 columns of a key a lane. rank: of this CTA.
    wanted: whether this lane has columns; None: always.
    rScales: of the tile in hand, and of the next one: lane l has a word of the scales of key l % 16, an fp32 of its own in
    either half of the lanes, or four codes of e8m0.
    """

    cache_format: CacheFormat
    dtype: type[cutlass.Numeric]
    rank: Int32
    wanted: Boolean | None
    rPieces: tuple[cute.Tensor, ...]
    rScales: cute.Tensor
    key: Int32
    box: Int32
    piece: Int32

    @staticmethod
    def create(cache_format: CacheFormat, dtype: type[cutlass.Numeric], rank: Int32) -> ScaledColumns:
        """Columns of which nothing has been fetched."""
        lane = cute.arch.lane_idx()
        box = lane // (BOX_LANES * KEYS_AT_ONCE)
        boxes = cache_format.quantised // BOX_COLUMNS
        wanted = None if boxes == PAIR * LATENT_BOXES else rank * LATENT_BOXES + box < boxes
        rScales = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        rScales.fill(0)
        rPieces = make_pieces(WARP_KEYS // KEYS_AT_ONCE)
        key = lane // BOX_LANES % KEYS_AT_ONCE
        return ScaledColumns(cache_format, dtype, rank, wanted, rPieces, rScales, key, box, lane % BOX_LANES)

    @property
    def passes(self) -> int:
        """Loads of a lane and tile."""
        return len(self.rPieces)

    def fetch(self, step: int, keys: LaneKeys) -> None:
        """Starts the load of one pass; zeros for keys that do not count."""
        row = keys.row_of(self._key(step))
        column = self.rank * CTA_COLUMNS + self.box * BOX_COLUMNS + self.piece * PIECE
        load_piece(self.rPieces[step], row + column, both(row != 0, self.wanted))

    def fetch_scales(self, keys: LaneKeys) -> None:
        """Takes up the scales that were on their way, and starts the load of those of other keys."""
        self.rScales[0] = self.rScales[1]
        offset = self.rank * SCALE_WORD
        if self.cache_format.scales_inside:
            offset = (self.rank * HALVES + cute.arch.lane_idx() // WARP_KEYS) * SCALE_WORD
        load_word(self.rScales, 1, keys.scales + offset, keys.scales != 0)

    def store(self, step: int, rows: cute.Pointer) -> None:
        """Converts one pass and writes it to the warp's rows of a slot."""
        key = self._key(step)
        values = cute.recast_tensor(self.rPieces[step], Float8E4M3FN).load().to(Float32)
        scale = self._scale(step)
        for half in range(ELEMENT_BYTES):
            rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            for i in range(VECTOR):
                k = 2 * (half * VECTOR + i)
                low, high = cute.arch.mul_packed_f32x2((values[k], values[k + 1]), (scale, scale))
                rWords[i] = pack_pair(low, high, self.dtype)
            place = (ELEMENT_BYTES * self.piece + half) ^ (key % PIECES_PER_ROW)
            target = rows + (self.box * BOX_BYTES + key * ROW_BYTES + place * PIECE)
            store_piece(target, rWords, self.wanted)

    def _key(self, step: int) -> Int32:
        return self.key + step * KEYS_AT_ONCE

    def _scale(self, step: int) -> Float32:
        rBits = cute.make_rmem_tensor(cute.make_layout(1), Int32)
        if self.cache_format.scales_inside:
            lane = self._key(step) + self.box // (LATENT_BOXES // HALVES) * WARP_KEYS
            rBits[0] = cute.arch.shuffle_sync(self.rScales[0], lane)
        else:
            code = (cute.arch.shuffle_sync(self.rScales[0], self._key(step)) >> (8 * self.box)) & E8M0_NAN_CODE
            power = cutlass.select_(code == 0, Int32(E8M0_SMALLEST), code << FP32_EXPONENT)
            rBits[0] = cutlass.select_(code == E8M0_NAN_CODE, Int32(E8M0_NAN), power)
        return cute.recast_tensor(rBits, Float32)[0]


@dataclass(frozen=True)
class ConvertedTile:
    """A warp's share of a tile on its way through registers, where columns are converted. It is complete at once."""

    runs: tuple[ScaledColumns, CopiedColumns]
    lag: ClassVar[int] = 0

    def prepare(self, keys: LaneKeys) -> None:
        """Starts all loads of the first tile."""
        self.runs[0].fetch_scales(keys)
        for run in self.runs:
            for step in range(run.passes):
                run.fetch(step, keys)

    def put(self, rows: cute.Pointer, keys: LaneKeys, following: LaneKeys) -> None:
        """Writes the tile to the warp's rows of a slot, pass by pass, each followed by the loads of the same pass of the
        following tile, in the order of the source: ptxas moves most of them behind the stores."""
        self.runs[0].fetch_scales(following)
        for run in self.runs:
            for step in range(run.passes):
                run.store(step, rows)
                run.fetch(step, following)


@dataclass(frozen=True)
class CopiedTile:
    """A warp's share of a tile of 16-bit columns, which need no registers: their copies run for two more tiles."""

    runs: tuple[CopiedColumns, CopiedColumns]
    lag: ClassVar[int] = 2

    def prepare(self, keys: LaneKeys) -> None:
        """Nothing: a copy needs its slot."""

    def put(self, rows: cute.Pointer, keys: LaneKeys, following: LaneKeys) -> None:
        """Starts the copies of a tile to the warp's rows of a slot, and waits for those of the tile `lag` before it."""
        for run in self.runs:
            for step in range(run.passes):
                run.copy(step, rows, keys)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(self.lag)


def columns_of_cta(cache_format: CacheFormat, dtype: type[cutlass.Numeric], rank: Int32) -> ConvertedTile | CopiedTile:
    """The columns that the CTA of this rank holds."""
    wide = cache_format.wide_offset
    if cache_format.quantised == 0:
        latent = CopiedColumns.create(CTA_COLUMNS * ELEMENT_BYTES // PIECE, 0, rank * (CTA_COLUMNS * ELEMENT_BYTES))
        return CopiedTile((latent, rope_columns(wide + D_LATENT * ELEMENT_BYTES, rank)))
    if cache_format.d_qk > D_LATENT:
        rope = rope_columns(wide, rank)
    else:  # they are the last values, which the odd CTA holds
        rope = CopiedColumns.create(D_ROPE * ELEMENT_BYTES // PIECE, LATENT_BOXES - 1, Int32(wide), rank == PAIR - 1)
    return ConvertedTile((ScaledColumns.create(cache_format, dtype, rank), rope))


def rope_columns(first: int, rank: Int32) -> CopiedColumns:
    """A CTA's half of the RoPE columns that lie from byte `first` of a row on, in the box behind the values."""
    return CopiedColumns.create(CTA_ROPE * ELEMENT_BYTES // PIECE, LATENT_BOXES, first + rank * (CTA_ROPE * ELEMENT_BYTES))


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


@cute.jit
def load_word(target: cute.Tensor, index: cutlass.Constexpr[int], address: Int64, wanted: Boolean):
    """4 bytes of gmem, or zeros."""
    target[index] = Int32(0)
    if wanted:
        target[index] = gmem(Int32, address, 4).load()


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
