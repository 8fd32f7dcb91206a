"""The matrix products of the SM100 dK and dV kernel: the role that issues them, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS
from ..primitives import tcgen05
from ..primitives.pipeline import StageBarriers
from .operands import Operands
from .posted_item import PostedItem
from .sm100_config import HALVES, K_STEP, ROW_BYTES, STEPS_PER_BOX, TILE_KEYS, VALUES_COLUMN, Geometry, Pipes, Tiles

K_MAJOR_STEP = K_STEP * 2  # bytes of 16 elements
ELEMENTS_PER_COLUMN = 2  # of tensor memory


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

    def values(self, box: int, place: Int32, part: tuple[int, int], accumulate: Boolean) -> None:
        """Issue dV += P^T dO, or dV = P^T dO, of the columns from a box on, and a part of the rows."""
        column = VALUES_COLUMN + box * BOX_COLUMNS
        boxes = at_once(self.tiles.sD, self.geometry.slope_boxes)
        self._inner(column, self.geometry.scores_column, (self.tiles.sD, boxes, place), part, accumulate)

    def keys(self, box: int, place: Int32, part: tuple[int, int], accumulate: Boolean) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q, likewise."""
        column = self.geometry.keys_column + box * BOX_COLUMNS
        boxes = at_once(self.tiles.sQ, self.geometry.query_boxes)
        self._inner(column, self.geometry.dprobs_column, (self.tiles.sQ, boxes, place), part, accumulate)

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

    def _inner(
        self, column: int, factor: int, streamed: tuple[cute.Tensor, int, Int32], part: tuple[int, int], accumulate: Boolean
    ) -> None:
        """Issue the product of P^T or dS^T, which are in tensor memory, and boxes, over a part of the rows of each half."""
        geometry, (tensor, boxes, place) = self.geometry, streamed
        shape = tcgen05.instruction(self.dtype, rows=TILE_KEYS, columns=boxes * BOX_COLUMNS, transpose_b=True)
        b = tcgen05.mn_major(self._box(tensor, place), geometry.box_bytes)
        for half in range(HALVES):
            for row in range(*part, K_STEP):
                tcgen05.multiply(
                    self.tmem + column,
                    tcgen05.a_in_tmem(self.tmem + (factor + half * geometry.half_queries + row // ELEMENTS_PER_COLUMN)),
                    b.advance_start_address((half * geometry.half_queries + row) * ROW_BYTES),
                    shape,
                    accumulate=accumulate if half + row == 0 else True,
                    group=tcgen05.OWN_GROUP,
                )

    def _box(self, streamed: cute.Tensor, place: Int32) -> cute.Pointer:
        return streamed.iterator + place * (self.geometry.tile_queries * BOX_COLUMNS)


def at_once(streamed: cute.Tensor, boxes: int) -> int:
    """Return the boxes of a tile that lie one behind the other: all if no tile's wrap around."""
    return boxes if cute.size(streamed, mode=[2]) % boxes == 0 else 1


class MmaRole:
    """One warp."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes, gemm: TileGemm):
        """Wait key_ready, query_ready, slope_ready, probs_ready, rest_ready, dscores_ready, sums_free.

        Signal key_free, query_free, slope_free, scores_ready, dprobs_ready, sums_ready.
        """
        use, turn, filled = Int32(0), Int32(0), Int32(0)
        pipes.key_ready.consumer_wait(turn)
        item = PostedItem.of_turn(tiles.items, turn)
        while item.sums != 0:
            pipes.key_free.consumer_release(turn)
            count = item.tiles * operands.heads_per_kv
            of_values, of_keys = self.geometry.sums_of(item)
            if count > 0:
                # dV and dK of a tile wait for the attend role: S and dP of the next are issued behind them
                for i in cutlass.range(count + 1, unroll=1):
                    if i > 0:
                        if i == 1:
                            pipes.sums_free.producer_acquire(filled)
                        self.multiply_values(pipes, gemm, use + i - 1, i > 1, of_values)
                    if i < count:
                        self.multiply_scores(pipes, gemm, use + i)
                    if i > 0:
                        self.multiply_keys(pipes, gemm, use + i - 1, i > 1, of_keys)
                    if i < count:
                        self.multiply_dprobs(pipes, gemm, use + i, of_keys)
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
        for box in range(self.geometry.query_boxes):
            number = use * self.geometry.query_boxes + box
            pipes.query_ready.consumer_wait(number)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.scores(box, pipes.query_ready.stage(number))
        self.commit(pipes.scores_ready.barrier(use))

    @cute.jit
    def multiply_dprobs(self, pipes: Pipes, gemm: TileGemm, use: Int32, wanted: Boolean | bool):
        """Issue dP^T of a tile, likewise over dS^T of the one before. wanted: whether the item has dK; all signals are given if not."""
        for box in cutlass.range_constexpr(self.geometry.slope_boxes):
            number = use * self.geometry.slope_boxes + box
            pipes.slope_ready.consumer_wait(number)
            tcgen05.fence_after_wait()
            if wanted:
                with cute.arch.elect_one():
                    gemm.dprobs(box, pipes.slope_ready.stage(number))
        self.commit(pipes.dprobs_ready.barrier(use))

    @cute.jit
    def multiply_values(self, pipes: Pipes, gemm: TileGemm, use: Int32, accumulate: Boolean, wanted: Boolean | bool):
        """Issue dV of a tile, of one part of its rows after the other as P^T comes. wanted: whether the item has dV, likewise."""
        boxes = self.geometry.slope_boxes
        firsts = range(0, boxes, at_once(gemm.tiles.sD, boxes))
        places = [pipes.slope_ready.stage(use * boxes + first) for first in firsts]
        signals = (pipes.probs_ready, pipes.rest_ready)
        for part in cutlass.range_constexpr(len(signals)):
            signals[part].consumer_wait(use)
            tcgen05.fence_after_wait()
            if wanted:
                with cute.arch.elect_one():
                    for first, place in zip(firsts, places, strict=True):
                        gemm.values(first, place, self.geometry.parts[part], accumulate)
        self.free_boxes(pipes.slope_free, boxes, use)

    @cute.jit
    def multiply_keys(self, pipes: Pipes, gemm: TileGemm, use: Int32, accumulate: Boolean, wanted: Boolean | bool):
        """Issue dK of a tile when dS^T is there. wanted: as for dP^T."""
        boxes, every_row = self.geometry.query_boxes, (0, self.geometry.half_queries)
        pipes.dscores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        if wanted:
            with cute.arch.elect_one():
                for first in range(0, boxes, at_once(gemm.tiles.sQ, boxes)):
                    gemm.keys(first, pipes.query_ready.stage(use * boxes + first), every_row, accumulate)
        self.free_boxes(pipes.query_free, boxes, use)

    def free_boxes(self, free: StageBarriers, boxes: int, use: Int32) -> None:
        """Release a tile's boxes when everything issued so far is done."""
        with cute.arch.elect_one():
            for box in range(boxes):
                tcgen05.commit_alone(free.barrier(use * boxes + box))

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive when everything issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit_alone(barrier)
