"""Integers that a caller may pass in either of two widths."""

from __future__ import annotations

from cutlass import Int32, Int64, cute
from cutlass.cute.typing import AddressSpace


@cute.jit
def load_integer(array: cute.Pointer, place: Int64, wide: Int32) -> Int64:
    """Load an element of an array of int64, if wide, or int32."""
    value = Int64(0)
    if wide != 0:
        value = cute.make_ptr(Int64, array.toint() + place * 8, AddressSpace.gmem, assumed_align=8).load()
    else:
        value = Int64((array + place).load())
    return value
