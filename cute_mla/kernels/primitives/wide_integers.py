"""Integers that a caller may pass in either of two widths."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass.cute.typing import AddressSpace


class Loaded(NamedTuple):
    """An integer on its way: its words, of which the high one means nothing unless `wide`. value() waits for both."""

    low: Int32
    high: Int32
    wide: Int32

    def value(self) -> Int64:
        """Return the integer."""
        high = cutlass.select_(self.wide != 0, self.high, self.low >> 31)
        return (Int64(high) << 32) | Int64(Uint32(self.low))


@cute.jit
def _load_word(address: Int64, wanted: Boolean, otherwise: Int32) -> Int32:
    """Load a word, if wanted."""
    word = otherwise
    if wanted:
        word = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4).load()
    return word


def start_load(array: cute.Pointer, place: Int64, wide: Int32, otherwise: Int32 | None = None) -> Loaded:
    """Load an element of an array of int64, if wide, or int32. otherwise: the value where the array is null, which then is not wide.

    No branch has more than a load in it, so that what lies between this and value() does not wait.
    """
    address = array.toint() + (place << (2 + wide))
    low = _load_word(address, array.toint() != 0, Int32(0) if otherwise is None else otherwise)
    return Loaded(low, _load_word(address + 4, wide != 0, Int32(0)), wide)


def load_integer(array: cute.Pointer, place: Int64, wide: Int32) -> Int64:
    """Load an element of an array of int64, if wide, or int32."""
    return start_load(array, place, wide).value()
