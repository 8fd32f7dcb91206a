"""The score role of sparse prefill on Blackwell, and what it leaves to the output role: the results of a row beside O.

A token's softmax ends with dependent steps, of which the score role would do 800 clocks between two tokens, while the output role waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ..attention.softmax import LN2, SinkScale
from ..attention.tiles import first_query_row
from ..primitives.smem import Array, Field
from ..sm100.indexed_keys import IndexedPipes
from ..sm100.score import ScoreRole, ScoreRows
from .operands import Operands

SHARES, REFERENCE, MAXIMUM, ROW_STATES = 0, 2, 3, 4  # of a row's threads, then of the row


@dataclass(frozen=True)
class TokenPipes(IndexedPipes):
    """The barriers of indexed keys, and what the softmax of a token has come to."""

    sRows: cute.Pointer  # fp32 (4, 64 rows): two shares of the row sum, the reference in log2 units, the greatest score, unscaled

    @staticmethod
    def fields() -> tuple[Field, ...]:
        """Return the fields of shared memory behind those of the shared roles."""
        return *IndexedPipes.fields(), Array("sRows", Float32, ROW_STATES * TILE_ROWS)


@dataclass(frozen=True)
class TokenScoreRole(ScoreRole):
    """Four warps."""

    def publish(self, operands: Operands, pipes: TokenPipes, rows: ScoreRows, req: Int32, begin_tile: Int32) -> Float32:
        """Hand what a token's softmax has come to to the output role. Return the thread's share of the row sum."""
        (pipes.sRows + ((SHARES + rows.half) * TILE_ROWS + rows.row)).store(rows.rSum[0])
        # both threads of a row have the same
        (pipes.sRows + (REFERENCE * TILE_ROWS + rows.row)).store(rows.row_ref[0])
        (pipes.sRows + (MAXIMUM * TILE_ROWS + rows.row)).store(rows.row_max[0])
        return rows.rSum[0]

    def store_lse(self, *_: object) -> None:
        """Do nothing: the output role does."""


@dataclass(frozen=True)
class RowResult:
    """Results of the softmax of a token in one row. total: sum of the exponentials, 0 iff the row attends to nothing."""

    total: Float32
    reference: Float32
    maximum: Float32

    @staticmethod
    def take(pipes: TokenPipes, thread: Int32) -> RowResult:
        """Read a thread's row."""
        row = pipes.sRows + thread % TILE_ROWS
        total = (row + SHARES * TILE_ROWS).load() + (row + (SHARES + 1) * TILE_ROWS).load()
        return RowResult(total, (row + REFERENCE * TILE_ROWS).load(), (row + MAXIMUM * TILE_ROWS).load())

    def weight(self, operands: Any, token: Int32, thread: Int32) -> Float32:
        """Return the factor of the row of O, 0 for a row that attends to nothing."""
        row = first_query_row() + thread % TILE_ROWS
        weight = SinkScale().weight(operands, lambda: operands.schedule.work_tile(token, Int32(0)), row, self.total, self.reference)
        return cutlass.select_(self.total == 0.0, Float32(0), weight)

    @cute.jit
    def store(self, operands: Operands, token: Int32, thread: Int32):
        """Store lse and the greatest logit, natural units; one of a row's two threads each."""
        row = first_query_row() + thread % TILE_ROWS
        empty = self.total == 0.0
        if row < operands.rows():
            if thread < TILE_ROWS:
                lse = (self.reference + cute.math.log2(self.total, fastmath=True)) * LN2
                operands.lse_of(token, row).store(cutlass.select_(empty, operands.empty_lse, lse))
            else:
                logit = self.maximum * (operands.scale_log2 * LN2)
                operands.max_logit_of(token, row).store(cutlass.select_(empty, -Float32.inf, logit))
