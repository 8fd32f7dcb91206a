"""What the SM90 kernels of dense decode have in common, whatever their operands."""

from __future__ import annotations

from cutlass import Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import OnlineSoftmax, mask_keys
from ..attention.split_kv_scheduler import Piece
from ..definition import KernelDefinition
from ..primitives.pipeline import barrier_table
from ..sm90.config import TilePlace, Tiles
from ..sm90.gemm import ScoreGemm
from ..sm90.roles import RolesSm90, named_barriers, query_row, role_table
from .entry import DenseDecode
from .operands import Operands


class DenseRowsSm90(RolesSm90, DenseDecode):
    """Which keys a query row sees, what its output is multiplied with, and what the build needs to know. first_role: what the
    first warpgroup is called."""

    first_role: str

    def softmax(self, operands: Operands) -> OnlineSoftmax:
        """Of products with their scales."""
        return super().softmax(operands.with_descales(self.config.operands))

    @cute.jit
    def mask(self, operands: Operands, tiles: Tiles, gemm: ScoreGemm, place: TilePlace, left: Int32):
        """Keys past the end, and causally hidden ones."""
        if operands.least_limit(left) < TILE_KEYS:
            limits = [operands.key_limit(left, query_row(gemm.thread, row_half)) for row_half in (0, 1)]
            mask_keys(gemm.scores, gemm.thread, limits)

    def weigh_row(self, operands: Operands, piece: Piece, row: Int32, total: Float32, reference: Float32) -> Float32:
        """1 / row sum, and the scale of the values."""
        return operands.row_weight(self.config.operands, total)

    def variant(self) -> KernelDefinition:
        """Ready to compile."""
        geometry = self.geometry
        return self.source(
            smem_bytes=geometry.smem_bytes,
            barriers=barrier_table(geometry.barrier_offset, geometry.barriers),
            named_barriers=named_barriers(),
            roles=role_table(self.first_role),
            expected={"HGMMA": geometry.wgmma_per_tile},
        )
