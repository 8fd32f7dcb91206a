"""Boxes of 64 rows x 128 swizzled bytes in shared memory, one behind the other, that threads of the SM100 kernels write."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ...spec.mla import ELEMENT_BYTES
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.rows import store_vector

BOX_ROWS = 64
ROW_BYTES = BOX_COLUMNS * ELEMENT_BYTES
CHUNK = 16  # bytes of one access
CHUNKS_PER_ROW = ROW_BYTES // CHUNK
THREADS = 128


@cute.jit
def clear_rows(first_box: cute.Pointer, boxes: int, first_row: Int32, thread: Int32, hole: tuple[Int32, Int32] | None = None):
    """Zero rows first_row .. 63 of boxes. Whole rows, so the swizzle does not matter. 128 threads. hole: further rows, begin and end."""
    rows_per_pass = THREADS // CHUNKS_PER_ROW
    for box in cutlass.range_constexpr(boxes):
        for step in cutlass.range_constexpr(BOX_ROWS // rows_per_pass):
            row = step * rows_per_pass + thread // CHUNKS_PER_ROW
            unused = row >= first_row
            if cutlass.const_expr(hole is not None):
                unused = unused | ((row >= hole[0]) & (row < hole[1]))  # type: ignore[index]  # not None here
            if unused:
                place = box * (BOX_ROWS * ROW_BYTES) + row * ROW_BYTES + thread % CHUNKS_PER_ROW * CHUNK
                store_vector(first_box + place, [Int32(0)] * 4)
