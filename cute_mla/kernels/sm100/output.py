"""The output role of the SM100 kernels over a latent: rescale of O in tensor memory, epilogue.

dense_decode/sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ..attention.scheduler import LatentOperands, WorkTile, first_query_row
from ..primitives import tcgen05
from ..primitives.rows import store_row, store_vector
from .config import OUTPUT_COLUMN, SUM_COLUMN, VECTOR, LatentSmemSm100, thread_and_lanes

SCALED_AT_ONCE, STORED_AT_ONCE = 64, 32  # columns of O


@dataclass(frozen=True)
class LatentOutputRoleSm100:
    """Four warps. dtype: of out."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: LatentOperands, smem: LatentSmemSm100, tmem: Int32):
        """Wait alpha_ready, kv_free, stats_ready. Signal output_ready, stats_free. Write out or out_accum."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        req, begin_tile = schedule.first_work_tile()
        tile, done = Int32(0), Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            for t in cutlass.range(tile_range.tiles, unroll=1):
                scale_output(smem, tile + t, thread, lanes, t > 0, SCALED_AT_ONCE)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile(req, begin_tile)
            if tile_range.tiles > 0:
                smem.kv_free.consumer_wait(tile - 1)
                tcgen05.fence_after_wait()
            smem.stats_ready.consumer_wait(done)
            weight = (smem.sInverse + thread % TILE_ROWS).load()
            if cutlass.const_expr(smem.geometry.sums_probs):
                weight = divided_by_sum(weight, lanes)
            smem.stats_free.consumer_release(done)
            self.store_rows(operands, smem, req, work_tile, thread, lanes, weight)
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def store_rows(
        self, operands: LatentOperands, smem: LatentSmemSm100, req: Int32, work_tile: WorkTile, thread: Int32, lanes: Int32, weight: Float32
    ):  # fmt: skip
        """Store half of the columns of the thread's row, from tensor memory to out or out_accum."""
        row = first_query_row() + thread % TILE_ROWS
        rows = operands.row_range(req)
        stored = rows.holds(row)
        column = (thread // TILE_ROWS) * smem.geometry.lane_columns
        out = rows.out_row(row) + column
        out_accum = operands.out_accum + (operands.accum_row(work_tile, row) * smem.geometry.latent + column)
        for copy in cutlass.range_constexpr(smem.geometry.cta_columns // STORED_AT_ONCE):
            first = copy * STORED_AT_ONCE
            values = tcgen05.load_columns(lanes + (OUTPUT_COLUMN + first), STORED_AT_ONCE)
            tcgen05.await_loads()
            place = smem.geometry.output_place(first)
            # a row that attends to nothing is 0 whatever tensor memory holds
            normal = [cutlass.select_(weight == 0.0, Float32(0), values[i] * weight) for i in range(STORED_AT_ONCE)]
            if stored:
                if work_tile.direct:
                    store_row(out + place, normal, self.dtype)
                else:
                    for i in cutlass.range_constexpr(0, STORED_AT_ONCE, VECTOR):
                        store_vector(out_accum + (place + i), normal[i : i + VECTOR], Float32)


@cute.jit
def scale_output(smem: LatentSmemSm100, tile: Int32, thread: Int32, lanes: Int32, begun: Boolean, at_once: cutlass.Constexpr[int]):
    """Rescale O by alpha where the reference has moved, then let P V of this tile begin.

    O of a work tile's first tile is overwritten: nothing is scaled, but O of the one before must have been read. at_once: columns.
    """
    smem.alpha_ready.consumer_wait(tile)
    alpha = (smem.sAlpha + ((tile % smem.geometry.parities) * TILE_ROWS + thread % TILE_ROWS)).load()
    if begun and cute.arch.vote_any_sync(alpha != 1.0):
        smem.kv_free.consumer_wait(tile - 1)
        tcgen05.fence_after_wait()
        for copy in cutlass.range_constexpr(smem.geometry.cta_columns // at_once):
            place = lanes + (OUTPUT_COLUMN + copy * at_once)
            values = tcgen05.load_columns(place, at_once)
            tcgen05.await_loads()
            tcgen05.store_columns(place, scaled(values, at_once, alpha), Float32)
        if cutlass.const_expr(smem.geometry.sums_probs):
            total = load_sum(lanes)
            tcgen05.store_columns(lanes + SUM_COLUMN, [total * alpha], Float32)
        tcgen05.await_stores()
    tcgen05.fence_before_signal()
    smem.output_ready.producer_commit(tile, cta=smem.geometry.mma_cta)


def load_sum(lanes: Int32) -> Float32:
    """Return the sum of rounded P of this thread's row."""
    total = tcgen05.load_columns(lanes + SUM_COLUMN, 1)
    tcgen05.await_loads()
    return total[0]


def divided_by_sum(weight: Float32, lanes: Int32) -> Float32:
    """Return the factor of a row of O, 0 for a row that attends to nothing.

    Nobody has written the sum of such a row, so it is not divided by: ptxas makes a division branch on the divisor.
    """
    return weight / cutlass.select_(weight == 0.0, Float32(1), load_sum(lanes))


def scaled(values: Any, count: int, factor: Float32) -> list[Float32]:
    """Return the product of each of the columns read at once with a factor."""
    products: list[Float32] = []
    for i in range(0, count, 2):
        products += cute.arch.mul_packed_f32x2((values[i], values[i + 1]), (factor, factor))
    return products
