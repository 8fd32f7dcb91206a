"""How rows of a quantised cache become a CTA's half of a key tile in shared memory: what is converted, on SM100.

The columns of a key that its CTA holds fall into two runs, each of which is done in passes (../parts/sm100_columns.py).
Where e4m3 is converted, both go through registers, which are loaded one tile ahead; where nothing is, both are copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, cute

from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT, D_ROPE
from ..parts.fragments import pack_pair
from ..parts.sm100_columns import (
    LANES,
    PIECE,
    PIECES_PER_ROW,
    ROW_BYTES,
    WARP_KEYS,
    CopiedColumns,
    CopiedTile,
    LaneKeys,
    both,
    gmem,
    latent_columns,
    load_piece,
    make_pieces,
    rope_columns,
    store_piece,
)
from ..parts.sm100_geometry import BOX_BYTES, CTA_COLUMNS, PAIR, SIXTEEN_BIT, VECTOR
from ..parts.tiles import BOX_COLUMNS, ELEMENT_BYTES

LATENT_BOXES = SIXTEEN_BIT.latent_boxes
BOX_LANES = BOX_COLUMNS // PIECE  # that fetch the e4m3 columns of one box and key
KEYS_AT_ONCE = LANES // (BOX_LANES * LATENT_BOXES)  # of one pass over e4m3 columns
SCALE_WORD = 4  # bytes of an fp32 scale, or of the e8m0 scales of one CTA
HALVES = 2  # of a warp's lanes, and of a CTA's e4m3 columns where groups are wide
E8M0_SMALLEST = 0x00400000  # 2^-127, whose code is 0
E8M0_NAN = 0x7FC00000  # of code 255
E8M0_NAN_CODE = 255
FP32_EXPONENT = 23  # its lowest bit


@dataclass(frozen=True)
class ScaledKeys(LaneKeys):
    """Where the keys of a warp and their scales lie. scales: address in gmem, 0 for a key that does not count."""

    scales: Int64


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

    def fetch(self, step: int, keys: ScaledKeys) -> None:
        """Starts the load of one pass; zeros for keys that do not count."""
        row = keys.row_of(self._key(step))
        column = self.rank * CTA_COLUMNS + self.box * BOX_COLUMNS + self.piece * PIECE
        load_piece(self.rPieces[step], row + column, both(row != 0, self.wanted))

    def fetch_scales(self, keys: ScaledKeys) -> None:
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

    def prepare(self, keys: ScaledKeys) -> None:
        """Starts all loads of the first tile."""
        self.runs[0].fetch_scales(keys)
        for run in self.runs:
            for step in range(run.passes):
                run.fetch(step, keys)

    def put(self, rows: cute.Pointer, keys: ScaledKeys, following: ScaledKeys) -> None:
        """Writes the tile to the warp's rows of a slot, pass by pass, each followed by the loads of the same pass of the
        following tile, in the order of the source: ptxas moves most of them behind the stores."""
        self.runs[0].fetch_scales(following)
        for run in self.runs:
            for step in range(run.passes):
                run.store(step, rows)
                run.fetch(step, following)


def columns_of_cta(cache_format: CacheFormat, dtype: type[cutlass.Numeric], rank: Int32) -> ConvertedTile | CopiedTile:
    """The columns that the CTA of this rank holds."""
    wide = cache_format.wide_offset
    if cache_format.quantised == 0:
        return CopiedTile((latent_columns(rank), rope_columns(wide + D_LATENT * ELEMENT_BYTES, rank)))
    if cache_format.d_qk > D_LATENT:
        rope = rope_columns(wide, rank)
    else:  # they are the last values, which the odd CTA holds
        rope = CopiedColumns.create(D_ROPE * ELEMENT_BYTES // PIECE, LATENT_BOXES - 1, Int32(wide), rank == PAIR - 1)
    return ConvertedTile((ScaledColumns.create(cache_format, dtype, rank), rope))


@cute.jit
def load_word(target: cute.Tensor, index: cutlass.Constexpr[int], address: Int64, wanted: Boolean):
    """4 bytes of gmem, or zeros."""
    target[index] = Int32(0)
    if wanted:
        target[index] = gmem(Int32, address, 4).load()
