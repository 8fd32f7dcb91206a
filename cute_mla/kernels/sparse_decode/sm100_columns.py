"""Half of the columns of the keys of sparse decode, on SM100, on their way to a key tile in shared memory.

Each CTA of a pair holds one half. A CTA that works alone holds both, one after the other: of the second, which its rows of a stage follow,
all 16-bit columns behind the quantised ones.

Columns are done in passes (../sm100/gather.py): e4m3 ones are converted in their stage, 16-bit ones are copied. Scales are copied with
them, a word or two a lane.

In DeepSeek-V4.1's caches, e4m3 values have a scale of e8m0 for 32 columns. A second cache may have e2m1 values, with a scale of e4m3 for
16 columns. Values and scales are numbers of bf16, and so is their product but for overflow and numbers below 2^-126, which round once: it
has the bits that fp32 would give. A lane has 16 columns of one scale in a pass. Of e2m1 values two lanes copy the same 16 bytes, and use
one half of them each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int16, Int32, Int64, cute

from ...spec.cache_format import V41, V41_FP4, CacheFormat
from ...spec.mla import D_LATENT, D_ROPE, ELEMENT_BYTES
from ...spec.sparse_decode import SparseDecodeConfig
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.arithmetic import (
    as_float,
    bf16_of_e4m3,
    e4m3_of_e2m1,
    multiply_pairs,
    pack_pair,
    pin_register,
    widen_in_pairs,
)
from ..primitives.copies import start_copy
from ..primitives.smem import Array, Field
from ..sm100.config import CTA_COLUMNS, GROUP_WARPS, PAIR, SIXTEEN_BIT, VECTOR, LatentGeometrySm100, LatentSmemSm100
from ..sm100.gather import (
    CHUNK,
    LANES,
    WARP_KEYS,
    CopiedColumns,
    E4m3Columns,
    LaneKeys,
    LatentColumnsSm100,
    TileColumns,
    WarpRows,
    copy_runs,
    latent_columns,
    latent_e4m3_columns,
    rope_columns,
)

LATENT_BOXES = SIXTEEN_BIT.latent_boxes
SCALE_WORD = 4  # bytes of an fp32 scale, or of the e8m0 scales of one CTA
HALVES = 2  # of a warp's lanes, each with scales of all its keys; of a CTA's boxes; and of 16 bytes of e2m1 values
SPARE_BOX = LATENT_BOXES  # of a stage: P overwrites it
BF16_E8M0_SMALLEST = 0x0040  # 2^-127, whose code is 0
BF16_NAN = 0x7FC0  # of code 255
E8M0_NAN_CODE = 255
BF16_EXPONENT = 7  # its lowest bit
FIRST_HALVES, SECOND_HALVES = 0x1010, 0x3232  # bytes of a word, as prmt counts them

KEY_SCALES = CTA_COLUMNS // V41.group  # bytes of a key and CTA
NARROW_KEY_SCALES = CTA_COLUMNS // V41_FP4.group
SCALE_CHUNKS = V41.group // CHUNK  # of 16 columns, that share a scale
BOX_SCALES = BOX_COLUMNS // V41.group
NARROW_SCALES = 0x42804280  # two bf16 numbers E2M1_SCALE
SAME_BYTES = 0x1111  # times the number of a byte: that byte everywhere, as prmt counts bytes


@dataclass(frozen=True)
class SparseDecodeSmemSm100(LatentSmemSm100):
    """Shared memory, with words for scales where the cache is quantised."""

    sScales: (
        cute.Pointer | None
    )  # int32 (stages, halves, 4 warps, 1 or 2, 32 lanes): ScaledTile, V41Tile and MixedTile say which scales a lane has
    sNarrow: cute.Pointer | None  # int32 (stages, halves, 4 warps): a bit per key, whether it has e2m1 values

    @staticmethod
    def fields(config: SparseDecodeConfig, geometry: LatentGeometrySm100) -> tuple[Field, ...]:
        """Return the fields of shared memory of a variant's own."""
        if not config.format.quantised:
            return ()
        warps = geometry.kv_stages * geometry.halves * GROUP_WARPS
        if config.mixes_formats:
            return Array("sScales", Int32, warps * HALVES * LANES), Array("sNarrow", Int32, warps)
        return (Array("sScales", Int32, warps * LANES),)

    def scale_word(self, rows: WarpRows, words: int = 1) -> cute.Pointer:
        """Return the first of the words in which a lane has scales of a tile."""
        return self.sScales + (rows.number * (words * LANES) + cute.arch.lane_idx())


def half_columns(
    config: SparseDecodeConfig, dtype: type[cutlass.Numeric], smem: SparseDecodeSmemSm100, rank: int | Int32
) -> LatentColumnsSm100:
    """Return the mover of half of the columns: those of the CTA of a rank, or, where a CTA works alone, of the first or second half."""
    cache = config.format
    if not cache.quantised:
        return TileColumns((latent_columns(rank), *_rope_columns(cache.wide_offset + D_LATENT * ELEMENT_BYTES, rank)))
    if config.mixes_formats:
        return MixedTile(latent_e4m3_columns(rank), rank, smem)
    if cache.scale == "e8m0" and cache.quantised == D_LATENT:
        return V41Tile(latent_e4m3_columns(rank), rank, smem)
    copied = _wide_columns(cache, rank)
    return ScaledTile(ScaledColumns.create(cache, dtype, rank), copied, rank, smem)


def _wide_columns(cache: CacheFormat, rank: int | Int32) -> tuple[CopiedColumns, ...]:
    """Return the movers of the 16-bit columns after the quantised ones."""
    if cache.quantised == cache.d_qk:
        return ()
    if cache.d_qk > D_LATENT:
        return _rope_columns(cache.wide_offset, rank)
    # they are the last values, which the odd CTA or the second half holds
    if isinstance(rank, int):
        return _second_half(cache.wide_offset, LATENT_BOXES - 1, rank)
    held = rank == PAIR - 1
    box = cutlass.select_(held, Int32(LATENT_BOXES - 1), Int32(SPARE_BOX))
    return (CopiedColumns.create(D_ROPE * ELEMENT_BYTES // CHUNK, box, Int32(cache.wide_offset), held),)


def _rope_columns(first: int, rank: int | Int32) -> tuple[CopiedColumns, ...]:
    """Return the movers of RoPE columns from byte `first` of a row on: half, or, where a CTA works alone, all with the second half."""
    return _second_half(first, LATENT_BOXES, rank) if isinstance(rank, int) else (rope_columns(first, rank),)


def _second_half(first: int, box: int, half: int) -> tuple[CopiedColumns, ...]:
    """Return the mover of the 64 16-bit columns of a CTA that works alone, which go to a box of the second half."""
    return (CopiedColumns.create(D_ROPE * ELEMENT_BYTES // CHUNK, box, Int32(first)),) if half else ()


# ---- scales of wide groups -----------------------------------------------------------------------------------------------


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
    def create(cache_format: CacheFormat, dtype: type[cutlass.Numeric], rank: int | Int32) -> ScaledColumns:
        """Return the mover of half of the columns. Lanes without columns move zeros to the box that P overwrites."""
        columns = latent_e4m3_columns(rank)
        boxes = cache_format.quantised // BOX_COLUMNS
        fields = vars(columns)
        first_half = isinstance(rank, int) and rank == 0
        if boxes < PAIR * LATENT_BOXES and not first_half:
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


def bf16_of_code(code: Int32) -> Int32:
    """Return the bits of a scale, a power of two or NaN, as bf16."""
    power = cutlass.select_(code == 0, Int32(BF16_E8M0_SMALLEST), code << BF16_EXPONENT)
    return cutlass.select_(code == E8M0_NAN_CODE, Int32(BF16_NAN), power)


@dataclass(frozen=True)
class ScaledTile:
    """A warp's share of a tile with scales.

    copied: 16-bit columns. rank: of this CTA. Lane l has a word of the scales of key l % 16: an fp32 of its own in either half of the
    lanes, or four codes of e8m0.
    """

    scaled: ScaledColumns
    copied: tuple[CopiedColumns, ...]
    rank: int | Int32
    smem: SparseDecodeSmemSm100

    def copy(self, rows: WarpRows, keys: ScaledKeys) -> None:
        """Start the copies of a tile and of its scales; zeros for keys that do not count."""
        offset = self.rank * SCALE_WORD
        if self.scaled.cache_format.scales_inside:
            offset = (self.rank * HALVES + cute.arch.lane_idx() // WARP_KEYS) * SCALE_WORD
        start_copy(self.smem.scale_word(rows), keys.scales + offset, keys.scales != 0, SCALE_WORD)
        copy_runs((self.scaled, *self.copied), rows, keys)

    def finish(self, rows: WarpRows) -> None:
        """Convert a tile that this warp's copies have brought. All loads come first: ptxas moves none ahead of a store."""
        scales = self.smem.scale_word(rows).load()
        if not self.scaled.cache_format.scales_inside:  # two codes of four
            codes = scales >> (cute.arch.lane_idx() // WARP_KEYS * 16)
            scales = bf16_of_code(codes & E8M0_NAN_CODE) | bf16_of_code((codes >> 8) & E8M0_NAN_CODE) << 16
        steps = range(self.scaled.passes)
        loaded = [self.scaled.load(step, rows.first) for step in steps]
        for step in steps:
            self.scaled.store(step, rows.first, loaded[step], scales)


# ---- scales of 32 and 16 columns -----------------------------------------------------------------------------------------


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

    rank: of this CTA. Lane l has four scales of key l % 16: those of the CTA's first two boxes or, in the upper half of the lanes, of the
    other two.
    """

    columns: E4m3Columns
    rank: int | Int32
    smem: SparseDecodeSmemSm100

    def copy(self, rows: WarpRows, keys: ScaledKeys) -> None:
        """Start the copies of a tile and of its scales; zeros for keys that do not count."""
        offset = self.rank * KEY_SCALES + cute.arch.lane_idx() // WARP_KEYS * SCALE_WORD
        start_copy(self.smem.scale_word(rows), keys.scales + offset, keys.scales != 0, SCALE_WORD)
        copy_runs((self.columns,), rows, keys)

    def finish(self, rows: WarpRows) -> None:
        """Convert a tile that this warp's copies have brought."""
        convert_e4m3(self.columns, rows, self.smem.scale_word(rows).load())


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
    """Return the byte of that lane's word that is the scale of e4m3 values."""
    return columns.box % HALVES * BOX_SCALES + columns.chunk // SCALE_CHUNKS


@dataclass(frozen=True)
class MixedKeys(LaneKeys):
    """The keys of a warp, their scales as in ScaledKeys, and whether the lane's is one of e2m1 values, in the second cache."""

    scales: Int64
    narrow: Boolean


@dataclass(frozen=True)
class MixedTile:
    """A warp's share of a tile with keys of e4m3 values, of e2m1 values, or of both.

    rank: of this CTA. Lane l has scales of key l % 16 in two words. Of e4m3 values the first is as in V41Tile. Of e2m1 values each has
    those of a box.
    """

    columns: E4m3Columns
    rank: int | Int32
    smem: SparseDecodeSmemSm100

    @cute.jit
    def copy(self, rows: WarpRows, keys: MixedKeys):
        """Start the copies of a tile and of its scales; zeros for keys that do not count."""
        lane, narrow = cute.arch.lane_idx(), cute.arch.vote_ballot_sync(keys.narrow)
        if lane == 0:
            (self.smem.sNarrow + rows.number).store(narrow)
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
        narrow = (self.smem.sNarrow + rows.number).load()
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
        first = self.smem.scale_word(rows, HALVES)
        return first, first + LANES
