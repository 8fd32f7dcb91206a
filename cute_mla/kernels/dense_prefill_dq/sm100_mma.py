"""The matrix products of the SM100 dQ kernel: the role that issues them, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS
from ...spec.dense_prefill_dq import TILE_ROWS
from ..dense_prefill.board import Board
from ..dense_prefill.sm100_config import K_STEP, STEPS_PER_BOX
from ..dense_prefill.sm100_mma import K_MAJOR_STEP, MN_MAJOR_STEP, TMEM_STEP
from ..primitives import tcgen05
from ..primitives.integers import larger
from ..primitives.pipeline import PipelineState
from .sm100_config import DQ_COLUMN, ROW_BOX_BYTES, SCORE_COLUMN, SLOPE_COLUMN, Geometry, Pipes, Tiles


@dataclass(frozen=True)
class TileGemm:
    """Operands and products. One thread multiplies."""

    dtype: type[cutlass.Numeric]
    geometry: Geometry
    tiles: Tiles
    tmem: Int32

    def scores(self, box: int, stage: Int32) -> None:
        """Issue the share of 64 columns of Q and K in S = Q K^T."""
        self._rows(SCORE_COLUMN, self.tiles.sQ + box * ROW_BOX_BYTES, self.tiles.sK + stage * self.geometry.stage_bytes, box > 0)

    def slopes(self, box: int, stage: Int32) -> None:
        """Issue the share of 64 columns of dO and V in dP = dO V^T."""
        self._rows(SLOPE_COLUMN, self.tiles.sD + box * ROW_BOX_BYTES, self.tiles.sV + stage * self.geometry.stage_bytes, box > 0)

    def dq(self, box: int, stage: Int32, accumulate: Boolean) -> None:
        """Issue 64 columns of dQ += dS K, or dQ = dS K."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=BOX_COLUMNS, transpose_b=True)
        keys = tcgen05.mn_major(self.tiles.sK + stage * self.geometry.stage_bytes, self.geometry.stage_bytes)
        for step in range(self.geometry.tile_keys // K_STEP):
            tcgen05.multiply(
                self.tmem + (DQ_COLUMN + box * BOX_COLUMNS),
                tcgen05.a_in_tmem(self.tmem + (self.geometry.weight_column + step * TMEM_STEP)),
                keys.advance_start_address(step * MN_MAJOR_STEP),
                shape,
                accumulate=accumulate if step == 0 else True,
                group=tcgen05.OWN_GROUP,
            )

    def _rows(self, column: int, rows: cute.Pointer, keys: cute.Pointer, accumulate: bool) -> None:
        """Issue the product of a box of query rows and one of keys."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=self.geometry.tile_keys)
        a, b = tcgen05.k_major(rows), tcgen05.k_major(keys)
        for step in range(STEPS_PER_BOX):
            tcgen05.multiply(
                self.tmem + column,
                a.advance_start_address(step * K_MAJOR_STEP),
                b.advance_start_address(step * K_MAJOR_STEP),
                shape,
                accumulate=accumulate or step > 0,
                group=tcgen05.OWN_GROUP,
            )


class MmaRole:
    """One warp."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, board: Board, pipes: Pipes, gemm: TileGemm):
        """Wait item_ready, key_ready, value_ready, query_ready, dout_ready, scores_free, weights_ready, dq_free.

        Signal item_free, scores_ready, slopes_ready, dq_ready, query_free, dout_free, key_free, value_free.

        S of a tile, dQ of the tile before, dP of the tile: so from item to item without a break. After the last item comes one without
        tiles.
        """
        boxes = self.geometry.key_boxes
        turn, more = Int32(0), Boolean(True)
        key_stage, key_phase, value_stage, value_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        before = Int32(0)  # the first stage of the keys of the tile before
        # items with tiles, tiles, and which one of its item the last of them is, if its dQ is still to come
        items, count, waiting = Int32(0), Int32(0), Int32(-1)
        while more:
            more, item = board.take(turn)
            tiles = self.geometry.key_tiles(item.keys)
            # the last dQ of the item before may not wait for keys to come
            for t in cutlass.range(larger(tiles, Int32(1)), unroll=1):
                keys = PipelineState(key_stage, key_phase).following(boxes, self.geometry.key_stages)
                values = PipelineState(value_stage, value_phase).following(self.geometry.value_boxes, self.geometry.value_stages)
                there = t < tiles
                if there:
                    if t == 0:
                        pipes.query_ready.consumer_wait(items)
                    self.multiply_scores(pipes, gemm, count, keys)
                    if t == tiles - 1:
                        self.commit(pipes.query_free.barrier(items))
                if waiting >= 0:
                    item_of = cutlass.select_(t == 0, items - 1, items)
                    if waiting == 0:
                        pipes.dq_free.producer_acquire(item_of)
                    self.multiply_dq(pipes, gemm, count - 1, before, waiting > 0)
                    if t == 0:
                        self.commit(pipes.dq_ready.barrier(item_of))
                waiting = Int32(-1)
                if there:
                    if t == 0:
                        pipes.dout_ready.consumer_wait(items)
                    self.multiply_slopes(pipes, gemm, count, values)
                    if t == tiles - 1:
                        self.commit(pipes.dout_free.barrier(items))
                    following = (pipes.key_free.advance(keys[-1]), pipes.value_free.advance(values[-1]))
                    before = key_stage
                    key_stage, key_phase = following[0].stage, following[0].phase
                    value_stage, value_phase = following[1].stage, following[1].phase
                    waiting = t
                    count = count + 1
            items = items + cutlass.select_(tiles > 0, Int32(1), Int32(0))
            turn = turn + 1

    def multiply_scores(self, pipes: Pipes, gemm: TileGemm, count: Int32, keys: list[PipelineState]) -> None:
        """Issue S of the count-th tile when its keys have come and S of the tile before has been read."""
        pipes.scores_free.producer_acquire(count)
        for box, use in enumerate(keys):
            pipes.key_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.scores(box, use.stage)
        self.commit(pipes.scores_ready.barrier(count))

    def multiply_slopes(self, pipes: Pipes, gemm: TileGemm, count: Int32, values: list[PipelineState]) -> None:
        """Issue dP of the count-th tile when its values have come. dP of the tile before has been read: its dS is there."""
        for box, use in enumerate(values):
            pipes.value_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.slopes(box, use.stage)
                tcgen05.commit_alone(pipes.value_free.barrier(use))
        self.commit(pipes.slopes_ready.barrier(count))

    def multiply_dq(self, pipes: Pipes, gemm: TileGemm, count: Int32, first_stage: Int32, accumulate: Boolean) -> None:
        """Issue dQ of the count-th tile when its dS is there, and free its keys, 64 columns after the other."""
        uses = PipelineState(first_stage, Int32(0)).following(self.geometry.key_boxes, self.geometry.key_stages)
        pipes.weights_ready.consumer_wait(count)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            for box, use in enumerate(uses):
                gemm.dq(box, use.stage, accumulate)
                tcgen05.commit_alone(pipes.key_free.barrier(use))

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive when everything issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit_alone(barrier)
