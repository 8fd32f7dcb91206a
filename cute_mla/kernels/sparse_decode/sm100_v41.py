"""Columns of DeepSeek-V4.1's caches on their way to a CTA's half of a key tile in shared memory, on SM100.

e4m3 values have a scale of e8m0 for 32 columns. A second cache may have e2m1 values, with a scale of e4m3 for 16 columns. Values and scales
are numbers of bf16, and so is their product but for overflow and numbers below 2^-126, which round once: it has the bits that fp32
would give. Columns are copied and converted as in sm100/row_conversion.py, whose lanes have 16 columns of one scale in a pass. Of e2m1
values two lanes copy the same 16 bytes, and use one half of them each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import BFloat16, Boolean, Int16, Int32, Int64, cute

from ...spec.cache_format import V41, V41_FP4
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.arithmetic import bf16_of_e4m3, e4m3_of_e2m1, multiply_pairs, pin_register, widen_in_pairs
from ..sm100.config import CTA_COLUMNS
from ..sm100.row_conversion import E4m3Columns
from ..sm100.row_copy import CHUNK, LANES, WARP_KEYS, WarpRows, copy_runs, start_copy
from .sm100_gather import SCALE_WORD, ScaledKeys

HALVES = 2  # of a warp's lanes: lanes l and l + 16 have the scales of key l; and of 16 bytes of e2m1 values
KEY_SCALES = CTA_COLUMNS // V41.group  # bytes of a key and CTA
NARROW_KEY_SCALES = CTA_COLUMNS // V41_FP4.group
SCALE_CHUNKS = V41.group // CHUNK  # of 16 columns, that share a scale
BOX_SCALES = BOX_COLUMNS // V41.group
NARROW_SCALES = 0x42804280  # two bf16 numbers E2M1_SCALE
SAME_BYTES = 0x1111  # times the number of a byte: that byte everywhere, as prmt counts bytes


def scaled_bf16(words: cute.Tensor, scales: Int32) -> cute.Tensor:
    """Return e4m3 values times a pair of equal bf16 scales, as pairs of bf16."""
    rWords = widen_in_pairs(words, BFloat16)
    for i in range(cute.size(rWords)):
        rWords[i] = multiply_pairs(rWords[i], scales)
    return rWords


def bf16_of_e8m0(codes: Int32) -> Int32:
    """Return a pair of powers of two, or NaN, as bf16. codes: bytes 0 and 1 of a word."""
    pair = Int16(codes & 0xFFFF)
    return cute.arch.inline_ptx("cvt.rn.bf16x2.ue8m0x2 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[pair])


@dataclass(frozen=True)
class V41Tile:
    """A warp's share of a tile.

    rank: of this CTA. sScales: int32 (stages, 4 warps, 32 lanes): lane l has four scales of key l % 16, those of the CTA's first two boxes
    or, in the upper half of the lanes, of the other two.
    """

    columns: E4m3Columns
    rank: Int32
    sScales: cute.Pointer

    def copy(self, rows: WarpRows, keys: ScaledKeys) -> None:
        """Start the copies of a tile and of its scales; zeros for keys that do not count."""
        offset = self.rank * KEY_SCALES + cute.arch.lane_idx() // WARP_KEYS * SCALE_WORD
        start_copy(self._scale_word(rows), keys.scales + offset, keys.scales != 0, SCALE_WORD)
        copy_runs((self.columns,), rows, keys)

    def finish(self, rows: WarpRows) -> None:
        """Convert a tile that this warp's copies have brought."""
        convert_e4m3(self.columns, rows, self._scale_word(rows).load())

    def _scale_word(self, rows: WarpRows) -> cute.Pointer:
        return self.sScales + (rows.number * LANES + cute.arch.lane_idx())


def convert_e4m3(columns: E4m3Columns, rows: WarpRows, scales: Int32) -> None:
    """Convert a tile of e4m3 values, pass by pass: all at once would keep the port from the products longer. scales: of the lane."""
    byte = scale_byte(columns)
    for step in range(columns.passes):
        words = columns.load(step, rows.first)
        codes = cute.arch.shuffle_sync(scales, scale_lane(columns, step))
        columns.write(step, rows.first, scaled_bf16(words, bf16_of_e8m0(cute.arch.prmt(codes, codes, byte * SAME_BYTES))))


def scale_lane(columns: E4m3Columns, step: int) -> Int32:
    """Return the lane that has the scales of this lane's columns of one pass."""
    return columns.key_of(step) + columns.box // HALVES * WARP_KEYS


def scale_byte(columns: E4m3Columns) -> Int32:
    """Return which byte of that lane's word is the scale of e4m3 values."""
    return columns.box % HALVES * BOX_SCALES + columns.chunk // SCALE_CHUNKS


@dataclass(frozen=True)
class MixedKeys(ScaledKeys):
    """The keys of a warp, and whether the lane's is one of e2m1 values, in the second cache."""

    narrow: Boolean


@dataclass(frozen=True)
class MixedTile:
    """A warp's share of a tile with keys of e4m3 values, of e2m1 values, or of both.

    rank: of this CTA. sScales: int32 (stages, 4 warps, 2, 32 lanes): lane l has scales of key l % 16 in two words. Of e4m3 values the first
    is as in V41Tile. Of e2m1 values each has those of a box. sNarrow: int32 (stages, 4 warps): a bit per key, whether it has e2m1 values.
    """

    columns: E4m3Columns
    rank: Int32
    sScales: cute.Pointer
    sNarrow: cute.Pointer

    @cute.jit
    def copy(self, rows: WarpRows, keys: MixedKeys):
        """Start the copies of a tile and of its scales; zeros for keys that do not count."""
        lane, narrow = cute.arch.lane_idx(), cute.arch.vote_ballot_sync(keys.narrow)
        if lane == 0:
            (self.sNarrow + rows.number).store(narrow)
        wide_source = self.rank * KEY_SCALES + lane // WARP_KEYS * SCALE_WORD
        narrow_source = self.rank * NARROW_KEY_SCALES + lane // WARP_KEYS * (HALVES * SCALE_WORD)
        source = keys.scales + Int64(cutlass.select_(keys.narrow, narrow_source, wide_source))
        first, second = self._scale_words(rows)
        start_copy(first, source, keys.scales != 0, SCALE_WORD)
        start_copy(second, source + SCALE_WORD, (keys.scales != 0) & keys.narrow, SCALE_WORD)
        for step in cutlass.range_constexpr(self.columns.passes):
            source = cutlass.select_(self._is_narrow(step, narrow), self.columns.source // HALVES & -CHUNK, self.columns.source)
            replace(self.columns, source=Int32(source)).copy(step, rows.first, keys)

    @cute.jit
    def finish(self, rows: WarpRows):
        """Convert a tile that this warp's copies have brought."""
        cute.arch.sync_warp()
        narrow = (self.sNarrow + rows.number).load()
        first, second = (word.load() for word in self._scale_words(rows))
        if narrow == 0:
            convert_e4m3(self.columns, rows, first)
        else:
            self._convert(rows, narrow, first, second)

    def _convert(self, rows: WarpRows, narrow: Int32, first: Int32, second: Int32) -> None:
        """Convert a tile that has e2m1 values. narrow: a bit per key. first, second: scales of the lane."""
        steps = range(self.columns.passes)
        factors = [self._scales(step, narrow, first, second) for step in steps]
        loaded = [self.columns.load(step, rows.first) for step in steps]
        for step in steps:
            self._widen(loaded[step], self._is_narrow(step, narrow))
            self.columns.write(step, rows.first, scaled_bf16(loaded[step], factors[step]))

    def _scales(self, step: int, narrow: Int32, first: Int32, second: Int32) -> Int32:
        """Return the scale of a lane's columns of one pass, twice."""
        lane, is_narrow = scale_lane(self.columns, step), self._is_narrow(step, narrow)
        codes, other = cute.arch.shuffle_sync(first, lane), cute.arch.shuffle_sync(second, lane)
        codes = cutlass.select_(is_narrow & (self.columns.box % HALVES != 0), other, codes)
        byte = cutlass.select_(is_narrow, self.columns.chunk, scale_byte(self.columns))
        same = cute.arch.prmt(codes, codes, byte * SAME_BYTES)
        narrow_scale = multiply_pairs(bf16_of_e4m3(same), pin_register(NARROW_SCALES))
        return cutlass.select_(is_narrow, narrow_scale, bf16_of_e8m0(same))

    def _widen(self, words: cute.Tensor, narrow: Boolean) -> None:
        """Make e4m3 values, 64 times smaller, of a lane's 16 e2m1 values."""
        odd = self.columns.chunk % HALVES != 0
        wide = [word for i in range(HALVES) for word in e4m3_of_e2m1(cutlass.select_(odd, words[HALVES + i], words[i]))]
        for i, word in enumerate(wide):
            words[i] = cutlass.select_(narrow, word, words[i])

    def _is_narrow(self, step: int, narrow: Int32) -> Boolean:
        return (narrow >> self.columns.key_of(step)) & 1 != 0

    def _scale_words(self, rows: WarpRows) -> tuple[cute.Pointer, cute.Pointer]:
        first = self.sScales + (rows.number * (HALVES * LANES) + cute.arch.lane_idx())
        return first, first + LANES
