"""Places of rows of O, as numbers that the score role hands to the output role beside their factors."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64

from ..attention.lengths import RowRange
from ..attention.scheduler import WorkTile

IS_SPLIT = 1  # added to the address of a row of the split accumulators: all addresses are even


def target_of(operands: Any, stored: RowRange, work_tile: WorkTile, row: Int32, d_v: int) -> Int64:
    """Return the address of a row of out, that of a row of the split accumulators plus IS_SPLIT, or 0 for a row that does not exist.

    operands: LatentOperands where requests may be split.
    """
    target = stored.out_row(row).toint()
    if not work_tile.always_direct:
        accum = operands.out_accum + operands.accum_row(work_tile, row) * d_v
        target = cutlass.select_(work_tile.direct, target, accum.toint() + IS_SPLIT)
    return cutlass.select_(stored.holds(row), target, Int64(0))
