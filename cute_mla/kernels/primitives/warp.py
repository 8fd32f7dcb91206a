"""Values of the lanes of a warp."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute


def inclusive_sum(value: Any, lane: Int32, dtype: type[cutlass.Integer]) -> Any:
    """Return the sum over the lanes up to this one, of values of a type. All lanes."""
    for level in range(cute.arch.WARP_SIZE.bit_length() - 1):
        below = cute.arch.shuffle_sync_up(value, 1 << level)
        value = value + cutlass.select_(lane >= 1 << level, below, dtype(0))
    return value
