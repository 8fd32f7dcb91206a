"""Mask of dense decode on SM100: the keys that a query row sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.tiles import first_query_row
from ..sm100.boxes import clear_rows
from ..sm100.score import ScoreRows
from .operands import Operands


@dataclass(frozen=True)
class LengthMask:
    """Mask of keys past the end, and of causally hidden ones.

    clears_unused: whether keys come with whatever lies behind the last one; else they are zeros there.
    """

    clears_unused: bool

    @cute.jit
    def apply(self, operands: Operands, pipes: Any, rows: ScoreRows, left: Int32, tile: Int32):
        """Set scores of keys that a row does not see to -inf, in a tile `left` keys before the end."""
        if operands.least_limit(left) < TILE_KEYS:
            rows.mask(operands.key_limit(left, first_query_row() + rows.row))

    def clear_values(self, rows: ScoreRows, stage: Int32, left: Int32) -> None:
        """Zero the rows behind the last key: P is 0 there, but 0 times a NaN of an unused row is NaN."""
        if self.clears_unused:
            _clear_unused(rows, stage, left)


@cute.jit
def _clear_unused(rows: ScoreRows, stage: Int32, left: Int32):
    if left < TILE_KEYS:
        clear_rows(rows.tiles.stage(stage), rows.tiles.geometry.latent_boxes, left, rows.half * TILE_ROWS + rows.row)
