"""The matrix products of a pair of CTAs with heads of 256 columns: the role that issues them, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ..primitives import tcgen05
from ..primitives.pipeline import PipelineState
from .board import Board
from .sm100_config import BOX_BYTES, FIRST_KEYS, K_STEP, OUTPUT_COLUMN, STAGE_BYTES, STEPS_PER_BOX, TILE_KEYS, TILE_ROWS, key_tiles
from .sm100_mma import K_MAJOR_STEP, MN_MAJOR_STEP, TMEM_STEP
from .sm100_pair_config import PAIR, PairGeometry, PairPipes, PairTiles


@dataclass(frozen=True)
class PairTileGemm:
    """The operands in both CTAs, which lie at the same addresses in each. One thread multiplies."""

    dtype: type[cutlass.Numeric]
    geometry: PairGeometry
    tiles: PairTiles
    tmem: Int32

    def scores(self, buffer: Int32, stage: Int32) -> None:
        """Issue S = Q K^T to one of the buffers."""
        shape = tcgen05.instruction(self.dtype, rows=PAIR * TILE_ROWS, columns=TILE_KEYS)
        keys = tcgen05.k_major(self.tiles.sKv + stage * self.geometry.stage_bytes)
        queries = tcgen05.k_major(self.tiles.sQ)
        for step in range(self.geometry.key_boxes * STEPS_PER_BOX):
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            tcgen05.multiply(
                self.tmem + buffer * TILE_KEYS,
                queries.advance_start_address(box * STAGE_BYTES + step_in_box * K_MAJOR_STEP),
                keys.advance_start_address(box * BOX_BYTES + step_in_box * K_MAJOR_STEP),
                shape,
                accumulate=step > 0,
            )

    def output(self, buffer: Int32, stage: Int32, first: int, end: int, accumulate: bool | Boolean) -> None:
        """Issue O += P V, or O = P V, for the keys first .. end - 1 of a key tile."""
        shape = tcgen05.instruction(self.dtype, rows=PAIR * TILE_ROWS, columns=self.geometry.config.d_v, transpose_b=True)
        values = tcgen05.mn_major(self.tiles.sKv + stage * self.geometry.stage_bytes, STAGE_BYTES)
        probs = self.tmem + buffer * TILE_KEYS
        for step in range(first // K_STEP, end // K_STEP):
            tcgen05.multiply(
                self.tmem + OUTPUT_COLUMN,
                tcgen05.a_in_tmem(probs + step * TMEM_STEP),
                values.advance_start_address(step * MN_MAJOR_STEP),
                shape,
                accumulate=accumulate if step == 0 else True,
            )


class PairMmaRole:
    """One warp of the even CTA."""

    @cute.jit
    def run(self, board: Board, pipes: PairPipes, gemm: PairTileGemm):
        """Wait item_ready, kv_ready, query_ready, probs_ready, rest_ready.

        Signal item_free, scores_ready, output_ready, query_free, kv_free.

        S of a key tile is issued in front of P V of the item's tile before: so the tensor cores have work during every softmax but an
        item's last. That waits for less than Q of the next item, whose place the last S leaves.
        """
        turn, more, queries, count = Int32(0), Boolean(True), Int32(0), Int32(0)
        state = PipelineState(Int32(0), Int32(0))
        while more:
            more, item = board.take(turn)
            tiles = key_tiles(item.keys)
            for t in cutlass.range(tiles, unroll=1):
                if t == 0:
                    pipes.query_ready.consumer_wait(queries)
                    queries = queries + 1
                self.multiply_scores(pipes, gemm, count, state)
                if t == tiles - 1:
                    self.commit(pipes.query_free.barrier(Int32(0)))
                state = pipes.kv_ready.advance(state)
                if t > 0:
                    self.multiply_output(pipes, gemm, count - 1, state, t > 1)
                    state = pipes.kv_ready.advance(state)
                count = count + 1
            if tiles > 0:
                self.multiply_output(pipes, gemm, count - 1, state, tiles > 1)
                state = pipes.kv_ready.advance(state)
            turn = turn + 1

    def multiply_scores(self, pipes: PairPipes, gemm: PairTileGemm, count: Int32, state: PipelineState) -> None:
        """Issue S of the count-th key tile.

        Its buffer may be overwritten: the product with P that lies there is in front of this one in the tensor cores' queue.
        """
        pipes.kv_ready.consumer_wait(state)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.scores(pipes.scores_ready.stage(count), state.stage)
            tcgen05.commit(pipes.kv_free.barrier(state))
            tcgen05.commit(pipes.scores_ready.barrier(count))

    def multiply_output(self, pipes: PairPipes, gemm: PairTileGemm, count: Int32, state: PipelineState, accumulate: Boolean) -> None:
        """Issue P V of the count-th key tile."""
        pipes.kv_ready.consumer_wait(state)
        for ready, first, end in ((pipes.probs_ready, 0, FIRST_KEYS), (pipes.rest_ready, FIRST_KEYS, TILE_KEYS)):
            ready.consumer_wait(count)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.output(pipes.probs_ready.stage(count), state.stage, first, end, accumulate)
        with cute.arch.elect_one():
            tcgen05.commit(pipes.kv_free.barrier(state))
            tcgen05.commit(pipes.output_ready.barrier(count))

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive in both CTAs when everything issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier)
