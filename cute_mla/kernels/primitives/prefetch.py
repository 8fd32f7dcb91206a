"""Lines of memory asked of L2, of which nothing is read."""

from __future__ import annotations

from cutlass import cute
from cutlass.experimental import primitives

LINE_BYTES = 128


def prefetch_line(pointer: cute.Pointer) -> None:
    """Ask L2 for the line of an address in gmem."""
    primitives.prefetch_l2(pointer.raw_ptr())
