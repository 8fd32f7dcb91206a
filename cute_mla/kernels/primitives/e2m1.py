"""e2m1 values as e4m3 ones, exactly but for a power of two: their two bits of exponent and one of mantissa are the lowest of e4m3's."""

from __future__ import annotations

from cutlass import Int32, cute

E2M1_SCALE = 64.0  # an e2m1 value is this times the e4m3 value that has its bits
_SIGNS, _MAGNITUDES = 0x80808080 - (1 << 32), 0x1C1C1C1C  # of four e4m3 values
_FIRST_FOUR, _LAST_FOUR = 0x5140, 0x7362  # bytes of a pair of words, as prmt counts them


def e4m3_of_e2m1(codes: Int32) -> tuple[Int32, Int32]:
    """Convert 8 e2m1 values of a word, the even one in the lower half of a byte, to e4m3 values that are E2M1_SCALE times smaller."""
    even = ((codes << 4) & _SIGNS) | ((codes << 2) & _MAGNITUDES)
    odd = (codes & _SIGNS) | ((codes >> 2) & _MAGNITUDES)
    return cute.arch.prmt(even, odd, _FIRST_FOUR), cute.arch.prmt(even, odd, _LAST_FOUR)
