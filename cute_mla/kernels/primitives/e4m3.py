"""e4m3 values as 16-bit elements, exactly: every e4m3 number is one of both 16-bit types. NaN stays NaN."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int16, Int32, cute

UPPER_HALVES = 0x7632  # bytes of a pair of words, as prmt counts them
PAIR_BITS = 16  # of two e4m3 values


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
