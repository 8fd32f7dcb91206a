"""The output role of the SM100 kernels with keys on M: rescale of O^T in tensor memory, epilogue.

Four warps. Columns of O lie in lanes, rows in columns of tensor memory. A thread has the columns thread, 128 + thread, .. of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from ...spec.mla import D_LATENT
from ..attention.scheduler import WorkTile
from ..attention.softmax import LN2, RowScale
from ..primitives import tcgen05
from .config import GROUP, GROUP_WARPS, STEP_COLUMNS, thread_and_lanes
from .few_heads_cta import BLOCKS, OUTPUT_BARRIER, FewHeadsSmemSm100, load_floats

ONES_WORD = 0x38383838  # four times 1 in e4m3
SCALED_AT_ONCE = 16  # rows
STORED_AT_ONCE = {1: 16, 2: 8}  # rows, by groups of score warps: with two, a thread has fewer registers
WARP = 32


@dataclass(frozen=True)
class FewHeadsOutputRoleSm100:
    """Four warps. dtype: of out."""

    dtype: type[cutlass.Numeric]
    row_scale: RowScale

    @cute.jit
    def run(self, operands: Any, smem: FewHeadsSmemSm100, tmem: Int32):
        """Wait alpha_ready, kv_free, stats_ready. Signal output_ready, stats_free. Write lse, and out or out_accum."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        if cutlass.const_expr(smem.geometry.sums_probs):
            tcgen05.store_columns(lanes + smem.geometry.ones_column, [Int32(ONES_WORD)] * STEP_COLUMNS)
            tcgen05.await_stores()
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile, done = Int32(0), Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            lse = self.find_places(operands, smem, req, work_tile, thread, done)
            for t in cutlass.range(tile_range.tiles, unroll=1):
                self.scale(smem, tile + t, lanes, t > 0)
            tile = tile + tile_range.tiles
            smem.stats_ready.consumer_wait(done)
            weight = self.finish_row(operands, smem, work_tile, thread, lse)
            if tile_range.tiles > 0:
                smem.kv_free.consumer_wait(smem.geometry.last_part(tile - 1))
                tcgen05.fence_after_wait()
            self.store_weight(smem, thread, lanes, done, weight)
            cute.arch.barrier(barrier_id=OUTPUT_BARRIER, number_of_threads=GROUP)
            smem.stats_free.consumer_release(done)
            if work_tile.direct:
                self.store_rows(smem, thread, lanes, done, self.dtype)
            else:
                self.store_rows(smem, thread, lanes, done, Float32)
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def scale(self, smem: FewHeadsSmemSm100, tile: Int32, lanes: Int32, begun: Boolean):
        """Rescale O^T by the factors of a tile where references have moved, then let V^T P^T of this tile begin.

        O^T of a work tile's first tile is overwritten: nothing is scaled, but O^T of the one before must have been read.
        """
        rows = smem.geometry.rows
        smem.alpha_ready.consumer_wait(tile)
        table = smem.sAlpha + smem.alpha_ready.stage(tile) * rows
        moved = Boolean(False)
        for first in cutlass.range_constexpr(0, rows, WARP):
            moved = moved | ((table + (cute.arch.lane_idx() % rows + first)).load() != 1.0)
        if begun and cute.arch.vote_any_sync(moved):
            smem.kv_free.consumer_wait(smem.geometry.last_part(tile - 1))
            tcgen05.fence_after_wait()
            for first in cutlass.range(0, rows, SCALED_AT_ONCE, unroll=1):
                alpha = load_floats(table + first, SCALED_AT_ONCE)
                blocks = BLOCKS + smem.geometry.sums_probs  # the sums lie behind O^T
                places = [lanes + (block * rows + first) for block in range(blocks)]
                loaded = [tcgen05.load_columns(place, SCALED_AT_ONCE) for place in places]
                tcgen05.await_loads()
                for place, values in zip(places, loaded, strict=True):
                    tcgen05.store_columns(place, [values[i] * alpha[i] for i in range(SCALED_AT_ONCE)], Float32)
            tcgen05.await_stores()
        tcgen05.fence_before_signal()
        smem.output_ready.producer_commit(tile)

    @cute.jit
    def find_places(self, operands: Any, smem: FewHeadsSmemSm100, req: Int32, work_tile: WorkTile, row: Int32, done: Int32) -> Int64:
        """Write the address of a row of O, return that of its lse; 0 for a row that there is not. A row a thread, ahead of the tiles."""
        out, lse = Int64(0), Int64(0)
        if row < smem.geometry.rows:
            stored = operands.row_range(req)
            if stored.holds(row):
                if work_tile.direct:
                    out, lse = stored.out_row(row).toint(), stored.lse_of(row).toint()
                else:
                    accum = operands.accum_row(work_tile, row)
                    out, lse = (operands.out_accum + accum * D_LATENT).toint(), (operands.lse_accum + accum).toint()
            (smem.sPlaces + ((done & 1) * smem.geometry.rows + row)).store(out)
        return lse

    @cute.jit
    def finish_row(self, operands: Any, smem: FewHeadsSmemSm100, work_tile: WorkTile, row: Int32, lse_place: Int64) -> Float32:
        """Write lse of a row, natural log if the request is not cut, else base 2. A row a thread.

        Return the factor of the row of O; of e4m3 P but for the sum of P as it was multiplied.
        """
        rows = smem.geometry.rows
        weight = Float32(0)
        if row < rows:
            reference = (smem.sSeen + row).load()
            shares = [(smem.sSums + (warp * rows + row)).load() for warp in range(GROUP_WARPS)]
            total = (shares[0] + shares[1]) + (shares[2] + shares[3])
            empty = total == 0.0
            weight = cutlass.select_(empty, Float32(0), self.row_scale.weight(operands, lambda: work_tile, row, total, reference))
            if lse_place != 0:
                lse = reference + cute.math.log2(total, fastmath=True)
                whole = cutlass.select_(empty, operands.empty_lse, lse * LN2)
                cut = cutlass.select_(empty, -Float32.inf, lse)
                target = cute.make_ptr(Float32, lse_place, cute.AddressSpace.gmem, assumed_align=4)
                target.store(cutlass.select_(work_tile.direct, whole, cut))
        return weight

    @cute.jit
    def store_weight(self, smem: FewHeadsSmemSm100, row: Int32, lanes: Int32, done: Int32, weight: Float32):
        """Write the factor of a row of O. A row a thread. weight: as finish_row returns it."""
        rows, lane = smem.geometry.rows, cute.arch.lane_idx()
        if row - lane < rows:
            factor = weight
            if cutlass.const_expr(smem.geometry.sums_probs):
                loaded, first = min(rows, WARP), 0 if rows <= WARP else cute.arch.make_warp_uniform(row - lane)
                rounded = tcgen05.load_columns(lanes + (smem.geometry.sum_column + first), loaded)
                tcgen05.await_loads()
                divisor = rounded[0]
                for i in cutlass.range_constexpr(1, loaded):
                    divisor = cutlass.select_(lane == i, rounded[i], divisor)
                # nobody has written the sum of a row that attends to nothing
                factor = weight / cutlass.select_(weight == 0.0, Float32(1), divisor)
            if row < rows:
                (smem.sWeights + ((done & 1) * rows + row)).store(factor)

    @cute.jit
    def store_rows(self, smem: FewHeadsSmemSm100, thread: Int32, lanes: Int32, done: Int32, dtype: cutlass.Constexpr):
        """Store the thread's columns of all rows, from tensor memory to out or out_accum, as elements of a type."""
        rows = smem.geometry.rows
        table, stored = (done & 1) * rows, STORED_AT_ONCE[smem.geometry.groups]
        for first in cutlass.range(0, rows, stored, unroll=1):
            loaded = [tcgen05.load_columns(lanes + (block * rows + first), stored) for block in range(BLOCKS)]
            weights = load_floats(smem.sWeights + (table + first), stored)
            places = [(smem.sPlaces + (table + (first + i))).load() for i in range(stored)]
            tcgen05.await_loads()
            for i in cutlass.range_constexpr(stored):
                # a row that attends to nothing is 0 whatever tensor memory holds
                values = [cutlass.select_(weights[i] == 0.0, Float32(0), columns[i] * weights[i]) for columns in loaded]
                if places[i] != 0:
                    self.store_columns(places[i], thread, values, dtype)

    def store_columns(self, place: Int64, thread: Int32, values: list[Float32], dtype: type[cutlass.Numeric]) -> None:
        """Store the thread's columns of one row."""
        row = cute.make_ptr(dtype, place, cute.AddressSpace.gmem, assumed_align=dtype.width // 8) + thread
        for block, value in enumerate(values):
            (row + block * GROUP).store(value if dtype is Float32 else dtype(value))
