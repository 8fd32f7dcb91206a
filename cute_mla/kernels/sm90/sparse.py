"""The SM90 kernels whose keys are named by indices: a warpgroup gathers them, score masks those that are not there, and every
head may have a sink."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import with_sink
from ..attention.split_kv_scheduler import Piece
from ..primitives.fragments import flat, fragment_column
from .config import TilePlace, Tiles
from .gathered import GatheredRolesSm90
from .gemm import ScoreGemm

ALL_VALID = -1


class SparseRolesSm90(GatheredRolesSm90):
    """All roles but gather. Every row of a CTA sees the same keys; operands have attn_sink, fp32 [rows] or null."""

    @cute.jit
    def mask(self, operands: Any, tiles: Tiles, gemm: ScoreGemm, place: TilePlace, left: Int32):
        """Keys that are not there."""
        low, high = self.valid_words(tiles, place.rope.slot)
        if (low & high) != ALL_VALID:
            mask_absent(gemm.scores, gemm.thread, low, high)

    def weigh_row(self, operands: Any, piece: Piece, row: Int32, total: Float32, reference: Float32) -> Float32:
        """1 / (row sum + weight of the sink), which is added where this piece writes the output."""
        return 1.0 / with_sink(operands, piece, row, total, reference)


def mask_absent(scores: cute.Tensor, thread: Int32, low: Int32, high: Int32) -> None:
    """Sets the scores of keys 0..31, 32..63 whose bit is 0 to -inf. Selects, so that NaN vanishes."""
    rS = flat(scores)
    halves = (low >> fragment_column(thread, 0), high >> fragment_column(thread, 0))
    for i in range(cute.size(rS)):
        half_of_tile, bit = divmod(fragment_column(0, i), TILE_KEYS // 2)
        absent = (halves[half_of_tile] & Int32(1 << bit)) == 0
        rS[i] = cutlass.select_(absent, -Float32.inf, rS[i])
