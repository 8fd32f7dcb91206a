"""Quantisation to e4m3 with a scale for neighbouring lanes."""

from __future__ import annotations

import struct

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute

from .elements import pack_word
from .key_rows import MANTISSA_BITS, registers
from .registers import as_bits

_MANTISSA = (1 << MANTISSA_BITS) - 1
_MOST_SIGNIFICAND, _MOST_EXPONENT = 0x600000, 8  # 448 is 1.75 * 2^8; the mantissa bits of 1.75
_TINY, _LARGER = 2.0**-60, 2.0**96  # below the former, the latter keeps what division by steps needs from being subnormal
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


def exponent_above(amax: Int32, least: float) -> Int32:
    """Return the biased exponent of the least power of two that is below neither amax / 448, rounded to fp32, nor `least`.

    amax: bits of a magnitude; of one that is not finite the result means nothing. By integers: the quotient rounds to a power of two only
    where it is one, since 1.75 and its neighbour differ by more than half a unit in the last place of their quotients by 1.75.
    """
    exponent = ((amax + (_MANTISSA - _MOST_SIGNIFICAND)) >> MANTISSA_BITS) - _MOST_EXPONENT
    smallest = (int.from_bytes(struct.pack("<f", least), "little") + _MANTISSA) >> MANTISSA_BITS
    return cutlass.max(exponent, Int32(smallest))


def quotients(values: list[Float32], divisor: Float32) -> list[Float32]:
    """Divide by one number from 0 on that is at least 1 / 448 of their largest magnitude; NaN by NaN.

    The results have the e4m3 codes of IEEE quotients: those of at least 2^-11 are these quotients, others round to 0 with the same sign.
    A quotient is refined twice by its remainder, with the reciprocal rounded to nearest (Markstein, IBM Journal of Research and
    Development 34, 1990): no step overflows, and remainders are exact.
    """
    factor = cutlass.select_(divisor < Float32(_TINY), Float32(_LARGER), Float32(1.0))
    divisor = divisor * factor
    reciprocal = Float32(1.0) / divisor
    found = []
    for value in values:
        dividend = value * factor
        quotient = dividend * reciprocal
        for _ in range(2):
            excess = fma(quotient, divisor, -dividend)  # its sign keeps -0 as it is
            quotient = fma(excess, -reciprocal, quotient)
        found.append(quotient)
    return found


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """Return a * b + c, rounded once."""
    return cute.arch.inline_ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c])


def codes(values: list[Float32]) -> cute.Tensor:
    """Round values to e4m3, four in a word."""
    words = registers(len(values) // 4)
    for i in range(cute.size(words)):
        words[i] = pack_word(values[4 * i : 4 * i + 4], Float8E4M3FN)
    return words
