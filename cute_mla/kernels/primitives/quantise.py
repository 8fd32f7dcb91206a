"""Quantisation to e4m3 with a scale for neighbouring lanes."""

from __future__ import annotations

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute

from ...spec.cache_rows import E4M3_MAX
from .elements import pack_word
from .key_rows import MANTISSA_BITS, registers
from .registers import as_bits

MAGNITUDE = 0x7FFFFFFF
EXPONENT_OF_ONE_TWICE = 254  # exponents of a power of two and of its reciprocal add up to it


def largest(values: list[Float32], lanes: int) -> Int32:
    """Return the bits of the largest magnitude in so many neighbouring lanes."""
    found = as_bits(values[0]) & MAGNITUDE
    for value in values[1:]:
        found = cutlass.max(found, as_bits(value) & MAGNITUDE)
    step = 1
    while step < lanes:
        found = cutlass.max(found, cute.arch.shuffle_sync_bfly(found, step))
        step *= 2
    return found


def exponent_above(amax: Float32, least: float) -> Int32:
    """Return the biased exponent of the least power of two that is below neither amax / 448 nor `least`."""
    bits = as_bits(cute.arch.fmax(amax / Float32(E4M3_MAX), Float32(least)))
    return (bits + ((1 << MANTISSA_BITS) - 1)) >> MANTISSA_BITS


def codes(values: list[Float32]) -> cute.Tensor:
    """Round values to e4m3, four in a word."""
    words = registers(len(values) // 4)
    for i in range(cute.size(words)):
        words[i] = pack_word(values[4 * i : 4 * i + 4], Float8E4M3FN)
    return words
