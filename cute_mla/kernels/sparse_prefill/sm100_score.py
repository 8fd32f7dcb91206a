"""The score role of sparse prefill on Blackwell, and what it leaves to the output role: the results of a row beside O.

lse_indexer sums up the first indexer_topk keys. At the first tile with a key beyond this bound, the role works out what its state would be
with the keys before the bound alone, which waits in shared memory for the end of the token. Its logarithm has the bits that lse would have
if topk_length ended there.

A token's softmax ends with dependent steps, of which the score role would do 800 clocks between two tokens, while the output role waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile, TileRange, first_query_row
from ..attention.softmax import LN2, SinkScale, follow_maximum, shift_of
from ..primitives.arithmetic import smaller
from ..primitives.smem import Array, Field
from ..sm100.config import GROUP, HALF_KEYS
from ..sm100.indexed_keys import IndexedPipes, SeenMask
from ..sm100.score import ScoreRole, ScoreRows
from .operands import Operands

SHARES, REFERENCE, MAXIMUM, INDEXER_SHARES, INDEXER_REFERENCE, ROW_STATES = 0, 2, 3, 4, 6, 7  # shares of a row's threads, others of the row


@dataclass(frozen=True)
class TokenPipes(IndexedPipes):
    """The barriers of indexed keys, and what the softmax of a token has come to."""

    # fp32 (7, 64 rows): two shares of the row sum, the reference in log2 units, the greatest score, unscaled; before the bound of
    # lse_indexer, where that is asked for, two shares of the row sum and the reference
    sRows: cute.Pointer
    sIndexer: cute.Pointer  # fp32 (2, 128 threads): a thread's share of the row sum before the bound, and its reference

    @staticmethod
    def fields() -> tuple[Field, ...]:
        """Return the fields of shared memory behind those of the shared roles."""
        return (
            *IndexedPipes.fields(),
            Array("sRows", Float32, ROW_STATES * TILE_ROWS),
            Array("sIndexer", Float32, 2 * GROUP),
        )


class BoundedMask(SeenMask):
    """Mask of the tile that the bound of lse_indexer lies in, which sums up the keys before the bound."""

    def apply(self, operands: Operands, pipes: TokenPipes, rows: ScoreRows, keys: KeyTile, tile: Int32) -> None:
        """Set scores of keys that do not count to -inf. Keep the state of a row that would have seen the keys before the bound alone."""
        super().apply(operands, pipes, rows, keys, tile)
        keep_state(pipes, rows, *state_before(rows, operands.args.indexer_topk % TILE_KEYS))
        rows.sync_halves()  # between the two swaps of maxima


def state_before(rows: ScoreRows, limit: Int32) -> tuple[Float32, Float32]:
    """Return what a thread's share of the row sum and the reference are with the first `limit` keys of a tile.

    They have the bits that rows.advance and rows.exponentiate would give. State and scores stay.
    """
    geometry = rows.tiles.geometry
    own_limit = limit - rows.half * geometry.run_keys
    counts = [own_limit > part * geometry.part_keys + place for part, place in (divmod(i, geometry.run_keys) for i in range(HALF_KEYS))]
    best = -Float32.inf
    for i in range(HALF_KEYS):
        best = cute.arch.fmax(best, cutlass.select_(counts[i], rows.rS[i], -Float32.inf))
    best = cute.arch.fmax(best, rows.swap(best))
    reference, alpha = follow_maximum(rows.row_ref[0], best * rows.scale_log2)
    sums = (rows.rSum[0] * alpha, Float32(0))
    scale, shift = (rows.scale_log2, rows.scale_log2), (-shift_of(reference),) * 2
    for i in range(0, HALF_KEYS, 2):
        exponents = cute.arch.fma_packed_f32x2((rows.rS[i], rows.rS[i + 1]), scale, shift)
        probs = [cute.math.exp2(exponent, fastmath=True) for exponent in exponents]
        sums = cute.arch.add_packed_f32x2(sums, tuple(cutlass.select_(counts[i + j], probs[j], Float32(0)) for j in range(2)))
    return sums[0] + sums[1], reference


def keep_state(pipes: TokenPipes, rows: ScoreRows, share: Float32, reference: Float32) -> None:
    """Keep a share of a row sum and the reference, at the bound of lse_indexer, until the end of the token."""
    kept = pipes.sIndexer + (rows.half * TILE_ROWS + rows.row)
    kept.store(share)
    (kept + GROUP).store(reference)


@dataclass(frozen=True)
class TokenScoreRole(ScoreRole):
    """Four warps."""

    @cute.jit
    def score_tiles(self, operands: Operands, pipes: TokenPipes, rows: ScoreRows, tile_range: TileRange, tile: Int32):
        """Score the tiles of a token: those before the bound of lse_indexer, that tile, and those behind.

        That tile has code of its own, with which ptxas leaves the loops as they were: by the clock, branches in the one loop cost every
        tile 36 to 116 clocks.
        """
        bound = tiles_before_bound(operands, tile_range.tiles)
        for t in cutlass.range(bound, unroll=1):
            self.score_valid_tile(operands, pipes, rows, tile_range.tile(t), tile + t)
        if bound < tile_range.tiles:
            self.score_bounded_tile(operands, pipes, rows, tile_range.tile(bound), tile + bound)
        for t in cutlass.range(bound + 1, tile_range.tiles, unroll=1):
            self.score_valid_tile(operands, pipes, rows, tile_range.tile(t), tile + t)

    @cute.jit
    def score_bounded_tile(self, operands: Operands, pipes: TokenPipes, rows: ScoreRows, keys: KeyTile, tile: Int32):
        """Turn S of the tile that the bound lies in into P, or pass the tile on if it has no keys. Keep the state at the bound."""
        self.validity.wait(pipes, tile)  # type: ignore[union-attr]  # not None here
        if not self.validity.has_keys(pipes, tile):  # type: ignore[union-attr]
            keep_state(pipes, rows, rows.rSum[0], rows.row_ref[0])
        replace(self, mask=BoundedMask(waits=False)).score_valid_tile(operands, pipes, rows, keys, tile)

    @cute.jit
    def publish(self, operands: Operands, pipes: TokenPipes, rows: ScoreRows, req: Int32, begin_tile: Int32) -> Float32:
        """Hand what a token's softmax has come to to the output role. Return the thread's share of the row sum."""
        (pipes.sRows + ((SHARES + rows.half) * TILE_ROWS + rows.row)).store(rows.rSum[0])
        # both threads of a row have the same
        (pipes.sRows + (REFERENCE * TILE_ROWS + rows.row)).store(rows.row_ref[0])
        (pipes.sRows + (MAXIMUM * TILE_ROWS + rows.row)).store(rows.row_max[0])
        if operands.asks_lse_indexer():
            self.publish_indexer(operands, pipes, rows, req)
        return rows.rSum[0]

    @cute.jit
    def publish_indexer(self, operands: Operands, pipes: TokenPipes, rows: ScoreRows, token: Int32):
        """Hand what the softmax of the keys before the bound has come to to the output role."""
        share, reference = rows.rSum[0], rows.row_ref[0]
        tiles = operands.schedule.tile_range(token, Int32(0)).tiles
        if tiles_before_bound(operands, tiles) < tiles:
            kept = pipes.sIndexer + (rows.half * TILE_ROWS + rows.row)
            share, reference = kept.load(), (kept + GROUP).load()
        (pipes.sRows + ((INDEXER_SHARES + rows.half) * TILE_ROWS + rows.row)).store(share)
        (pipes.sRows + (INDEXER_REFERENCE * TILE_ROWS + rows.row)).store(reference)

    def store_lse(self, *_: object) -> None:
        """Do nothing: the output role does."""


def tiles_before_bound(operands: Operands, tiles: Int32) -> Int32:
    """Return how many of a token's tiles lie before the tile of the first key that lse_indexer does not count; all if it counts all."""
    before = smaller(operands.args.indexer_topk // TILE_KEYS, tiles)
    return cutlass.select_(operands.asks_lse_indexer(), before, tiles)


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


@cute.jit
def store_lse_indexer(operands: Operands, pipes: TokenPipes, token: Int32, thread: Int32):
    """Store lse_indexer of a row, natural units, if it is asked for; one of a row's two threads. Until stats_free."""
    row = first_query_row() + thread % TILE_ROWS
    if operands.asks_lse_indexer() and thread < TILE_ROWS and row < operands.rows():
        state = pipes.sRows + thread
        total = (state + INDEXER_SHARES * TILE_ROWS).load() + (state + (INDEXER_SHARES + 1) * TILE_ROWS).load()
        lse = ((state + INDEXER_REFERENCE * TILE_ROWS).load() + cute.math.log2(total, fastmath=True)) * LN2
        operands.lse_indexer_of(token, row).store(cutlass.select_(total == 0.0, operands.empty_lse, lse))
