"""Zeroes over rows of a tile that no key fills."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ..attention.scheduler import BOX_COLUMNS
from ..primitives.rows import aligned
from .warpgroups import WARPGROUP


@cute.jit
def clear_rows(
    tiles: cute.Tensor, stage: Int32, first_row: Int32, thread: Int32, threads: int = WARPGROUP, hole: tuple[Int32, Int32] | None = None
):
    """Zero the rows from first_row on of a stage of (rows, columns, stages). Whole 128-byte rows, so the swizzle does not matter.

    thread: one of `threads`, a multiple of 8. hole: further rows, begin and end.
    """
    rows, columns = cute.size(tiles, mode=[0]), cute.size(tiles, mode=[1])
    chunk_elements = 8  # 16 bytes
    chunks_per_row = BOX_COLUMNS // chunk_elements
    rows_per_pass = threads // chunks_per_row
    zeros = cute.make_rmem_tensor(cute.make_layout(chunk_elements), tiles.element_type)
    zeros.fill(0.0)
    base = tiles.iterator + stage * (rows * columns)
    for box in cutlass.range_constexpr(columns // BOX_COLUMNS):
        for step in cutlass.range_constexpr(rows // rows_per_pass):
            row = step * rows_per_pass + thread // chunks_per_row
            unused = row >= first_row
            if cutlass.const_expr(hole is not None):
                unused = unused | ((row >= hole[0]) & (row < hole[1]))  # type: ignore[index]  # not None here
            if unused:
                offset = (box * rows + row) * BOX_COLUMNS + thread % chunks_per_row * chunk_elements
                cute.autovec_copy(zeros, cute.make_tensor(aligned(base + offset, 16), cute.make_layout(chunk_elements)))
