"""Quantised columns of rows of a cache on their way to a CTA's half of a key tile in shared memory, on SM100.

The columns of a key that its CTA holds fall into two runs, each of which is done in passes (sm100/row_copy.py): e4m3 columns,
which are converted in their stage (sm100/row_conversion.py), and 16-bit ones. Scales are copied beside them, a word a lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute

from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT, D_ROPE, ELEMENT_BYTES
from ..attention.tiles import BOX_COLUMNS
from ..primitives.elements import pack_pair
from ..primitives.smem import Array, Field
from ..sm100.config import GROUP_WARPS, PAIR, SIXTEEN_BIT, VECTOR
from ..sm100.row_conversion import E4m3Columns, latent_e4m3_columns
from ..sm100.row_copy import (
    CHUNK,
    LANES,
    WARP_KEYS,
    CopiedColumns,
    CopiedTile,
    LaneKeys,
    WarpRows,
    copy_runs,
    latent_columns,
    rope_columns,
    start_copy,
)
from ..sm100.row_producer import KV_STAGES

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

    dtype: of the columns that they become.
    """

    cache_format: CacheFormat
    dtype: type[cutlass.Numeric]

    @staticmethod
    def create(cache_format: CacheFormat, dtype: type[cutlass.Numeric], rank: Int32) -> ScaledColumns:
        """Return the mover of a CTA's columns."""
        columns = latent_e4m3_columns(rank)
        boxes = cache_format.quantised // BOX_COLUMNS
        wanted = None if boxes == PAIR * LATENT_BOXES else rank * LATENT_BOXES + columns.box < boxes
        return ScaledColumns(**{**vars(columns), "wanted": wanted}, cache_format=cache_format, dtype=dtype)

    def store(self, step: int, rows: cute.Pointer, words: cute.Tensor, scale_word: Int32) -> None:
        """Convert one pass and write it to the warp's rows of a stage. scale_word: the lane's."""
        values = cute.recast_tensor(words, Float8E4M3FN).load().to(Float32)
        scale = self._scale(step, scale_word)
        for half in range(ELEMENT_BYTES):
            rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            for i in range(VECTOR):
                k = 2 * (half * VECTOR + i)
                low, high = cute.arch.mul_packed_f32x2((values[k], values[k + 1]), (scale, scale))
                rWords[i] = pack_pair(low, high, self.dtype)
            self.store_half(step, half, rows, rWords)

    def _scale(self, step: int, scale_word: Int32) -> Float32:
        rBits = cute.make_rmem_tensor(cute.make_layout(1), Int32)
        if self.cache_format.scales_inside:
            lane = self.key_of(step) + self.box // (LATENT_BOXES // HALVES) * WARP_KEYS
            rBits[0] = cute.arch.shuffle_sync(scale_word, lane)
        else:
            code = (cute.arch.shuffle_sync(scale_word, self.key_of(step)) >> (8 * self.box)) & E8M0_NAN_CODE
            power = cutlass.select_(code == 0, Int32(E8M0_SMALLEST), code << FP32_EXPONENT)
            rBits[0] = cutlass.select_(code == E8M0_NAN_CODE, Int32(E8M0_NAN), power)
        return cute.recast_tensor(rBits, Float32)[0]


@dataclass(frozen=True)
class ScaledTile:
    """A warp's share of a tile with scales.

    rank: of this CTA. sScales: int32 (stages, 4 warps, 32 lanes): lane l has a word of the scales of key l % 16, an fp32 of its own in
    either half of the lanes, or four codes of e8m0.
    """

    scaled: ScaledColumns
    copied: CopiedColumns
    rank: Int32
    sScales: cute.Pointer

    def copy(self, rows: WarpRows, keys: ScaledKeys) -> None:
        """Start the copies of a tile and of its scales; zeros for keys that do not count."""
        offset = self.rank * SCALE_WORD
        if self.scaled.cache_format.scales_inside:
            offset = (self.rank * HALVES + cute.arch.lane_idx() // WARP_KEYS) * SCALE_WORD
        start_copy(self._scale_word(rows), keys.scales + offset, keys.scales != 0, SCALE_WORD)
        copy_runs((self.scaled, self.copied), rows, keys)

    def finish(self, rows: WarpRows) -> None:
        """Convert a tile that this warp's copies have brought. All loads come first: ptxas moves none ahead of a store."""
        scale_word = self._scale_word(rows).load()
        steps = range(self.scaled.passes)
        loaded = [self.scaled.load(step, rows.first) for step in steps]
        for step in steps:
            self.scaled.store(step, rows.first, loaded[step], scale_word)

    def _scale_word(self, rows: WarpRows) -> cute.Pointer:
        return self.sScales + (rows.number * LANES + cute.arch.lane_idx())


def scale_fields(cache_format: CacheFormat) -> tuple[Field, ...]:
    """Return the fields of shared memory for scales."""
    return (Array("sScales", Int32, KV_STAGES * GROUP_WARPS * LANES),) if cache_format.quantised else ()


def columns_of_cta(
    cache_format: CacheFormat, dtype: type[cutlass.Numeric], sScales: cute.Pointer | None, rank: Int32
) -> ScaledTile | CopiedTile:
    """Return the mover of the columns that the CTA of this rank holds. sScales: where the format has any."""
    wide = cache_format.wide_offset
    if sScales is None:
        return CopiedTile((latent_columns(rank), rope_columns(wide + D_LATENT * ELEMENT_BYTES, rank)))
    if cache_format.d_qk > D_LATENT:
        rope = rope_columns(wide, rank)
    else:  # they are the last values, which the odd CTA holds
        rope = CopiedColumns.create(D_ROPE * ELEMENT_BYTES // CHUNK, LATENT_BOXES - 1, Int32(wide), rank == PAIR - 1)
    return ScaledTile(ScaledColumns.create(cache_format, dtype, rank), rope, rank, sScales)
