"""The matrix products of the SM100 dK and dV kernel: the role that issues them, and their operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import D_V
from ...spec.dense_prefill_dkdv import TILE_KEYS
from ..primitives import tcgen05
from .operands import Operands
from .posted_item import PostedItem
from .sm100_config import HALVES, K_STEP, KEYS_COLUMN, ROW_BYTES, STEPS_PER_BOX, VALUES_COLUMN, Geometry, Pipes, Tiles

K_MAJOR_STEP = K_STEP * 2  # bytes of 16 elements
MN_MAJOR_STEP = K_STEP * ROW_BYTES  # bytes of 16 rows
TMEM_STEP = K_STEP // 2  # columns of 16 elements


@dataclass(frozen=True)
class TileGemm:
    """Operands and products. One thread multiplies."""

    dtype: type[cutlass.Numeric]
    geometry: Geometry
    tiles: Tiles
    tmem: Int32

    def scores(self, stage: Int32) -> None:
        """Issue S^T = K Q^T."""
        self._outer(self.geometry.scores_column, self.tiles.sK, self.tiles.sQ, stage)

    def dprobs(self, stage: Int32) -> None:
        """Issue dP^T = V dO^T."""
        self._outer(self.geometry.dprobs_column, self.tiles.sV, self.tiles.sD, stage)

    def values(self, stage: Int32, accumulate: Boolean) -> None:
        """Issue dV += P^T dO, or dV = P^T dO."""
        self._inner(VALUES_COLUMN, self.geometry.scores_column, self.tiles.sD, stage, accumulate)

    def keys(self, stage: Int32, accumulate: Boolean) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q."""
        self._inner(KEYS_COLUMN, self.geometry.dprobs_column, self.tiles.sQ, stage, accumulate)

    def _outer(self, column: int, keys: cute.Tensor, streamed: cute.Tensor, stage: Int32) -> None:
        """Issue the product of the item's rows of `keys` and the rows of a stage, over all columns of both."""
        queries = self.geometry.tile_queries
        shape = tcgen05.instruction(self.dtype, rows=TILE_KEYS, columns=queries)
        a, b = tcgen05.k_major(keys.iterator), self._stage(streamed, stage, tcgen05.k_major)
        for step in range(cute.size(keys, mode=[1]) // K_STEP):
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            tcgen05.multiply(
                self.tmem + column,
                a.advance_start_address(box * TILE_KEYS * ROW_BYTES + step_in_box * K_MAJOR_STEP),
                b.advance_start_address(box * queries * ROW_BYTES + step_in_box * K_MAJOR_STEP),
                shape,
                accumulate=step > 0,
                group=tcgen05.OWN_GROUP,
            )

    def _inner(self, column: int, factor: int, streamed: cute.Tensor, stage: Int32, accumulate: Boolean) -> None:
        """Issue the product of P^T or dS^T, which are in tensor memory, and a stage, over its rows."""
        geometry = self.geometry
        shape = tcgen05.instruction(self.dtype, rows=TILE_KEYS, columns=cute.size(streamed, mode=[1]), transpose_b=True)
        b = self._stage(streamed, stage, lambda tile: tcgen05.mn_major(tile, geometry.tile_queries * ROW_BYTES))
        steps = geometry.half_queries // K_STEP
        for step in range(HALVES * steps):
            half, step_in_half = divmod(step, steps)
            tcgen05.multiply(
                self.tmem + column,
                tcgen05.a_in_tmem(self.tmem + (factor + half * geometry.half_queries + step_in_half * TMEM_STEP)),
                b.advance_start_address(step * MN_MAJOR_STEP),
                shape,
                accumulate=accumulate if step == 0 else True,
                group=tcgen05.OWN_GROUP,
            )

    def _stage(self, streamed: cute.Tensor, stage: Int32, operand: Any) -> Any:
        return operand(streamed.iterator + stage * (cute.size(streamed, mode=[0]) * cute.size(streamed, mode=[1])))


class MmaRole:
    """One warp."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes, gemm: TileGemm):
        """Wait key_ready, query_ready, slope_ready, probs_ready, dscores_ready, sums_free.

        Signal key_free, query_free, slope_free, scores_ready, dprobs_ready, sums_ready.
        """
        use, turn, filled = Int32(0), Int32(0), Int32(0)
        pipes.key_ready.consumer_wait(turn)
        item = PostedItem.of_turn(tiles.items, turn)
        while item.more != 0:
            pipes.key_free.consumer_release(turn)
            count = item.tiles * operands.heads_per_kv
            if count > 0:
                # dV and dK of a tile wait for the attend role: S and dP of the next are issued behind them
                for i in cutlass.range(count + 1, unroll=1):
                    if i > 0:
                        if i == 1:
                            pipes.sums_free.producer_acquire(filled)
                        self.multiply_values(pipes, gemm, use + i - 1, i > 1)
                    if i < count:
                        self.multiply_scores(pipes, gemm, use + i)
                    if i > 0:
                        self.multiply_keys(pipes, gemm, use + i - 1, i > 1)
                    if i < count:
                        self.multiply_dprobs(pipes, gemm, use + i)
                        if i == count - 1:
                            self.commit(pipes.key_free.barrier(turn))
                self.commit(pipes.sums_ready.barrier(filled))
                filled = filled + 1
                use = use + count
            else:
                pipes.key_free.consumer_release(turn)
            turn = turn + 1
            pipes.key_ready.consumer_wait(turn)
            item = PostedItem.of_turn(tiles.items, turn)

    def multiply_scores(self, pipes: Pipes, gemm: TileGemm, use: Int32) -> None:
        """Issue S^T of a tile. It may overwrite P^T of the one before, whose product is in front of this one in the queue."""
        pipes.query_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.scores(pipes.query_ready.stage(use))
            tcgen05.commit_alone(pipes.scores_ready.barrier(use))

    def multiply_dprobs(self, pipes: Pipes, gemm: TileGemm, use: Int32) -> None:
        """Issue dP^T of a tile, likewise over dS^T of the one before."""
        pipes.slope_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.dprobs(pipes.slope_ready.stage(use))
            tcgen05.commit_alone(pipes.dprobs_ready.barrier(use))

    def multiply_values(self, pipes: Pipes, gemm: TileGemm, use: Int32, accumulate: Boolean) -> None:
        """Issue dV of a tile when P^T is there."""
        pipes.probs_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.values(pipes.slope_ready.stage(use), accumulate)
            tcgen05.commit_alone(pipes.slope_free.barrier(use))

    def multiply_keys(self, pipes: Pipes, gemm: TileGemm, use: Int32, accumulate: Boolean) -> None:
        """Issue dK of a tile when dS^T is there. The attend role has then read the statistics, too."""
        pipes.dscores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.keys(pipes.query_ready.stage(use), accumulate)
            tcgen05.commit_alone(pipes.query_free.barrier(use))

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive when everything issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit_alone(barrier)
