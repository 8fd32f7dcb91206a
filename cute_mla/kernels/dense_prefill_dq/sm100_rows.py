"""The row role of the SM100 dQ kernel: statistics of an item's rows before its products, dQ after them."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.dense_prefill_dq import STATISTICS, TILE_ROWS
from ...spec.mla import LOG2E
from ..dense_prefill.operands import DensePrefillItem, ItemQueue
from ..dense_prefill.sm100_config import GROUP, GROUP_WARPS, first_lane
from ..primitives import tcgen05
from ..primitives.arithmetic import smaller
from ..primitives.rows import aligned, store_row
from .operands import DqOperands
from .sm100_config import DQ_COLUMN, DqSm100Geometry, DqSm100Smem

ROW_LANES = 8  # that share a row of out and dout: 128 bytes at a time
CHUNK = 8  # elements of 16 bytes
WARP_ROWS = cute.arch.WARP_SIZE // ROW_LANES  # of a pass
PASS_ROWS = GROUP_WARPS * WARP_ROWS
PASSES = TILE_ROWS // PASS_ROWS
STORED_AT_ONCE = 32  # columns of dQ
ELEMENTS_AT_ONCE = 512  # of out, and of dout, that eight lanes load before they use them


@dataclass(frozen=True)
class DqWarpRows:
    """The rows of out and dout that a warp reads: four in each pass, eight lanes a row. first: of pass 0. chunk: of a row, the lane's."""

    first: Int32
    lane: Int32
    chunk: Int32

    @staticmethod
    def create() -> DqWarpRows:
        """Return the rows of this warp."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
        return DqWarpRows(warp * WARP_ROWS, lane, lane % ROW_LANES)

    def of_pass(self, step: Int32) -> Int32:
        """Return the row that the lane helps to read."""
        return self.first + (step * PASS_ROWS + self.lane // ROW_LANES)

    def of_lane(self) -> Int32:
        """Return the row whose statistics the lane collects: lane 4 p + i that of row i of pass p."""
        return self.first + (self.lane // WARP_ROWS * PASS_ROWS + self.lane % WARP_ROWS)

    def collect(self, step: Int32, share: Float32, before: Float32) -> Float32:
        """Return the sum of the shares of eight lanes, if it is the lane's row's, or else what the lane has."""
        for distance in (1, 2, 4):
            share = share + cute.arch.shuffle_sync_bfly(share, distance)
        total = cute.arch.shuffle_sync(share, self.lane % WARP_ROWS * ROW_LANES)
        return cutlass.select_(self.lane // WARP_ROWS == step, total, before)


class DqSm100RowRole:
    """Four warps."""

    def __init__(self, dtype: type[cutlass.Numeric], geometry: DqSm100Geometry) -> None:
        self.dtype = dtype
        self.geometry = geometry
        self.passes_at_once = ELEMENTS_AT_ONCE // geometry.config.d_v  # whose loads are on their way together

    @cute.jit
    def run(self, operands: DqOperands, queue: ItemQueue, smem: DqSm100Smem, tmem: Int32):
        """Wait item_ready, statistics_free, dq_ready. Signal item_free, statistics_ready, dq_free. Write dq and the statistics.

        The statistics of an item are computed while the item before is being multiplied.
        """
        more, item = queue.take(Int32(0))
        turn, begun, done = Int32(1), Int32(0), Int32(0)  # begun, done: items with keys whose statistics, whose dQ are written
        if item.keys > 0:
            self.write_statistics(operands, smem, item, begun)
            begun = begun + 1
        while more:
            more, following = queue.take(turn)
            if following.keys > 0:
                self.write_statistics(operands, smem, following, begun)
                begun = begun + 1
            if item.rows > 0:
                self.write_dq(operands, smem, item, first_lane(tmem), done)
                done = done + cutlass.select_(item.keys > 0, Int32(1), Int32(0))
            item = following
            turn = turn + 1

    @cute.jit
    def write_statistics(self, operands: DqOperands, smem: DqSm100Smem, item: DensePrefillItem, use: Int32):
        """Hand lse and delta of the item's rows to the attend roles, and leave them to the next kernel.

        Rows past the sequence's end repeat its last one; their results go nowhere. A row with an infinite lse has no gradient: its P is
        0, and so is its delta.
        """
        rows = DqWarpRows.create()
        own = rows.of_lane()
        lse = operands.row("lse", item, smaller(own, item.rows - 1)).load()
        delta = Float32(0)
        for first in cutlass.range(0, PASSES, self.passes_at_once, unroll=1):
            chunks = [self.load_row(operands, item, rows, first + i) for i in range(self.passes_at_once)]
            for i in cutlass.range_constexpr(self.passes_at_once):
                delta = rows.collect(first + i, self.share_of_delta(chunks[i]), delta)
        none = (lse == Float32.inf) | (lse == -Float32.inf)
        numbers = (cutlass.select_(none, Float32.inf, lse * LOG2E), cutlass.select_(none, Float32(0), delta))
        smem.statistics_free.producer_acquire(use)
        for which in cutlass.range_constexpr(STATISTICS):
            (smem.sStatistics + (which * TILE_ROWS + own)).store(numbers[which])
        smem.statistics_ready.producer_commit(use)
        if own < item.rows:
            for which in cutlass.range_constexpr(STATISTICS):
                operands.statistic_of(item, own, which).store(numbers[which])

    def load_row(self, operands: DqOperands, item: DensePrefillItem, rows: DqWarpRows, step: Int32) -> tuple[list[Int32], list[Int32]]:
        """Load the lane's chunks of out and dout for one pass."""
        row = smaller(rows.of_pass(step), item.rows - 1)
        starts = (operands.row("out", item, row), operands.row("dout", item, row))
        out, dout = (self.load_words(start + rows.chunk * CHUNK, self.geometry.config.d_v) for start in starts)
        return out, dout

    def load_words(self, source: cute.Pointer, columns: int) -> list[Int32]:
        """Load a chunk of every 64 of a row's columns."""
        words = []
        for first in range(0, columns, ROW_LANES * CHUNK):
            chunk = cute.make_rmem_tensor(cute.make_layout(CHUNK // 2), Int32)
            start = aligned(cute.recast_ptr(source + first, dtype=Int32), 16)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(CHUNK // 2)), chunk)
            words += [chunk[i] for i in range(CHUNK // 2)]
        return words

    def share_of_delta(self, chunks: tuple[list[Int32], list[Int32]]) -> Float32:
        """Return the sum of products of the pairs of elements of a row of out and of dout."""
        total = (Float32(0), Float32(0))
        for words in zip(*chunks, strict=True):
            pairs = []
            for word in words:
                pair = cute.make_rmem_tensor(cute.make_layout(2), self.dtype)
                cute.recast_tensor(pair, Int32)[0] = word
                pairs.append((pair[0].to(Float32), pair[1].to(Float32)))
            # two at a time: ptxas makes one instruction of a conversion and an FMA that the simulator does not know
            total = cute.arch.fma_packed_f32x2(*pairs, total)
        return total[0] + total[1]

    @cute.jit
    def write_dq(self, operands: DqOperands, smem: DqSm100Smem, item: DensePrefillItem, lanes: Int32, use: Int32):
        """Scale, round and write the rows of dQ that the sequence has: zeros if the item has no keys."""
        row = cute.arch.thread_idx()[0] % GROUP
        target = operands.row("dq", item, row)
        if item.keys > 0:
            smem.dq_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
        for first in cutlass.range_constexpr(0, self.geometry.config.d_qk, STORED_AT_ONCE):
            rG = cute.make_rmem_tensor(cute.make_layout(STORED_AT_ONCE), Float32)
            rG.fill(0.0)
            if item.keys > 0:
                values = tcgen05.load_columns(lanes + (DQ_COLUMN + first), STORED_AT_ONCE)
                tcgen05.await_loads()
                for i in cutlass.range_constexpr(STORED_AT_ONCE):
                    rG[i] = values[i] * operands.args.softmax_scale
            if row < item.rows:
                store_row(target + first, [rG[i] for i in range(STORED_AT_ONCE)], self.dtype)
        if item.keys > 0:
            tcgen05.fence_before_signal()
            smem.dq_free.consumer_release(use)
