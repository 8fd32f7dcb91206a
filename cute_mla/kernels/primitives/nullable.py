"""Loads through pointers that may be null at run time."""

from __future__ import annotations

from cutlass import Float32, Int32, cute


@cute.jit
def load_or(table: cute.Pointer, index: Int32, default: Int32) -> Int32:
    """Return an int32 entry of a table; `default`, and no access, for a null table."""
    value = default
    if table.toint() != 0:
        value = (table + index).load()
    return value


@cute.jit
def load_or_one(pointer: cute.Pointer) -> Float32:
    """Return the fp32 number at an address; 1, and no access, for a null pointer."""
    value = Float32(1)
    if pointer.toint() != 0:
        value = pointer.load()
    return value
