"""The matrix products of the SM100 dK and dV kernel: the role that issues them, and their operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS
from ..dense_prefill.sm100_mma import box_steps, commit, multiply, row_steps
from ..primitives import tcgen05
from ..primitives.pipeline import StageBarriers
from .load import DkdvPostedItem
from .operands import DkdvOperands
from .sm100_config import (
    HALVES,
    K_STEP,
    ROW_BYTES,
    TILE_KEYS,
    VALUES_COLUMN,
    DkdvSm100Geometry,
    DkdvSm100Smem,
)


@dataclass(frozen=True)
class DkdvTileGemm:
    """DkdvOperands and products. One thread multiplies."""

    dtype: type[cutlass.Numeric]
    geometry: DkdvSm100Geometry
    smem: DkdvSm100Smem
    tmem: Int32

    def scores(self, box: int, place: Int32) -> None:
        """Issue S^T = K Q^T of a box of a tile's columns, or add to it. place: where Q of the box is."""
        self._outer(self.geometry.scores_column, self.smem.sK, self.smem.sQ, box, place)

    def dprobs(self, box: int, place: Int32) -> None:
        """Issue dP^T = V dO^T of a box of a tile's columns, likewise."""
        self._outer(self.geometry.dprobs_column, self.smem.sV, self.smem.sD, box, place)

    def values(self, box: int, place: Int32, part: tuple[int, int], accumulate: Boolean) -> None:
        """Issue dV += P^T dO, or dV = P^T dO, of the columns from a box on, and a part of the rows."""
        column = VALUES_COLUMN + box * BOX_COLUMNS
        boxes = at_once(self.smem.sD, self.geometry.dout_boxes)
        self._inner(column, self.geometry.scores_column, (self.smem.sD, boxes, place), part, accumulate)

    def keys(self, box: int, place: Int32, part: tuple[int, int], accumulate: Boolean) -> None:
        """Issue dK += dS^T Q, or dK = dS^T Q, likewise."""
        column = self.geometry.keys_column + box * BOX_COLUMNS
        boxes = at_once(self.smem.sQ, self.geometry.query_boxes)
        self._inner(column, self.geometry.dprobs_column, (self.smem.sQ, boxes, place), part, accumulate)

    def _outer(self, column: int, keys: cute.Tensor, streamed: cute.Tensor, box: int, place: Int32) -> None:
        shape = tcgen05.instruction(self.dtype, rows=TILE_KEYS, columns=self.geometry.tile_queries)
        a, b = tcgen05.k_major(keys.iterator), tcgen05.k_major(self._box(streamed, place))
        multiply(self.tmem + column, box_steps(a, b, box * TILE_KEYS * ROW_BYTES), shape, box > 0)

    def _inner(
        self, column: int, factor: int, streamed: tuple[cute.Tensor, int, Int32], part: tuple[int, int], accumulate: Boolean
    ) -> None:
        """Issue the product of P^T or dS^T, which are in tensor memory, and boxes, over a part of the rows of each half."""
        geometry, (tensor, boxes, place) = self.geometry, streamed
        shape = tcgen05.instruction(self.dtype, rows=TILE_KEYS, columns=boxes * BOX_COLUMNS, transpose_b=True)
        b = tcgen05.mn_major(self._box(tensor, place), geometry.box_bytes)
        for half in range(HALVES):
            first = half * geometry.half_queries
            steps = range(part[0] // K_STEP, part[1] // K_STEP)
            operands = row_steps(self.tmem, b, steps, factor + first, first * ROW_BYTES)
            multiply(self.tmem + column, operands, shape, accumulate if half + part[0] == 0 else True)

    def _box(self, streamed: cute.Tensor, place: Int32) -> cute.Pointer:
        return streamed.iterator + place * (self.geometry.tile_queries * BOX_COLUMNS)


def at_once(streamed: cute.Tensor, boxes: int) -> int:
    """Return the boxes of a tile that are contiguous: all if no tile's wrap around."""
    return boxes if cute.size(streamed, mode=[2]) % boxes == 0 else 1


@dataclass(frozen=True)
class DkdvSm100MmaRole:
    """One warp."""

    geometry: DkdvSm100Geometry

    @cute.jit
    def run(self, operands: DkdvOperands, smem: DkdvSm100Smem, gemm: DkdvTileGemm):
        """Wait key_ready, query_ready, dout_ready, probs_ready, rest_ready, dscores_ready, sums_free.

        Signal key_free, query_free, dout_free, scores_ready, dprobs_ready, sums_ready.
        """
        use, turn, filled = Int32(0), Int32(0), Int32(0)
        smem.key_ready.consumer_wait(turn)
        item = DkdvPostedItem.of_turn(smem.items, turn)
        while item.sums != 0:
            smem.key_free.consumer_release(turn)
            count = item.tiles * operands.args.heads_per_kv
            of_values, of_keys = self.geometry.sums_of(item)
            if count > 0:
                # dV and dK of a tile wait for the attend role: S and dP of the next are issued after them
                for i in cutlass.range(count + 1, unroll=1):
                    if i > 0:
                        if i == 1:
                            smem.sums_free.producer_acquire(filled)
                        self.multiply_values(smem, gemm, use + i - 1, i > 1, of_values)
                    if i < count:
                        self.multiply_scores(smem, gemm, use + i)
                    if i > 0:
                        self.multiply_keys(smem, gemm, use + i - 1, i > 1, of_keys)
                    if i < count:
                        self.multiply_dprobs(smem, gemm, use + i, of_keys)
                        if i == count - 1:
                            commit(smem.key_free.barrier(turn))
                commit(smem.sums_ready.barrier(filled))
                filled = filled + 1
                use = use + count
            else:
                smem.key_free.consumer_release(turn)
            turn = turn + 1
            smem.key_ready.consumer_wait(turn)
            item = DkdvPostedItem.of_turn(smem.items, turn)

    def multiply_scores(self, smem: DkdvSm100Smem, gemm: DkdvTileGemm, use: Int32) -> None:
        """Issue S^T of a tile. It may overwrite P^T of the one before, whose product is in front of this one in the queue."""
        for box in range(self.geometry.query_boxes):
            number = use * self.geometry.query_boxes + box
            smem.query_ready.consumer_wait(number)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.scores(box, smem.query_ready.stage(number))
        commit(smem.scores_ready.barrier(use))

    @cute.jit
    def multiply_dprobs(self, smem: DkdvSm100Smem, gemm: DkdvTileGemm, use: Int32, wanted: Boolean | bool):
        """Issue dP^T of a tile, likewise over dS^T of the one before. wanted: whether the item has dK; all signals are given if not."""
        for box in cutlass.range_constexpr(self.geometry.dout_boxes):
            number = use * self.geometry.dout_boxes + box
            smem.dout_ready.consumer_wait(number)
            tcgen05.fence_after_wait()
            if wanted:
                with cute.arch.elect_one():
                    gemm.dprobs(box, smem.dout_ready.stage(number))
        commit(smem.dprobs_ready.barrier(use))

    @cute.jit
    def multiply_values(self, smem: DkdvSm100Smem, gemm: DkdvTileGemm, use: Int32, accumulate: Boolean, wanted: Boolean | bool):
        """Issue dV of a tile, of one part of its rows after the other as P^T comes. wanted: whether the item has dV, likewise."""
        boxes = self.geometry.dout_boxes
        firsts = range(0, boxes, at_once(gemm.smem.sD, boxes))
        places = [smem.dout_ready.stage(use * boxes + first) for first in firsts]
        signals = (smem.probs_ready, smem.rest_ready)
        for part in cutlass.range_constexpr(len(signals)):
            signals[part].consumer_wait(use)
            tcgen05.fence_after_wait()
            if wanted:
                with cute.arch.elect_one():
                    for first, place in zip(firsts, places, strict=True):
                        gemm.values(first, place, self.geometry.parts[part], accumulate)
        self.free_boxes(smem.dout_free, boxes, use)

    @cute.jit
    def multiply_keys(self, smem: DkdvSm100Smem, gemm: DkdvTileGemm, use: Int32, accumulate: Boolean, wanted: Boolean | bool):
        """Issue dK of a tile when dS^T is there. wanted: as for dP^T."""
        boxes, every_row = self.geometry.query_boxes, (0, self.geometry.half_queries)
        smem.dscores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        if wanted:
            with cute.arch.elect_one():
                for first in range(0, boxes, at_once(gemm.smem.sQ, boxes)):
                    gemm.keys(first, smem.query_ready.stage(use * boxes + first), every_row, accumulate)
        self.free_boxes(smem.query_free, boxes, use)

    def free_boxes(self, free: StageBarriers, boxes: int, use: Int32) -> None:
        """Release a tile's boxes when everything issued so far is done."""
        with cute.arch.elect_one():
            for box in range(boxes):
                tcgen05.commit_alone(free.barrier(use * boxes + box))
