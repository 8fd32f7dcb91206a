"""Scales of gathered keys on SM90, and the product of an e4m3 value and its scale.

The scales of a key are loaded by the two lanes that have looked it up, and handed to the four that convert it by shuffles.

fp32 scales, and e8m0 scales of 64 columns (ScaleProducts)
    A lane loads eight bytes. A product is formed in fp32 and rounded once.
e8m0 scales of 32 columns (Bf16Products)
    Of each box of 64 columns a lane converts 16, which have one scale. Of the lanes that have a key's scales, the first keeps those of the
    boxes' first halves, the second those of the other halves: a word of two bf16 numbers for each stage of the tile. Values and scales are
    numbers of bf16, and a product in bf16 has the bits that the product in fp32 has after its rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from ...spec.sparse_decode import SparseDecodeConfig
from ..primitives.e4m3 import widen
from ..primitives.registers import as_float
from ..sm90.gather_split import CHUNK, HALVES, KEYS_PER_WARP, Half
from ..sm90.row_conversion import LANES_PER_KEY, Step, load_if

LOOKED_UP = HALVES * KEYS_PER_WARP  # keys of a warp; two lanes each find where they lie
SCALE_SHARE = 8  # bytes of a key's scales that a lane loads, where they are loaded once
E8M0_BITS = 255 << 23  # as the exponent of an fp32 number
E8M0_ONE = 1 << 23
PAIR_CODES = 0x00FF00FF  # every other byte of a word
FIRST_HALVES, SECOND_HALVES = 0x1010, 0x3232  # bytes of a word, as prmt counts them

Scales = tuple[Int32, ...]  # registers of a lane that has looked up a key


def source_lane(thread: Int32, half: int | Int32) -> Int32:
    """Return the first lane that looked up the thread's key of one half of the tile."""
    return thread % 32 // LANES_PER_KEY + half * KEYS_PER_WARP


def scale_share(thread: Int32) -> Int32:
    """Return which share of the scales a lane has of the key that it has looked up: two lanes look it up."""
    return thread % 32 // LOOKED_UP


@dataclass(frozen=True)
class ScaleProducts:
    """Values times scales in fp32, rounded once to dtype."""

    config: SparseDecodeConfig
    dtype: type[cutlass.Numeric]

    words = SCALE_SHARE // 4

    @property
    def shares(self) -> bool:
        """Return whether each of the two lanes loads other scales of a key."""
        return self.config.format.scales_inside

    def source(self, scales: Int64, thread: Int32) -> Int64:
        """Return the address of a lane's share of the scales that begin at an address."""
        return scales + scale_share(thread) * SCALE_SHARE

    def ready(self, own: Scales, thread: Int32) -> Scales:
        """Return the scales as they go round."""
        return own

    def of_step(self, step: Step, own: Scales, half: Half, thread: Int32) -> list[Float32]:
        """Return the scales of a step's runs, whose key lies in this half of the tile. own: of this lane. All lanes."""
        if not step.quantised:
            return []
        word, byte = divmod(step.scale_source, 4)
        lane = source_lane(thread, half)
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
class Bf16Products:
    """Values times powers of two in bf16."""

    config: SparseDecodeConfig

    words = CHUNK // 4
    shares = False

    def ready(self, own: Scales, thread: Int32) -> Scales:
        """Return the scales as they go round: of either half of the boxes, as bf16."""
        shift = scale_share(thread) * 8
        return tuple(powers_of_two((word >> shift) & PAIR_CODES) for word in own)

    def of_step(self, step: Step, own: Scales, half: Half, thread: Int32) -> list[Int32]:
        """Return the scales of a step's runs, twice in a word. All lanes."""
        lane = source_lane(thread, half) + thread % LANES_PER_KEY // (LANES_PER_KEY // HALVES) * LOOKED_UP
        pair = cute.arch.shuffle_sync(own[step.scale_source // 4], lane)
        return [cute.arch.prmt(pair, pair, Int32(halves)) for halves in (FIRST_HALVES, SECOND_HALVES)]

    def dequantise(self, words: cute.Tensor, scale: Int32) -> cute.Tensor:
        """Return 16 e4m3 values in 4 words times a scale, in 8 words."""
        products = widen(words, BFloat16)
        for i in range(2 * self.words):
            products[i] = cute.arch.inline_ptx(
                "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[products[i], scale]
            )
        return products


Conversion = Any  # ScaleProducts or Bf16Products


def conversion_of(config: SparseDecodeConfig, dtype: type[cutlass.Numeric]) -> Conversion:
    """Return the conversion of a variant's e4m3 columns."""
    cache = config.format
    return Bf16Products(config) if cache.scale == "e8m0" and cache.scales_inside else ScaleProducts(config, dtype)


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
