"""Integers without branches."""

from __future__ import annotations

import cutlass
from cutlass import Int32


def smaller(a: Int32, b: Int32) -> Int32:
    """Return the lesser of two integers."""
    return cutlass.select_(a < b, a, b)


def larger(a: Int32, b: Int32) -> Int32:
    """Return the greater of two integers."""
    return cutlass.select_(a > b, a, b)


def clip(value: Int32, most: Int32) -> Int32:
    """Return the nearest integer from 0 to `most`, or `most` if that is negative."""
    return smaller(larger(value, Int32(0)), most)
