"""Elements of 8 and 16 bits: packed into words, and loaded from and stored to rows."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Uint16, Uint32, cute


def aligned(pointer: cute.Pointer, nbytes: int) -> cute.Pointer:
    """Return the address as a pointer known to be a multiple of nbytes, for vector accesses."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=nbytes)


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


def load_word(source: cute.Pointer) -> Int32:
    """Load the elements of 4 bytes of gmem, at a multiple of 4 bytes."""
    return cute.recast_ptr(source, dtype=Int32).load()


def load_pair(source: cute.Pointer) -> Int32:
    """Load two neighbouring 16-bit elements of gmem, which may begin at any of them."""
    halves = cute.recast_ptr(source, dtype=Uint16)
    return Int32(Uint32(halves.load()) | (Uint32((halves + 1).load()) << 16))


def store_word(target: cute.Pointer, word: Int32) -> None:
    """Write the elements of 4 bytes to gmem, at a multiple of 4 bytes."""
    cute.recast_ptr(target, dtype=Int32).store(word)


def store_pair(target: cute.Pointer, word: Int32) -> None:
    """Write two neighbouring 16-bit elements to gmem, which may begin at any of them."""
    halves = cute.recast_ptr(target, dtype=Uint16)
    halves.store(Uint16(word & 0xFFFF))
    (halves + 1).store(Uint16((word >> 16) & 0xFFFF))


def store_words(target: cute.Pointer, words: list[Int32]) -> None:
    """Write 16 bytes to a multiple of 16 bytes."""
    registers = cute.make_rmem_tensor(cute.make_layout(len(words)), Int32)
    for i, word in enumerate(words):
        registers[i] = word
    cute.autovec_copy(registers, cute.make_tensor(aligned(cute.recast_ptr(target, dtype=Int32), 16), cute.make_layout(len(words))))


def store_row(target: cute.Pointer, values: list[Float32], dtype: type[cutlass.Numeric], vectors: bool = True) -> None:
    """Write contiguous 16-bit elements to gmem, a multiple of 8, at a multiple of 16 bytes if `vectors`."""
    store_packed_row(target, [pack_pair(values[i], values[i + 1], dtype) for i in range(0, len(values), 2)], vectors)


def store_packed_row(target: cute.Pointer, words: list[Int32], vectors: bool = True) -> None:
    """Write contiguous pairs of 16-bit elements to gmem, a multiple of 4 pairs, at a multiple of 16 bytes if `vectors`."""
    for first in range(0, len(words), 4):
        if vectors:
            store_words(target + 2 * first, words[first : first + 4])
        else:
            for i in range(first, first + 4):
                store_pair(target + 2 * i, words[i])
