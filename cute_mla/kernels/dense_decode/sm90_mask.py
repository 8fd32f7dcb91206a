"""Mask of dense decode on SM90: the keys that a query row sees."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import mask_keys
from ..sm90.config import TileState
from ..sm90.score import TileScores, query_row
from .operands import Operands


class LengthMask:
    """Mask of keys past the end, and of causally hidden ones."""

    @cute.jit
    def apply(self, operands: Operands, tiles: Any, scores: TileScores, state: TileState, left: Int32):
        """Set the scores of keys that a row does not see to -inf, in a tile `left` keys before the end."""
        if operands.least_limit(left) < TILE_KEYS:
            limits = [operands.key_limit(left, query_row(scores.thread, row_half)) for row_half in (0, 1)]
            mask_keys(scores.scores, scores.thread, limits)
