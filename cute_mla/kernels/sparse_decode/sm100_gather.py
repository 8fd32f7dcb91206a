"""Quantised columns of rows of a cache on their way to a CTA's half of a key tile in shared memory, on SM100.

The columns of a key that its CTA holds fall into two runs, each of which is done in passes (sm100/row_copy.py).
Where e4m3 is converted, both go through registers, which are loaded one tile ahead; where nothing is, both are copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, cute

from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT, D_ROPE, ELEMENT_BYTES
from ..attention.tiles import BOX_COLUMNS
from ..primitives.elements import pack_pair
from ..sm100.config import PAIR, SIXTEEN_BIT, VECTOR
from ..sm100.row_conversion import ConvertedTile, E4m3Columns, latent_e4m3_columns
from ..sm100.row_copy import (
    CHUNK,
    WARP_KEYS,
    CopiedColumns,
    CopiedTile,
    LaneKeys,
    gmem,
    latent_columns,
    rope_columns,
)

LATENT_BOXES = SIXTEEN_BIT.latent_boxes
SCALE_WORD = 4  # bytes of an fp32 scale, or of the e8m0 scales of one CTA
HALVES = 2  # of a warp's lanes, and of a CTA's e4m3 columns where groups are wide
E8M0_SMALLEST = 0x00400000  # 2^-127, whose code is 0
E8M0_NAN = 0x7FC00000  # of code 255
E8M0_NAN_CODE = 255
FP32_EXPONENT = 23  # its lowest bit


@dataclass(frozen=True)
class ScaledKeys(LaneKeys):
    """The keys of a warp and their scales. scales: address in gmem, 0 for a key that does not count."""

    scales: Int64


@dataclass(frozen=True)
class ScaledColumns(E4m3Columns):
    """e4m3 columns, which become 16-bit: value x scale in fp32, rounded once.

    rank: of this CTA. rScales: of the tile in hand, and of the next one: lane l has a word of the scales of key l % 16, an fp32 of
    its own in either half of the lanes, or four codes of e8m0.
    """

    cache_format: CacheFormat
    dtype: type[cutlass.Numeric]
    rank: Int32
    rScales: cute.Tensor

    @staticmethod
    def create(cache_format: CacheFormat, dtype: type[cutlass.Numeric], rank: Int32) -> ScaledColumns:
        """Return columns of which nothing has been fetched."""
        columns = latent_e4m3_columns(rank)
        boxes = cache_format.quantised // BOX_COLUMNS
        wanted = None if boxes == PAIR * LATENT_BOXES else rank * LATENT_BOXES + columns.box < boxes
        rScales = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        rScales.fill(0)
        return ScaledColumns(**{**vars(columns), "wanted": wanted}, cache_format=cache_format, dtype=dtype, rank=rank, rScales=rScales)

    def fetch_scales(self, keys: ScaledKeys) -> None:
        """Take up the scales that were on their way, and start the load of those of other keys."""
        self.rScales[0] = self.rScales[1]
        offset = self.rank * SCALE_WORD
        if self.cache_format.scales_inside:
            offset = (self.rank * HALVES + cute.arch.lane_idx() // WARP_KEYS) * SCALE_WORD
        load_word(self.rScales, 1, keys.scales + offset, keys.scales != 0)

    def store(self, step: int, rows: cute.Pointer) -> None:
        """Convert one pass and write it to the warp's rows of a slot."""
        values = cute.recast_tensor(self.rChunks[step], Float8E4M3FN).load().to(Float32)
        scale = self._scale(step)
        for half in range(ELEMENT_BYTES):
            rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            for i in range(VECTOR):
                k = 2 * (half * VECTOR + i)
                low, high = cute.arch.mul_packed_f32x2((values[k], values[k + 1]), (scale, scale))
                rWords[i] = pack_pair(low, high, self.dtype)
            self.store_half(step, half, rows, rWords)

    def _scale(self, step: int) -> Float32:
        rBits = cute.make_rmem_tensor(cute.make_layout(1), Int32)
        if self.cache_format.scales_inside:
            lane = self.key_of(step) + self.box // (LATENT_BOXES // HALVES) * WARP_KEYS
            rBits[0] = cute.arch.shuffle_sync(self.rScales[0], lane)
        else:
            code = (cute.arch.shuffle_sync(self.rScales[0], self.key_of(step)) >> (8 * self.box)) & E8M0_NAN_CODE
            power = cutlass.select_(code == 0, Int32(E8M0_SMALLEST), code << FP32_EXPONENT)
            rBits[0] = cutlass.select_(code == E8M0_NAN_CODE, Int32(E8M0_NAN), power)
        return cute.recast_tensor(rBits, Float32)[0]


@dataclass(frozen=True)
class ScaledTile(ConvertedTile):
    """A converted tile whose first run has scales."""

    runs: tuple[ScaledColumns, CopiedColumns]

    def prepare(self, keys: ScaledKeys) -> None:
        """Start all loads of the first tile."""
        self.runs[0].fetch_scales(keys)
        super().prepare(keys)

    def put(self, rows: cute.Pointer, keys: ScaledKeys, following: ScaledKeys) -> None:
        """Write the tile to the warp's rows of a slot, and loads the following one."""
        self.runs[0].fetch_scales(following)
        super().put(rows, keys, following)


def columns_of_cta(cache_format: CacheFormat, dtype: type[cutlass.Numeric], rank: Int32) -> ScaledTile | CopiedTile:
    """Return the mover of the columns that the CTA of this rank holds."""
    wide = cache_format.wide_offset
    if cache_format.quantised == 0:
        return CopiedTile((latent_columns(rank), rope_columns(wide + D_LATENT * ELEMENT_BYTES, rank)))
    if cache_format.d_qk > D_LATENT:
        rope = rope_columns(wide, rank)
    else:  # they are the last values, which the odd CTA holds
        rope = CopiedColumns.create(D_ROPE * ELEMENT_BYTES // CHUNK, LATENT_BOXES - 1, Int32(wide), rank == PAIR - 1)
    return ScaledTile((ScaledColumns.create(cache_format, dtype, rank), rope))


@cute.jit
def load_word(target: cute.Tensor, index: cutlass.Constexpr[int], address: Int64, wanted: Boolean):
    """Load 4 bytes of gmem; zeros, and no access, unless wanted."""
    target[index] = Int32(0)
    if wanted:
        target[index] = gmem(Int32, address, 4).load()
