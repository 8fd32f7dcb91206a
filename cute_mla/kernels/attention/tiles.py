"""Sizes and positions that the tiles of every kernel over a latent share."""

from __future__ import annotations

from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS

BOX_COLUMNS = 64  # 16-bit columns of a 128-byte swizzled box


def first_query_row() -> Int32:
    """Return the first row of this CTA, among all rows that its CTAs share out along x."""
    return cute.arch.block_idx()[0] * TILE_ROWS
