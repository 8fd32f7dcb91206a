"""Arithmetic over a row that lanes share, in a fixed order and with every operation rounded, so that torch can repeat its bits."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from .key_rows import NAN, load_words, registers
from .registers import as_float

FLOAT_BYTES = 4


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


@cute.jit
def load_floats(target: cute.Tensor, address: Int64, wanted: Boolean):
    """Load fp32 numbers, four at a time, from a multiple of 16 bytes, or a single one; NaN, and no access, unless wanted."""
    each = min(cute.size(target), 4)
    for first in cutlass.range_constexpr(0, cute.size(target), each):
        words = registers(each)
        load_words(words, address + first * FLOAT_BYTES, wanted, NAN)
        for i in cutlass.range_constexpr(each):
            target[first + i] = as_float(words[i])


def signed(value: Float32, negative: Int32) -> Float32:
    """Return the value, or -value where `negative` is not 0."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p; .reg .f32 n; neg.f32 n, {$r0}; setp.ne.s32 p, {$r1}, 0; selp.f32 {$w0}, n, {$r0}, p; }",
        write_only_types=[Float32],
        read_only_args=[value, negative],
    )
