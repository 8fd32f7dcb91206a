"""Which keys a query row of dense decode sees on SM90, and what its output is multiplied with."""

from __future__ import annotations

from cutlass import Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..parts.sm90_gemm import ScoreGemm
from ..parts.sm90_geometry import Tiles
from ..parts.sm90_roles import RolesSm90, query_row
from ..parts.softmax import mask_keys
from ..parts.work import Piece
from .entry import DenseDecode
from .operands import Operands


class DenseRowsSm90(RolesSm90, DenseDecode):
    """Those parts of the score role. first_role: what the first warpgroup is called."""

    first_role: str

    @cute.jit
    def mask(self, operands: Operands, tiles: Tiles, gemm: ScoreGemm, use: Int32, left: Int32):
        """Keys past the end, and causally hidden ones."""
        if operands.least_limit(left) < TILE_KEYS:
            limits = [operands.key_limit(left, query_row(gemm.thread, row_half)) for row_half in (0, 1)]
            mask_keys(gemm.scores, gemm.thread, limits)

    def weigh_row(self, operands: Operands, piece: Piece, row: Int32, total: Float32, reference: Float32) -> Float32:
        """1 / row sum, and the scale of the values."""
        return operands.row_weight(self.config.operands, total)
