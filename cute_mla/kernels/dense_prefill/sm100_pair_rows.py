"""The roles of the pair kernel that have a row a thread: the softmax, and the output."""

from __future__ import annotations

from dataclasses import replace

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ..primitives import tcgen05
from ..primitives.elements import pack_pair, store_packed_row
from .board import Board
from .key_mask import EveryKey
from .operands import Operands, WorkItem
from .sm100_config import FIRST_KEYS, TILE_KEYS, TILE_ROWS, first_lane, key_tiles
from .sm100_output import STORED_AT_ONCE, OutputRows
from .sm100_pair_config import EVEN_CTA, PairGeometry, PairPipes, PairTiles, cta_rank, key_limit
from .sm100_softmax import RowSoftmax


class PairSoftmaxRole:
    """Four warps of each CTA."""

    def __init__(self, dtype: type[cutlass.Numeric]) -> None:
        self.dtype = dtype

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: PairTiles, pipes: PairPipes, tmem: Int32):
        """Wait item_ready, scores_ready, sums_free. Signal item_free, alpha_ready, probs_ready, rest_ready, sums_ready. Writes lse."""
        rows = RowSoftmax.create(self.dtype, tiles, first_lane(tmem), Int32(0), operands.scale_log2)
        more, turn, done, sums = Boolean(True), Int32(0), Int32(0), Int32(0)
        while more:
            more, item = board.take(turn)
            if item.rows > 0:
                count, row = key_tiles(item.keys), cta_rank() * TILE_ROWS + rows.row
                rows.reset()
                for t in cutlass.range(count, unroll=1):
                    self.softmax_tile(pipes, rows, item, (count - 1 - t) * TILE_KEYS, done + t)
                done = done + count
                pipes.sums_free.producer_acquire(sums)
                total = rows.publish_sum()
                pipes.sums_ready.producer_commit(sums)
                sums = sums + 1
                if row < item.rows:
                    lse = cutlass.select_(total == 0.0, operands.empty_lse, rows.lse(total))
                    operands.lse_of(item, row).store(lse)
            turn = turn + 1

    @cute.jit
    def softmax_tile(self, pipes: PairPipes, state: RowSoftmax, item: WorkItem, first_key: Int32, use: Int32):
        """Turn the scores of the use-th key tile, whose first key is given, into probabilities.

        The last scores are loaded again when the first part of P is handed over, as in sm100_softmax.py.
        """
        buffer = pipes.scores_ready.stage(use)
        rows = replace(state, tile=buffer, scores=state.scores + buffer * TILE_KEYS)
        first_row = cta_rank() * TILE_ROWS
        limit = key_limit(item, first_row + rows.row) - first_key
        masked = key_limit(item, first_row) < first_key + TILE_KEYS
        pipes.scores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        rows.finish_load(rows.start_load(0))
        if masked:
            rows.mask(limit, 0)
        rows.publish_factor(rows.advance())
        pipes.alpha_ready.producer_commit(use)
        rows.exponentiate(0, FIRST_KEYS, EveryKey())
        again = rows.start_load(FIRST_KEYS)
        rows.store(0, FIRST_KEYS)
        tcgen05.fence_before_signal()
        pipes.probs_ready.producer_commit(use, EVEN_CTA)
        rows.finish_load(again)
        if masked:
            rows.mask(limit, FIRST_KEYS)
        rows.exponentiate(FIRST_KEYS, TILE_KEYS, EveryKey())
        rows.store(FIRST_KEYS, TILE_KEYS)
        tcgen05.fence_before_signal()
        pipes.rest_ready.producer_commit(use, EVEN_CTA)


class PairOutputRole:
    """Four warps of each CTA."""

    def __init__(self, dtype: type[cutlass.Numeric], geometry: PairGeometry) -> None:
        self.dtype = dtype
        self.columns = geometry.config.d_v

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: PairTiles, pipes: PairPipes, tmem: Int32):
        """Wait item_ready, alpha_ready, output_ready, sums_ready. Signal item_free, probs_ready, sums_free. Write out."""
        rows = OutputRows.create(self.dtype, tiles, first_lane(tmem), 0, self.columns)
        more, turn, done, sums = Boolean(True), Int32(0), Int32(0), Int32(0)
        pipes.probs_ready.producer_commit(Int32(0), EVEN_CTA)  # O is free for the first item
        while more:
            more, item = board.take(turn)
            if item.rows > 0:
                count, first_row = key_tiles(item.keys), cta_rank() * TILE_ROWS
                for t in cutlass.range(1, count, unroll=1):
                    self.rescale(pipes, rows, done + t)
                if count > 0:
                    pipes.output_ready.consumer_wait(done + count - 1)
                    tcgen05.fence_after_wait()
                pipes.sums_ready.consumer_wait(sums)
                inverse = rows.inverse()
                pipes.sums_free.consumer_release(sums)
                sums = sums + 1
                words = [Int32(0)] * (self.columns // 2)
                if count > 0:
                    words = self.take(rows, inverse)
                    done = done + count
                    tcgen05.fence_before_signal()
                    pipes.probs_ready.producer_commit(done, EVEN_CTA)  # O is free for the next item
                if first_row + rows.row < item.rows:
                    store_packed_row(operands.out_row(item, first_row + rows.row), words)
            turn = turn + 1

    def take(self, rows: OutputRows, inverse: Float32) -> list[Int32]:
        """Return the thread's row of O / row sum, rounded, two columns a word. A row that attends to nothing is 0."""
        words = []
        for first in range(0, self.columns, STORED_AT_ONCE):
            values = tcgen05.load_columns(rows.place + first, STORED_AT_ONCE)
            tcgen05.await_loads()
            for i in range(0, STORED_AT_ONCE, 2):
                word = pack_pair(values[i] * inverse, values[i + 1] * inverse, self.dtype)
                words.append(cutlass.select_(inverse == 0.0, Int32(0), word))
        return words

    @cute.jit
    def rescale(self, pipes: PairPipes, rows: OutputRows, use: Int32):
        """Multiply O by alpha where the reference has moved, then let P V of the use-th key tile, not an item's first, begin."""
        pipes.alpha_ready.consumer_wait(use)
        alpha = replace(rows, tile=pipes.alpha_ready.stage(use)).factor()
        pipes.output_ready.consumer_wait(use - 1)
        if cute.arch.vote_any_sync(alpha != 1.0):
            tcgen05.fence_after_wait()
            rows.scale(alpha)
            tcgen05.fence_before_signal()
        pipes.probs_ready.producer_commit(use, EVEN_CTA)
