"""Arithmetic over a row that lanes share, in a fixed order and with every operation rounded, so that torch can repeat its bits."""

from __future__ import annotations

from cutlass import Float32, Int32, cute


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
