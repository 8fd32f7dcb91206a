"""Quantised columns of rows of a cache on their way to a CTA's half of a key tile in shared memory, on SM100.

The columns of a key that its CTA holds fall into two runs, each of which is done in passes (sm100/row_copy.py): e4m3 columns,
which are converted in their stage (sm100/row_conversion.py), and 16-bit ones. Scales are copied beside them, a word a lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, Int64, cute

from ...spec.cache_format import CacheFormat
from ...spec.mla import ELEMENT_BYTES
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.arithmetic import as_float, multiply_pairs, pack_pair, widen_in_pairs
from ..sm100.config import PAIR, SIXTEEN_BIT, VECTOR
from ..sm100.row_conversion import E4m3Columns, latent_e4m3_columns
from ..sm100.row_copy import (
    LANES,
    WARP_KEYS,
    CopiedColumns,
    LaneKeys,
    WarpRows,
    copy_runs,
    start_copy,
)

LATENT_BOXES = SIXTEEN_BIT.latent_boxes
SCALE_WORD = 4  # bytes of an fp32 scale, or of the e8m0 scales of one CTA
HALVES = 2  # of a warp's lanes, and of a CTA's e4m3 columns where groups are wide
SPARE_BOX = LATENT_BOXES  # of a stage: P overwrites it
BF16_E8M0_SMALLEST = 0x0040  # 2^-127, whose code is 0
BF16_NAN = 0x7FC0  # of code 255
E8M0_NAN_CODE = 255
BF16_EXPONENT = 7  # its lowest bit
FIRST_HALVES, SECOND_HALVES = 0x1010, 0x3232  # bytes of a word, as prmt counts them


@dataclass(frozen=True)
class ScaledKeys(LaneKeys):
    """The keys of a warp and their scales. scales: address in gmem, 0 for a key that does not count."""

    scales: Int64


@dataclass(frozen=True)
class ScaledColumns(E4m3Columns):
    """e4m3 columns, which become 16-bit: value x scale, rounded once.

    dtype: of the columns that they become. group: the 64 columns of the CTA to which the lane's belong. Lane l has a word of the scales
    of key l % 16: those of groups 0 and 1 in the lower half of the lanes, of groups 2 and 3 in the upper one.
    """

    cache_format: CacheFormat
    dtype: type[cutlass.Numeric]
    group: Int32

    @staticmethod
    def create(cache_format: CacheFormat, dtype: type[cutlass.Numeric], rank: Int32) -> ScaledColumns:
        """Return the mover of a CTA's columns. Lanes without columns move zeros to the box that P overwrites."""
        columns = latent_e4m3_columns(rank)
        boxes = cache_format.quantised // BOX_COLUMNS
        fields = vars(columns)
        if boxes < PAIR * LATENT_BOXES:
            held = rank * LATENT_BOXES + columns.box < boxes
            fields = {**fields, "held": held, "box": cutlass.select_(held, columns.box, Int32(SPARE_BOX))}
        return ScaledColumns(**fields, cache_format=cache_format, dtype=dtype, group=columns.box)

    def store(self, step: int, rows: cute.Pointer, words: cute.Tensor, scales: Int32) -> None:
        """Convert one pass and write it to the warp's rows of a stage. scales: the lane's."""
        scale = cute.arch.shuffle_sync(scales, self.key_of(step) + self.group // (LATENT_BOXES // HALVES) * WARP_KEYS)
        rWords = self._product(words, as_float(scale)) if self.cache_format.scales_inside else self._bf16_product(words, scale)
        self.write(step, rows, rWords)

    def _product(self, words: cute.Tensor, scale: Float32) -> cute.Tensor:
        values = cute.recast_tensor(words, Float8E4M3FN).load().to(Float32)
        rWords = cute.make_rmem_tensor(cute.make_layout(ELEMENT_BYTES * VECTOR), Int32)
        for i in range(ELEMENT_BYTES * VECTOR):
            low, high = cute.arch.mul_packed_f32x2((values[2 * i], values[2 * i + 1]), (scale, scale))
            rWords[i] = pack_pair(low, high, self.dtype)
        return rWords

    def _bf16_product(self, words: cute.Tensor, scales: Int32) -> cute.Tensor:
        """Multiply as bf16: values and powers of two are numbers of bf16, so that only the product is rounded, if at all."""
        scale = cute.arch.prmt(scales, scales, cutlass.select_(self.group % 2 == 0, Int32(FIRST_HALVES), Int32(SECOND_HALVES)))
        rWords = widen_in_pairs(words, self.dtype)
        for i in range(ELEMENT_BYTES * VECTOR):
            rWords[i] = multiply_pairs(rWords[i], scale)
        return rWords


def bf16_of_e8m0(code: Int32) -> Int32:
    """Return the bits of a scale, a power of two or NaN, as bf16."""
    power = cutlass.select_(code == 0, Int32(BF16_E8M0_SMALLEST), code << BF16_EXPONENT)
    return cutlass.select_(code == E8M0_NAN_CODE, Int32(BF16_NAN), power)


@dataclass(frozen=True)
class ScaledTile:
    """A warp's share of a tile with scales.

    copied: 16-bit columns. rank: of this CTA. sScales: int32 (stages, 4 warps, 32 lanes): lane l has a word of the scales of key l % 16, an
    fp32 of its own in either half of the lanes, or four codes of e8m0.
    """

    scaled: ScaledColumns
    copied: tuple[CopiedColumns, ...]
    rank: Int32
    sScales: cute.Pointer

    def copy(self, rows: WarpRows, keys: ScaledKeys) -> None:
        """Start the copies of a tile and of its scales; zeros for keys that do not count."""
        offset = self.rank * SCALE_WORD
        if self.scaled.cache_format.scales_inside:
            offset = (self.rank * HALVES + cute.arch.lane_idx() // WARP_KEYS) * SCALE_WORD
        start_copy(self._scale_word(rows), keys.scales + offset, keys.scales != 0, SCALE_WORD)
        copy_runs((self.scaled, *self.copied), rows, keys)

    def finish(self, rows: WarpRows) -> None:
        """Convert a tile that this warp's copies have brought. All loads come first: ptxas moves none ahead of a store."""
        scales = self._scale_word(rows).load()
        if not self.scaled.cache_format.scales_inside:  # two codes of four
            codes = scales >> (cute.arch.lane_idx() // WARP_KEYS * 16)
            scales = bf16_of_e8m0(codes & E8M0_NAN_CODE) | bf16_of_e8m0((codes >> 8) & E8M0_NAN_CODE) << 16
        steps = range(self.scaled.passes)
        loaded = [self.scaled.load(step, rows.first) for step in steps]
        for step in steps:
            self.scaled.store(step, rows.first, loaded[step], scales)

    def _scale_word(self, rows: WarpRows) -> cute.Pointer:
        return self.sScales + (rows.number * LANES + cute.arch.lane_idx())
