"""The matrix products of the SM100 dK and dV kernel: the role that issues them, and their operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS
from ...spec.dense_prefill_dkdv import TILE_KEYS
from ..primitives import tcgen05
from ..primitives.pipeline import StageBarriers
from .operands import Operands
from .posted_item import PostedItem
from .sm100_config import HALVES, K_STEP, KEYS_COLUMN, ROW_BYTES, SLOPE_BOXES, STEPS_PER_BOX, VALUES_COLUMN, Geometry, Pipes, Tiles

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

    def scores(self, box: int, place: Int32) -> None:
        """Issue S^T = K Q^T of a box of a tile's columns, or add to it. place: where Q of the box is."""
        self._outer(self.geometry.scores_column, self.tiles.sK, self.tiles.sQ, box, place)

    def dprobs(self, box: int, place: Int32) -> None:
        """Issue dP^T = V dO^T of a box of a tile's columns, likewise."""
        self._outer(self.geometry.dprobs_column, self.tiles.sV, self.tiles.sD, box, place)

    def values(self, box: int, boxes: int, place: Int32, accumulate: Boolean) -> None:
        """Issue dV += P^T dO, or dV = P^T dO, of the columns of some boxes, which lie one behind the other."""
        self._inner(VALUES_COLUMN + box * BOX_COLUMNS, self.geometry.scores_column, (self.tiles.sD, boxes, place), accumulate)

    def keys(self, box: int, boxes: int, place: Int32, accumulate: Boolean) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q, likewise."""
        self._inner(KEYS_COLUMN + box * BOX_COLUMNS, self.geometry.dprobs_column, (self.tiles.sQ, boxes, place), accumulate)

    def _outer(self, column: int, keys: cute.Tensor, streamed: cute.Tensor, box: int, place: Int32) -> None:
        shape = tcgen05.instruction(self.dtype, rows=TILE_KEYS, columns=self.geometry.tile_queries)
        a, b = tcgen05.k_major(keys.iterator), tcgen05.k_major(self._box(streamed, place))
        for step in range(STEPS_PER_BOX):
            tcgen05.multiply(
                self.tmem + column,
                a.advance_start_address(box * TILE_KEYS * ROW_BYTES + step * K_MAJOR_STEP),
                b.advance_start_address(step * K_MAJOR_STEP),
                shape,
                accumulate=box + step > 0,
                group=tcgen05.OWN_GROUP,
            )

    def _inner(self, column: int, factor: int, streamed: tuple[cute.Tensor, int, Int32], accumulate: Boolean) -> None:
        """Issue the product of P^T or dS^T, which are in tensor memory, and boxes, over their rows."""
        geometry, (tensor, boxes, place) = self.geometry, streamed
        shape = tcgen05.instruction(self.dtype, rows=TILE_KEYS, columns=boxes * BOX_COLUMNS, transpose_b=True)
        b = tcgen05.mn_major(self._box(tensor, place), geometry.box_bytes)
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

    def _box(self, streamed: cute.Tensor, place: Int32) -> cute.Pointer:
        return streamed.iterator + place * (self.geometry.tile_queries * BOX_COLUMNS)


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
        self._multiply_boxes(pipes.query_ready, self.geometry.query_boxes, gemm.scores, use)
        self.commit(pipes.scores_ready.barrier(use))

    def multiply_dprobs(self, pipes: Pipes, gemm: TileGemm, use: Int32) -> None:
        """Issue dP^T of a tile, likewise over dS^T of the one before."""
        self._multiply_boxes(pipes.slope_ready, SLOPE_BOXES, gemm.dprobs, use)
        self.commit(pipes.dprobs_ready.barrier(use))

    def multiply_values(self, pipes: Pipes, gemm: TileGemm, use: Int32, accumulate: Boolean) -> None:
        """Issue dV of a tile when P^T is there."""
        pipes.probs_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        self._add_boxes(pipes.slope_free, SLOPE_BOXES, gemm.values, use, accumulate)

    def multiply_keys(self, pipes: Pipes, gemm: TileGemm, use: Int32, accumulate: Boolean) -> None:
        """Issue dK of a tile when dS^T is there."""
        pipes.dscores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        self._add_boxes(pipes.query_free, self.geometry.query_boxes, gemm.keys, use, accumulate)

    def _multiply_boxes(self, ready: StageBarriers, boxes: int, product: Callable[[int, Int32], None], use: Int32) -> None:
        for box in range(boxes):
            number = use * boxes + box
            ready.consumer_wait(number)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                product(box, ready.stage(number))

    def _add_boxes(
        self, free: StageBarriers, boxes: int, product: Callable[[int, int, Int32, Boolean], None], use: Int32, accumulate: Boolean
    ) -> None:
        """Issue the product of a tile's boxes and release them. In one piece if the boxes of no tile wrap around."""
        at_once = boxes if free.stages % boxes == 0 else 1
        with cute.arch.elect_one():
            for first in range(0, boxes, at_once):
                product(first, at_once, free.stage(use * boxes + first), accumulate)
                for box in range(first, first + at_once):
                    tcgen05.commit_alone(free.barrier(use * boxes + box))

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive when everything issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit_alone(barrier)
