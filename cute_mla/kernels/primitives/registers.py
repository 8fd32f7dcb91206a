"""Registers of a thread: pinned values, bits of fp32 numbers, the share of a warpgroup."""

from __future__ import annotations

from cutlass import Float32, Int32, Int64, cute


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
