"""What every decode kernel's tiles have in common."""

from __future__ import annotations

from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS

ELEMENT_BYTES = 2
BOX_COLUMNS = 64  # 16-bit columns of a 128-byte swizzled box


def first_query_row() -> Int32:
    """The first row of this CTA, among all rows that its CTAs share out along x."""
    return cute.arch.block_idx()[0] * TILE_ROWS
