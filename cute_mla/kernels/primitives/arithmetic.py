"""Arithmetic in registers: integers without branches, narrow floats and their scales, sums over lanes."""

from __future__ import annotations

import struct
from typing import Any

import cutlass
from cutlass import Float8E4M3FN, Float32, Int16, Int32, Int64, cute

INFINITE = 0x7F800000  # fp32 bits; magnitudes from here on are not finite
NAN = 0x7FC00000
MANTISSA_BITS = 23
E8M0_NAN = 255
_E8M0_SMALLEST = 1 << 22  # bits of 2^-127, which is subnormal
E2M1_SCALE = 64.0  # an e2m1 value is this times the e4m3 value that has its bits
_SIGNS, _MAGNITUDES = 0x80808080 - (1 << 32), 0x1C1C1C1C  # of four e4m3 values
_FIRST_FOUR, _LAST_FOUR = 0x5140, 0x7362  # bytes of a pair of words, as prmt counts them
UPPER_HALVES = 0x7632  # bytes of a pair of words, as prmt counts them
PAIR_BITS = 16  # of two e4m3 values
_MANTISSA = (1 << MANTISSA_BITS) - 1
_MOST_SIGNIFICAND, _MOST_EXPONENT = 0x600000, 8  # 448 is 1.75 * 2^8; the mantissa bits of 1.75
_TINY, _LARGER = 2.0**-60, 2.0**96  # below the former, the latter keeps what division by steps needs from being subnormal
MAGNITUDE = 0x7FFFFFFF
EXPONENT_OF_ONE_TWICE = 254  # exponents of a power of two and of its reciprocal add up to it


def smaller(a: Int32, b: Int32) -> Int32:
    """Return the lesser of two integers."""
    return cutlass.select_(a < b, a, b)


def larger(a: Int32, b: Int32) -> Int32:
    """Return the greater of two integers."""
    return cutlass.select_(a > b, a, b)


def clip(value: Int32, most: Int32) -> Int32:
    """Return the nearest integer from 0 to `most`, or `most` if that is negative."""
    return smaller(larger(value, Int32(0)), most)


def pin_register(value: Int32) -> Int32:
    """Return the value through an opaque move, which stops ptxas from rematerialising a thread-invariant value at every use."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(value)])


def computed_with(value: Int32, varying: Int32) -> Int32:
    """Return the first value through moves that take both: what follows from it is not computed before `varying` is, out of a loop."""
    moves = "mov.b32 {$w0}, {$r1}; mov.b32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(moves, write_only_types=[Int32], read_only_args=[Int32(value), Int32(varying)])


def pin_address(value: Int64) -> Int64:
    """Return the value through an opaque move, which stops the compiler from computing it later than here."""
    return cute.arch.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[value])


def as_float(bits: Int32) -> Float32:
    """Return the fp32 number of these bits."""
    word = cute.make_rmem_tensor(cute.make_layout(1), Int32)
    word[0] = bits
    return cute.recast_tensor(word, Float32)[0]


def as_bits(value: Float32) -> Int32:
    """Return the bits of an fp32 number."""
    word = cute.make_rmem_tensor(cute.make_layout(1), Float32)
    word[0] = value
    return cute.recast_tensor(word, Int32)[0]


def e8m0_scale(code: Int32) -> Float32:
    """Return 2^(code - 127), NaN for 255."""
    power = cutlass.select_(code == 0, Int32(_E8M0_SMALLEST), code << MANTISSA_BITS)
    return as_float(cutlass.select_(code == E8M0_NAN, Int32(NAN), power))


def unpack_bf16(word: Int32) -> tuple[Float32, Float32]:
    """Return the two bf16 numbers of a word. By shifts: behind a conversion ptxas may choose additions of mixed types on Blackwell."""
    return as_float(word << 16), as_float(word & -(1 << 16))


def inclusive_sum(value: Any, lane: Int32, dtype: type[cutlass.Integer]) -> Any:
    """Return the sum over the lanes up to this one, of values of a type. All lanes."""
    for level in range(cute.arch.WARP_SIZE.bit_length() - 1):
        below = cute.arch.shuffle_sync_up(value, 1 << level)
        value = value + cutlass.select_(lane >= 1 << level, below, dtype(0))
    return value


def from_lane(value: Int64, lane: Int32) -> Int64:
    """Return a lane's 64-bit number."""
    low = cute.arch.shuffle_sync(Int32(value & 0xFFFFFFFF), lane)
    high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def pack_pair(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Round two fp32 values to a pair of 16-bit elements."""
    return pack_word([low, high], dtype)


def pack_word(values: list[Float32], dtype: type[cutlass.Numeric]) -> Int32:
    """Round as many fp32 values as make a word to nearest even; e4m3 saturates."""
    exact = cute.make_rmem_tensor(cute.make_layout(len(values)), Float32)
    for i, value in enumerate(values):
        exact[i] = value
    rounded = cute.make_rmem_tensor(cute.make_layout(len(values)), dtype)
    rounded.store(exact.load().to(dtype))
    return cute.recast_tensor(rounded, Int32)[0]


def multiply_pairs(left: Int32, right: Int32) -> Int32:
    """Multiply two pairs of bf16."""
    return cute.arch.inline_ptx("mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[left, right])


def registers(words: int) -> cute.Tensor:
    """Return the registers for a lane's words."""
    return cute.make_rmem_tensor(cute.make_layout(words), Int32)


def e4m3_of_e2m1(codes: Int32) -> tuple[Int32, Int32]:
    """Convert 8 e2m1 values of a word, the even one in the lower half of a byte, to e4m3 values that are E2M1_SCALE times smaller."""
    even = ((codes << 4) & _SIGNS) | ((codes << 2) & _MAGNITUDES)
    odd = (codes & _SIGNS) | ((codes >> 2) & _MAGNITUDES)
    return cute.arch.prmt(even, odd, _FIRST_FOUR), cute.arch.prmt(even, odd, _LAST_FOUR)


def widen(words: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Convert e4m3 values, four in a word, to twice as many words of 16-bit elements, on any architecture.

    An instruction converts two to fp16. There is none to bf16: bf16 is the upper half of the fp32 number, whose lower half is 0,
    so a byte permutation joins two where a conversion would round.
    """
    quantised = cute.recast_tensor(words, cutlass.Float8E4M3FN).load()
    count = 2 * cute.size(words)
    if dtype is cutlass.Float16:
        halves = cute.make_rmem_tensor(cute.make_layout(2 * count), dtype)
        halves.store(quantised.to(dtype))
        return cute.recast_tensor(halves, Int32)
    floats = cute.make_rmem_tensor(cute.make_layout(2 * count), Float32)
    floats.store(quantised.to(Float32))
    bits = cute.recast_tensor(floats, Int32)
    joined = cute.make_rmem_tensor(cute.make_layout(count), Int32)
    for i in range(count):
        joined[i] = cute.arch.prmt(bits[2 * i], bits[2 * i + 1], UPPER_HALVES)
    return joined


def widen_in_pairs(words: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Convert as widen does, where bf16 has an instruction that converts two, as on Blackwell."""
    if dtype is cutlass.Float16:
        return widen(words, dtype)
    count = 2 * cute.size(words)
    pairs = cute.make_rmem_tensor(cute.make_layout(count), Int32)
    for i in range(count):
        pairs[i] = bf16_of_e4m3(words[i // 2] >> (i % 2 * PAIR_BITS))
    return pairs


def bf16_of_e4m3(pair: Int32) -> Int32:
    """Convert the lower two e4m3 values of a word to a pair of bf16, on Blackwell."""
    # the DSL's own wrapper asks for .satfinite, which nobody says what it makes of NaN
    pair = Int16(pair & 0xFFFF)
    return cute.arch.inline_ptx("cvt.rn.bf16x2.e4m3x2 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[pair])


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


def product(a: Float32, b: Float32) -> Float32:
    """Multiply, rounded even where a sum follows: its rounding is named, so ptxas makes no fma of both."""
    return cute.arch.inline_ptx("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def square_root(value: Float32) -> Float32:
    """Return the square root, rounded to nearest."""
    return cute.arch.inline_ptx("sqrt.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def neighbour_sum(values: list[Float32]) -> Float32:
    """Add up as many values as a power of two: neighbours, then neighbouring sums, and so on."""
    while len(values) > 1:
        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    return values[0]


def lane_sum(value: Float32, lanes: int) -> Float32:
    """Return the sum over so many neighbouring lanes, added up as neighbour_sum does. All lanes."""
    step = 1
    while step < lanes:
        value = value + cute.arch.shuffle_sync_bfly(value, step)
        step *= 2
    return value


def signed(value: Float32, negative: Int32) -> Float32:
    """Return the value, or -value where `negative` is not 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .f32 n; neg.f32 n, {$r0}; setp.ne.s32 p, {$r1}, 0; selp.f32 {$w0}, n, {$r0}, p; }",
        write_only_types=[Float32],
        read_only_args=[value, negative],
    )
