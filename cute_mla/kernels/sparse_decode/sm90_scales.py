"""Scales of gathered keys on SM90, and the product of an e4m3 value and its scale.

The scales of a key are loaded by the two lanes that have looked it up, and handed to the four that convert it by shuffles.

fp32 scales, and e8m0 scales of 64 columns (SparseDecodeSm90ScaleProducts)
    A lane loads eight bytes. A product is formed in fp32 and rounded once.
e8m0 scales of 32 columns (SparseDecodeSm90Bf16Products)
    Of each box of 64 columns a lane converts 16, which have one scale. Of the lanes that have a key's scales, the first keeps those of the
    boxes' first halves, the second those of the other halves: a word of two bf16 numbers for each stage of the tile. Values and scales are
    numbers of bf16, and a product in bf16 has the bits that the product in fp32 has after its rounding.
e4m3 scales of 16 columns, of the e2m1 values of a narrow key (SparseDecodeSm90Bf16Products with a second format)
    A lane loads the scales of 256 columns and exchanges half of them, so that it too has a word for each stage of the tile: codes for two
    lanes and both boxes. Values become e4m3, and scales bf16, where they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute

from ...spec.sparse_decode import SparseDecodeConfig
from ..primitives.arithmetic import E2M1_SCALE, as_float, e4m3_of_e2m1, multiply_pairs, pack_pair, widen
from ..primitives.rows import load_if
from ..sm90.rows import CHUNK, CHUNK_WORDS, HALVES, KEYS_PER_WARP, LANES_PER_KEY, LatentSm90Step

LOOKED_UP = HALVES * KEYS_PER_WARP  # keys of a warp; two lanes each find where they lie
SCALE_SHARE = 8  # bytes of a key's scales that a lane loads, where they are loaded once
E8M0_BITS = 255 << 23  # as the exponent of an fp32 number
E8M0_ONE = 1 << 23
PAIR_CODES = 0x00FF00FF  # every other byte of a word
# bytes of a word, or of two, as prmt counts them
FIRST_HALVES, SECOND_HALVES = 0x1010, 0x3232
EVEN_BYTES, ODD_BYTES = 0x2020, 0x3131
LOW_PAIRS, HIGH_PAIRS = 0x5410, 0x7632

Scales = tuple[Int32, ...]  # registers of a lane that has looked up a key


def source_lane(who: Any, key: int) -> Int32:
    """Return the first lane that looked up one of the two keys of a thread, a SparseDecodeGatherThread."""
    return who.number % 32 // LANES_PER_KEY + who.halves[key] * KEYS_PER_WARP


def scale_share(thread: Int32) -> Int32:
    """Return which share of the scales a lane has of the key that it has looked up: two lanes look it up."""
    return thread % 32 // LOOKED_UP


@dataclass(frozen=True)
class SparseDecodeSm90ScaleProducts:
    """Values times scales in fp32, rounded once to dtype."""

    config: SparseDecodeConfig
    dtype: type[cutlass.Numeric]

    words = SCALE_SHARE // 4
    narrow = False

    @property
    def shares(self) -> bool:
        """Return whether each of the two lanes loads other scales of a key."""
        return self.config.format.scales_inside

    def source(self, scales: Int64, thread: Int32) -> Int64:
        """Return the address of a lane's share of the scales that begin at an address."""
        return scales + scale_share(thread) * SCALE_SHARE

    def ready(self, own: Scales, narrow: Int32 | None, thread: Int32) -> Scales:
        """Return the scales as they go round."""
        return own

    def of_step(self, step: LatentSm90Step, words: cute.Tensor, own: Scales, keys: Any, who: Any) -> list[Float32]:
        """Return the scales of a step's runs. own: of this lane. All lanes."""
        if not step.quantised:
            return []
        word, byte = divmod(step.scale_source, 4)
        lane = source_lane(who, step.key)
        if self.config.format.scales_inside:
            share, word = divmod(word, SCALE_SHARE // 4)
            return [as_float(cute.arch.shuffle_sync(own[word], lane + share * LOOKED_UP))]
        scales = cute.arch.shuffle_sync(own[word], lane)
        return [power_of_two(scales, byte + run.scale) for run in step.runs if run.quantised]

    def dequantise(self, words: cute.Tensor, scale: Float32) -> cute.Tensor:
        """Return 16 e4m3 values in 4 words times a scale, in 8 words."""
        values = cute.recast_tensor(words, cutlass.Float8E4M3FN).load().to(Float32)
        rounded = cute.make_rmem_tensor(cute.make_layout(CHUNK), self.dtype)
        rounded.store((values * scale).to(self.dtype))
        return cute.recast_tensor(rounded, Int32)


@dataclass(frozen=True)
class SparseDecodeSm90Bf16Products:
    """Values times powers of two in bf16."""

    config: SparseDecodeConfig

    words = CHUNK // 4
    shares = False

    @property
    def narrow(self) -> bool:
        """Return whether the second cache has e2m1 values."""
        return self.config.extra_format is not self.config.format

    def source(self, scales: Int64, thread: Int32) -> Int64:
        """Return the address of a lane's share of the e4m3 scales of e2m1 values: of the first or the last 256 columns."""
        return scales + scale_share(thread) * CHUNK

    def ready(self, own: Scales, narrow: Int32 | None, thread: Int32) -> Scales:
        """Return the scales as they go round: of either half of the boxes, as bf16. narrow: as in Keys."""
        shift = scale_share(thread) * 8
        powers = tuple(powers_of_two((word >> shift) & PAIR_CODES) for word in own)
        return powers if narrow is None else narrow_scales(powers, own, narrow, thread)

    def of_step(self, step: LatentSm90Step, words: cute.Tensor, own: Scales, keys: Any, who: Any) -> list[Int32]:
        """Return the scales of a step's runs, twice in a word, and make e4m3 values of its bytes. keys: of the tile. All lanes."""
        lane = source_lane(who, step.key) + (who.number & HALVES) * (LOOKED_UP // HALVES)
        pair = cute.arch.shuffle_sync(own[step.scale_source // 4], lane)
        if self.narrow:
            pair = widen_narrow(step, words, pair, keys.narrow, keys.is_narrow(step.key, who), who.number)
        return [cute.arch.prmt(pair, pair, Int32(halves)) for halves in (FIRST_HALVES, SECOND_HALVES)]

    def dequantise(self, words: cute.Tensor, scale: Int32) -> cute.Tensor:
        """Return 16 e4m3 values in 4 words times a scale, in 8 words."""
        products = widen(words, BFloat16)
        for i in range(2 * self.words):
            products[i] = multiply_pairs(products[i], scale)
        return products


@cute.jit
def narrow_scales(powers: Scales, own: Scales, narrow: Int32, thread: Int32) -> Scales:
    """Return a lane's scales: powers of two, or of a key with e2m1 values, for each stage, a code for each 16 columns that it hands to.

    own: as loaded, of e2m1 values those of 256 columns. The two lanes of a key exchange what the other one hands round.
    """
    scale0, scale1, scale2, scale3 = powers
    if narrow != 0:
        first = scale_share(thread) == 0
        kept = cutlass.select_(first, Int32(LOW_PAIRS), Int32(HIGH_PAIRS))
        given = cutlass.select_(first, Int32(HIGH_PAIRS), Int32(LOW_PAIRS))
        kept0, kept1 = cute.arch.prmt(own[0], own[1], kept), cute.arch.prmt(own[2], own[3], kept)
        got0 = cute.arch.shuffle_sync_bfly(cute.arch.prmt(own[0], own[1], given), offset=LOOKED_UP)
        got1 = cute.arch.shuffle_sync_bfly(cute.arch.prmt(own[2], own[3], given), offset=LOOKED_UP)
        mine = ((narrow >> (thread % 32)) & 1) != 0
        scale0 = cutlass.select_(mine, cutlass.select_(first, kept0, got0), scale0)
        scale1 = cutlass.select_(mine, cutlass.select_(first, kept1, got1), scale1)
        scale2 = cutlass.select_(mine, cutlass.select_(first, got0, kept0), scale2)
        scale3 = cutlass.select_(mine, cutlass.select_(first, got1, kept1), scale3)
    return scale0, scale1, scale2, scale3


@cute.jit
def widen_narrow(
    step: cutlass.Constexpr[LatentSm90Step], words: cute.Tensor, pair: Int32, any_narrow: Int32, narrow: Boolean, thread: Int32
) -> Int32:
    """Make e4m3 values of a step's bytes if its key is narrow: if it has e2m1 values. any_narrow: not 0 if a key of the warp has.

    pair: scales of both boxes, or of a narrow key codes for two lanes. Return the scales of the lane's 16 columns of both boxes as bf16.
    """
    if any_narrow != 0:
        odd = (thread & 1) != 0
        both = cute.make_rmem_tensor(cute.make_layout(2), Int32)
        both[0], both[1] = cute.arch.prmt(pair, pair, cutlass.select_(odd, Int32(ODD_BYTES), Int32(EVEN_BYTES))), Int32(0)
        scales = cute.recast_tensor(both, cutlass.Float8E4M3FN).load().to(Float32)
        pair = cutlass.select_(narrow, pack_pair(scales[0] * E2M1_SCALE, scales[1] * E2M1_SCALE, BFloat16), pair)
        for run in cutlass.range_constexpr(len(step.runs)):
            first = run * CHUNK_WORDS
            wide0, wide1 = e4m3_of_e2m1(cutlass.select_(odd, words[first + 2], words[first]))
            wide2, wide3 = e4m3_of_e2m1(cutlass.select_(odd, words[first + 3], words[first + 1]))
            words[first] = cutlass.select_(narrow, wide0, words[first])
            words[first + 1] = cutlass.select_(narrow, wide1, words[first + 1])
            words[first + 2] = cutlass.select_(narrow, wide2, words[first + 2])
            words[first + 3] = cutlass.select_(narrow, wide3, words[first + 3])
    return pair


Conversion = Any  # SparseDecodeSm90ScaleProducts or SparseDecodeSm90Bf16Products


def conversion_of(config: SparseDecodeConfig, dtype: type[cutlass.Numeric]) -> Conversion:
    """Return the conversion of a variant's e4m3 columns."""
    cache = config.format
    return (
        SparseDecodeSm90Bf16Products(config)
        if cache.scale == "e8m0" and cache.scales_inside
        else SparseDecodeSm90ScaleProducts(config, dtype)
    )


def load_scales(conversion: Conversion, address: Int64) -> Scales:
    """Start the load of a lane's scales; 0, and no access, for an absent key."""
    words = cute.make_rmem_tensor(cute.make_layout(conversion.words), Int32)
    words.fill(0)
    load_if(address != 0, words, address)
    return tuple(words[i] for i in range(conversion.words))


def power_of_two(word: Int32, byte: int) -> Float32:
    """Return 2^(e8m0 - 127) of a byte of a word, NaN for 255."""
    bits = (word << (23 - 8 * byte) if byte < 3 else word >> 1) & E8M0_BITS
    # 2^-127 is subnormal: it and NaN, which differ from their neighbours by more than the exponent, have this bit too
    special = ((bits + E8M0_ONE) & (E8M0_BITS - E8M0_ONE)) == 0
    return as_float(bits | cutlass.select_(special, Int32(E8M0_ONE >> 1), Int32(0)))


def powers_of_two(codes: Int32) -> Int32:
    """Return 2^(e8m0 - 127) of bytes 0 and 2 of a word, whose other bytes are 0, as bf16; NaN for 255."""
    following = (codes + 0x00010001) & 0x00FE00FE  # 0 for the codes 0 and 255, whose numbers have this bit of the mantissa too
    special = (0x01000100 - following) & 0x01000100
    return (codes << 7) | (special >> 2)
