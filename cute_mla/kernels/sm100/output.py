"""The output role of the SM100 kernels over a latent: rescale of O in tensor memory, epilogue.

dense_decode/sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from ...spec.dense_decode import TILE_ROWS
from ..attention.scheduler import LatentOperands, TileRange, WorkTile
from ..primitives import tcgen05
from ..primitives.arithmetic import larger, pack_pair, smaller
from ..primitives.copies import prefetch_row
from ..primitives.rows import SECTOR_BYTES, store_vectors
from .config import OUTPUT_COLUMN, SUM_COLUMN, LatentSmemSm100, thread_and_lanes
from .score import LatentQueriesSm100

SCALED_AT_ONCE, STORED_AT_ONCE = 64, 32  # columns of O
LOCATED_AT = 2  # tile of a work tile after which Q of the next one is looked for: the first ones are waited for


@dataclass(frozen=True)
class LatentOutputRoleSm100:
    """Four warps. dtype: of out. queries: loads Q, where the score role does not."""

    dtype: type[cutlass.Numeric]
    queries: LatentQueriesSm100 | None = None

    @cute.jit
    def run(self, operands: LatentOperands, smem: LatentSmemSm100, tmem: Int32):
        """Wait alpha_ready, kv_free, stats_ready. Signal output_ready, stats_free. Write out or out_accum."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        req, begin_tile = schedule.first_work_tile()
        tile, done = Int32(0), Int32(0)
        if cutlass.const_expr(self.queries is not None):
            self.load_queries(smem, self.locate_queries(operands, req, begin_tile, thread), tile, thread, lanes)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            query_row = self.scale_tiles(operands, smem, tile_range, begin_tile, tile, thread, lanes)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile(req, begin_tile)
            schedule.release(begin_tile)
            if cutlass.const_expr(self.queries is not None):
                self.load_queries(smem, query_row, tile, thread, lanes)
            target, stored = self.target(operands, smem, req, work_tile, thread)
            if tile_range.tiles > 0:
                smem.kv_free.consumer_wait(tile - 1)
                tcgen05.fence_after_wait()
            smem.stats_ready.consumer_wait(done)
            weight = (smem.sInverse + thread % TILE_ROWS).load()
            if cutlass.const_expr(smem.geometry.sums_probs):
                weight = divided_by_sum(weight, lanes)
            self.release_weights(smem, done)
            if work_tile.direct:
                self.store_row(smem, lanes, weight, target, stored, True)
            else:
                self.store_row(smem, lanes, weight, target, stored, False)
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def scale_tiles(
        self, operands: LatentOperands, smem: LatentSmemSm100, tile_range: TileRange, begin_tile: Int32, tile: Int32, thread: Int32,
        lanes: Int32,
    ) -> Int64:  # fmt: skip
        """Rescale O for the tiles of a work tile. Return where Q of the next one is; 0: nowhere. tile: number of the first."""
        query_row = Int64(0)
        for t in cutlass.range(larger(tile_range.tiles, Int32(1)), unroll=1):
            if t < tile_range.tiles:
                scale_output(smem, tile + t, thread, lanes, t > 0, SCALED_AT_ONCE)
            if cutlass.const_expr(self.queries is not None):  # noqa: SIM102  # of the DSL, which knows the one and not the other
                if t == smaller(LOCATED_AT, larger(tile_range.tiles - 1, Int32(0))):
                    query_row = self.locate_following(operands, tile_range.req, begin_tile, thread)
        return query_row

    def locate_following(self, operands: LatentOperands, req: Int32, begin_tile: Int32, thread: Int32) -> Int64:
        """Return locate_queries of the work tile that follows one."""
        following = operands.schedule.work_tile(req, begin_tile)
        return self.locate_queries(operands, following.next_req, following.next_tile, thread)

    def release_weights(self, smem: LatentSmemSm100, done: Int32) -> None:
        """Signal stats_free: this warp has read the factors of a work tile's rows."""
        smem.stats_free.consumer_release(done)

    @cute.jit
    def locate_queries(self, operands: LatentOperands, req: Int32, begin_tile: Int32, thread: Int32) -> Int64:
        """Return the address of the thread's row of Q of a work tile; 0 if there is no such work tile, or it has no keys."""
        last, row = operands.schedule.last_request(), Int64(0)
        if (req <= last) & (operands.schedule.tile_range(smaller(req, last), begin_tile).tiles > 0):
            _, source = self.queries.half_and_source(operands, req, thread)
            row = source.toint()
        return row

    @cute.jit
    def load_queries(self, smem: LatentSmemSm100, query_row: Int64, tiles: Int32, thread: Int32, lanes: Int32):
        """Replace Q by that of the next work tile, when the last S of this one is done. Signal query_ready. tiles: up to here."""
        if query_row != 0:
            rWords = self.queries.registers()
            if tiles == 0:
                prefetch_row(query_row, self.queries.row_bytes())
                smem.pages_asked.consumer_wait(tiles)
            self.queries.fetch_row(query_row, thread, rWords)
            if tiles > 0:
                smem.scores_ready.consumer_wait(tiles * smem.geometry.score_parts - 1)
                tcgen05.fence_after_wait()
            self.queries.store(smem, rWords, lanes)

    def target(
        self, operands: LatentOperands, smem: LatentSmemSm100, req: Int32, work_tile: WorkTile, thread: Int32
    ) -> tuple[Int64, Boolean]:  # fmt: skip
        """Return the address of the columns of out or out_accum that the thread stores, and whether it has a row."""
        row = operands.row_at(thread % TILE_ROWS, req)
        rows = operands.row_range(req)
        column = (thread // TILE_ROWS) * smem.geometry.lane_columns + smem.geometry.first_column()
        out = (rows.out_row(row) + column).toint()
        out_accum = operands.out_accum + (operands.accum_row(work_tile, row) * smem.geometry.row_latent + column)
        return cutlass.select_(work_tile.direct, out, out_accum.toint()), rows.holds(row)

    @cute.jit
    def store_row(
        self,
        smem: LatentSmemSm100,
        lanes: Int32,
        weight: Float32,
        target: Int64,
        stored: Boolean,
        direct: cutlass.Constexpr[bool],
    ):
        """Store half of the columns of the thread's row, from tensor memory to out or out_accum: by sectors where rows lie so."""
        if cute.arch.vote_all_sync((target & (SECTOR_BYTES - 1)) == 0):
            self.store_columns(smem, lanes, weight, target, stored, direct, SECTOR_BYTES)
        else:
            self.store_columns(smem, lanes, weight, target, stored, direct, SECTOR_BYTES // 2)

    @cute.jit
    def store_columns(
        self,
        smem: LatentSmemSm100,
        lanes: Int32,
        weight: Float32,
        target: Int64,
        stored: Boolean,
        direct: cutlass.Constexpr[bool],
        nbytes: cutlass.Constexpr[int],
    ):
        """Store as store_row says, so many bytes at a time."""
        columns = smem.geometry.cta_columns
        values = tcgen05.load_columns(lanes + OUTPUT_COLUMN, STORED_AT_ONCE)
        for first in cutlass.range_constexpr(0, columns, STORED_AT_ONCE):
            tcgen05.await_loads()
            words = scaled(values, STORED_AT_ONCE, weight)
            if cutlass.const_expr(first + STORED_AT_ONCE < columns):
                values = tcgen05.load_columns(lanes + (OUTPUT_COLUMN + first + STORED_AT_ONCE), STORED_AT_ONCE)
            dtype, zero = Float32, Float32(0)
            if cutlass.const_expr(direct):
                words = [pack_pair(words[i], words[i + 1], self.dtype) for i in range(0, STORED_AT_ONCE, 2)]
                dtype, zero = Int32, Int32(0)
            if stored:
                # a row that attends to nothing is 0 whatever tensor memory holds
                words = [cutlass.select_(weight == 0.0, zero, word) for word in words]
                row = cute.make_ptr(dtype, target, cute.AddressSpace.gmem, assumed_align=nbytes)
                place = smem.geometry.output_place(first) // (2 if direct else 1)
                store_vectors(row + place, words, nbytes, dtype)


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
