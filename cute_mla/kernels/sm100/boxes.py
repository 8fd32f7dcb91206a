"""Boxes of 64 rows x 128 swizzled bytes in shared memory, one behind the other, that threads of the SM100 kernels write."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ..attention.tiles import BOX_COLUMNS, ELEMENT_BYTES
from ..primitives.fragments import store_words

BOX_ROWS = 64
ROW_BYTES = BOX_COLUMNS * ELEMENT_BYTES
PIECE = 16  # bytes of one access
PIECES_PER_ROW = ROW_BYTES // PIECE
THREADS = 128


@cute.jit
def clear_rows(first_box: cute.Pointer, boxes: int, first_row: Int32, thread: Int32):
    """Zeroes rows first_row .. 63 of boxes. Whole rows, so the swizzle does not matter. 128 threads."""
    rows_per_pass = THREADS // PIECES_PER_ROW
    for box in cutlass.range_constexpr(boxes):
        for step in cutlass.range_constexpr(BOX_ROWS // rows_per_pass):
            row = step * rows_per_pass + thread // PIECES_PER_ROW
            if row >= first_row:
                place = box * (BOX_ROWS * ROW_BYTES) + row * ROW_BYTES + thread % PIECES_PER_ROW * PIECE
                store_words(first_box + place, [Int32(0)] * 4)
