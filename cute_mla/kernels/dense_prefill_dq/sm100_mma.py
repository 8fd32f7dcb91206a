"""The matrix products of the SM100 dQ kernel: the role that issues them, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS
from ...spec.dense_prefill_dq import TILE_ROWS
from ..dense_prefill.operands import ItemQueue
from ..dense_prefill.sm100_config import K_STEP
from ..dense_prefill.sm100_mma import box_steps, commit, multiply, row_steps
from ..primitives import tcgen05
from ..primitives.arithmetic import larger
from ..primitives.pipeline import PipelineState
from .sm100_config import DPROBS_COLUMN, DQ_COLUMN, ROW_BOX_BYTES, SCORE_COLUMN, DqSm100Geometry, DqSm100Smem


@dataclass(frozen=True)
class DqTileGemm:
    """DqOperands and products. One thread multiplies."""

    dtype: type[cutlass.Numeric]
    geometry: DqSm100Geometry
    smem: DqSm100Smem
    tmem: Int32

    def scores(self, box: int, stage: Int32) -> None:
        """Issue the share of 64 columns of Q and K in S = Q K^T."""
        self._rows(SCORE_COLUMN, self.smem.sQ + box * ROW_BOX_BYTES, self.smem.sK + stage * self.geometry.stage_bytes, box > 0)

    def dprobs(self, box: int, stage: Int32) -> None:
        """Issue the share of 64 columns of dO and V in dP = dO V^T."""
        self._rows(DPROBS_COLUMN, self.smem.sD + box * ROW_BOX_BYTES, self.smem.sV + stage * self.geometry.stage_bytes, box > 0)

    def dq(self, box: int, stage: Int32, accumulate: Boolean) -> None:
        """Issue 64 columns of dQ += dS K, or dQ = dS K."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=BOX_COLUMNS, transpose_b=True)
        keys = tcgen05.mn_major(self.smem.sK + stage * self.geometry.stage_bytes, self.geometry.stage_bytes)
        operands = row_steps(self.tmem, keys, range(self.geometry.tile_keys // K_STEP), self.geometry.dscores_column)
        multiply(self.tmem + (DQ_COLUMN + box * BOX_COLUMNS), operands, shape, accumulate)

    def _rows(self, column: int, rows: cute.Pointer, keys: cute.Pointer, accumulate: bool) -> None:
        """Issue the product of a box of query rows and one of keys."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=self.geometry.tile_keys)
        multiply(self.tmem + column, box_steps(tcgen05.k_major(rows), tcgen05.k_major(keys)), shape, accumulate)


@dataclass(frozen=True)
class DqSm100MmaRole:
    """One warp."""

    geometry: DqSm100Geometry

    @cute.jit
    def run(self, queue: ItemQueue, smem: DqSm100Smem, gemm: DqTileGemm):
        """Wait item_ready, key_ready, value_ready, query_ready, dout_ready, scores_free, dscores_ready, dq_free.

        Signal item_free, scores_ready, dprobs_ready, dq_ready, query_free, dout_free, key_free, value_free.

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
            more, item = queue.take(turn)
            tiles = self.geometry.key_tiles(item.keys)
            # the last dQ of the item before may not wait for keys to come
            for t in cutlass.range(larger(tiles, Int32(1)), unroll=1):
                keys = PipelineState(key_stage, key_phase).following(boxes, self.geometry.key_stages)
                values = PipelineState(value_stage, value_phase).following(self.geometry.value_boxes, self.geometry.value_stages)
                there = t < tiles
                if there:
                    if t == 0:
                        smem.query_ready.consumer_wait(items)
                    self.multiply_scores(smem, gemm, count, keys)
                    if t == tiles - 1:
                        commit(smem.query_free.barrier(items))
                if waiting >= 0:
                    item_of = cutlass.select_(t == 0, items - 1, items)
                    if waiting == 0:
                        smem.dq_free.producer_acquire(item_of)
                    self.multiply_dq(smem, gemm, count - 1, before, waiting > 0)
                    if t == 0:
                        commit(smem.dq_ready.barrier(item_of))
                waiting = Int32(-1)
                if there:
                    if t == 0:
                        smem.dout_ready.consumer_wait(items)
                    self.multiply_dprobs(smem, gemm, count, values)
                    if t == tiles - 1:
                        commit(smem.dout_free.barrier(items))
                    following = (smem.key_free.advance(keys[-1]), smem.value_free.advance(values[-1]))
                    before = key_stage
                    key_stage, key_phase = following[0].stage, following[0].phase
                    value_stage, value_phase = following[1].stage, following[1].phase
                    waiting = t
                    count = count + 1
            items = items + cutlass.select_(tiles > 0, Int32(1), Int32(0))
            turn = turn + 1

    def multiply_scores(self, smem: DqSm100Smem, gemm: DqTileGemm, count: Int32, keys: list[PipelineState]) -> None:
        """Issue S of the count-th tile when its keys have come and S of the tile before has been read."""
        smem.scores_free.producer_acquire(count)
        for box, use in enumerate(keys):
            smem.key_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.scores(box, use.stage)
        commit(smem.scores_ready.barrier(count))

    def multiply_dprobs(self, smem: DqSm100Smem, gemm: DqTileGemm, count: Int32, values: list[PipelineState]) -> None:
        """Issue dP of the count-th tile when its values have come. dP of the tile before has been read: its dS is there."""
        for box, use in enumerate(values):
            smem.value_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.dprobs(box, use.stage)
                tcgen05.commit_alone(smem.value_free.barrier(use))
        commit(smem.dprobs_ready.barrier(count))

    def multiply_dq(self, smem: DqSm100Smem, gemm: DqTileGemm, count: Int32, first_stage: Int32, accumulate: Boolean) -> None:
        """Issue dQ of the count-th tile when its dS is there, and free its keys, 64 columns after the other."""
        uses = PipelineState(first_stage, Int32(0)).following(self.geometry.key_boxes, self.geometry.key_stages)
        smem.dscores_ready.consumer_wait(count)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            for box, use in enumerate(uses):
                gemm.dq(box, use.stage, accumulate)
                tcgen05.commit_alone(smem.key_free.barrier(use))
