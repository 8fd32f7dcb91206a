"""Which keys a query row of dense decode sees on SM100, and what its output is multiplied with."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.tiles import first_query_row
from ..definition import KernelDefinition
from ..sm100.roles import PairDecode
from ..sm100.score_rows import ScoreRows
from .entry import DenseDecode
from .operands import Operands


class DenseRowsSm100(PairDecode, DenseDecode):
    """Those parts of the score role."""

    @cute.jit
    def mask(self, operands: Operands, pipes: Any, rows: ScoreRows, left: Int32, tile: Int32):
        """Sets scores of keys that a row does not see to -inf, in a tile `left` keys before the end."""
        if operands.least_limit(left) < TILE_KEYS:
            rows.mask(operands.key_limit(left, first_query_row() + rows.row))

    def weigh_row(self, operands: Operands, rows: ScoreRows, req: Int32, begin_tile: Int32, total: Float32) -> Float32:
        """1 / row sum, and the scale of the values."""
        return operands.row_weight(self.config.operands, total)

    def variant(self) -> KernelDefinition:
        """Ready to compile."""
        raise NotImplementedError
