"""The attend role of the SM90 dQ kernel: statistics of the rows, S = Q K^T, dP = dO V^T, dS, dQ += dS K.

Two warpgroups, each with 64 rows of an item, which issue their products in turn. sm90.py describes pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...spec.dense_prefill import BOX_COLUMNS
from ...spec.mla import LOG2E
from ..dense_prefill.operands import DensePrefillItem, ItemQueue
from ..dense_prefill.sm90_attend import give_turn, take_turn
from ..dense_prefill.sm90_config import GROUP_ROWS, GROUPS
from ..dense_prefill.sm90_gemm import ScoreProduct, SumProduct, gather_runs, store_row_words
from ..primitives.arithmetic import smaller
from ..primitives.rows import aligned
from ..primitives.wgmma import ROWS_PER_THREAD, flat, fragment_column, fragment_row, half, quad_sum
from .operands import DqOperands
from .sm90_config import DqSm90Geometry, DqSm90Smem

CHUNK = 8  # elements of 16 bytes


@dataclass(frozen=True)
class DqSm90Products:
    """The three products of one thread."""

    thread: Int32
    group: Int32
    scores: ScoreProduct  # S = Q K^T
    dprobs: ScoreProduct  # dP = dO V^T
    gradient: SumProduct  # dQ += dS K

    @staticmethod
    def create(dtype: type[cutlass.Numeric], smem: DqSm90Smem, thread: Int32, group: Int32) -> DqSm90Products:
        """Return the products of one thread of a warpgroup that computes."""
        return DqSm90Products(
            thread=thread,
            group=group,
            scores=ScoreProduct.create(dtype, smem.sQ, smem.sK, thread),
            dprobs=ScoreProduct.create(dtype, smem.sD, smem.sV, thread),
            gradient=SumProduct.create(dtype, smem.sK, thread),
        )

    def row(self, row_half: int) -> Int32:
        """Return the row of the item's block that one of the thread's fragment rows is."""
        return self.group * GROUP_ROWS + fragment_row(self.thread, row_half)


@dataclass(frozen=True)
class DqRowStatistics:
    """lse in log2 units, and delta, of the thread's two rows."""

    lse_log2: list[Float32]
    delta: list[Float32]


@dataclass(frozen=True)
class DqSm90AttendRole:
    """One of two warpgroups."""

    dtype: type[cutlass.Numeric]
    geometry: DqSm90Geometry

    @cute.jit
    def run(self, operands: DqOperands, queue: ItemQueue, smem: DqSm90Smem, thread: Int32, group: Int32):
        """Wait item_ready, key_ready, value_ready, query_ready. Signal item_free, key_free, value_free, query_free.

        Write dq and the statistics.
        """
        products = DqSm90Products.create(self.dtype, smem, thread, group)
        if group != 0:
            give_turn(group)
        use, done, turn = Int32(0), Int32(0), Int32(1)
        more, item = queue.take(Int32(0))
        while more:
            products.gradient.clear()
            if item.keys > 0:
                statistics = self.row_statistics(operands, smem, item, products, done)
                count = self.geometry.key_tiles(item.keys)
                for i in cutlass.range(count, unroll=1):
                    warpgroup.wait_group(0)
                    if i > 0:
                        smem.key_free.consumer_release(use + i - 1)
                    self.start_scores(smem, products, use + i)
                    warpgroup.wait_group(1)
                    self.probabilities(operands, products, statistics)
                    self.finish_scores(smem, item, products, statistics, count - 1 - i)
                    self.release(smem, group, use + i, done, i == count - 1)
                    self.start_gradient(smem, products, use + i)
                warpgroup.wait_group(0)
                use = use + count
                smem.key_free.consumer_release(use - 1)
                done = done + 1
            self.write_rows(operands, item, products)
            more, item = queue.take(turn)
            turn = turn + 1
        if group == 0:
            take_turn(group)  # the one that the other warpgroup has given last

    @cute.jit
    def start_scores(self, smem: DqSm90Smem, products: DqSm90Products, use: Int32):
        """Issue S and dP of a tile, in this warpgroup's turn."""
        smem.key_ready.consumer_wait(use)
        take_turn(products.group)
        warpgroup.fence()
        products.scores.start(products.group, smem.key_ready.stage(use))
        smem.value_ready.consumer_wait(use)
        products.dprobs.start(products.group, smem.value_ready.stage(use))
        give_turn(products.group)

    @cute.jit
    def start_gradient(self, smem: DqSm90Smem, products: DqSm90Products, use: Int32):
        """Round dS and issue dQ += dS K, in this warpgroup's turn."""
        products.gradient.round(products.scores.sum)
        take_turn(products.group)
        warpgroup.fence()
        products.gradient.start(smem.key_ready.stage(use))
        give_turn(products.group)

    def probabilities(self, operands: DqOperands, products: DqSm90Products, statistics: DqRowStatistics) -> None:
        """Replace S by P. P of keys that a row does not see is whatever their scores make it."""
        rS = flat(products.scores.sum)
        for i in range(cute.size(rS)):
            shifted = cute.math.fma(rS[i], operands.args.scale_log2, -statistics.lse_log2[half(i)])
            rS[i] = cute.math.exp2(shifted, fastmath=True)

    @cute.jit
    def finish_scores(self, smem: DqSm90Smem, item: DensePrefillItem, products: DqSm90Products, statistics: DqRowStatistics, tile: Int32):
        """Replace P by dS = P (dP - delta), and by 0 where the row does not see the key.

        dP is complete when this begins to use it: the wait stands in both branches, since in front of them ptxas would move it in front of
        the exponentials.
        """
        size = self.geometry.tile_keys
        remaining = item.keys - tile * size
        seen = item.diagonal + 1 - tile * size  # by row 0 of the block
        if smaller(remaining, seen + products.group * GROUP_ROWS) < size:
            warpgroup.wait_group(0)
            limits = [smaller(remaining, seen + products.row(row_half)) for row_half in range(ROWS_PER_THREAD)]
            self.make_dscores(products, statistics, limits)
        else:
            warpgroup.wait_group(0)
            self.make_dscores(products, statistics, None)

    def make_dscores(self, products: DqSm90Products, statistics: DqRowStatistics, limits: list[Int32] | None) -> None:
        """Replace P by dS. limits: keys of the tile that each row sees; None: all. Selects, so that NaN vanishes."""
        rS, rD = flat(products.scores.sum), flat(products.dprobs.sum)
        for i in range(cute.size(rS)):
            dscore = rS[i] * (rD[i] - statistics.delta[half(i)])
            if limits is not None:
                dscore = cutlass.select_(fragment_column(products.thread, i) >= limits[half(i)], Float32(0), dscore)
            rS[i] = dscore

    @cute.jit
    def release(self, smem: DqSm90Smem, group: Int32, use: Int32, done: Int32, last: Boolean):
        """Release V, and Q and dO after the last tile: S and dP are complete."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(smem.value_free.barrier(use))
            if last:
                cute.arch.mbarrier_arrive(smem.query_free.barrier(done * GROUPS + group))

    @cute.jit
    def row_statistics(self, operands: DqOperands, smem: DqSm90Smem, item: DensePrefillItem, products: DqSm90Products, done: Int32):
        """Return lse and delta of the thread's rows, and leave them to the next kernel. Q and dO are in shared memory on return.

        Rows past the sequence's end repeat its last one; their results go nowhere. A row with an infinite lse has no gradient: its P is
        0, and so is its delta.
        """
        lses = [operands.row("lse", item, smaller(products.row(row_half), item.rows - 1)).load() for row_half in range(ROWS_PER_THREAD)]
        deltas = self.staged_deltas(operands, smem, item, products, done)
        statistics = DqRowStatistics([], [])
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row, lse = products.row(row_half), lses[row_half]
            none = (lse == Float32.inf) | (lse == -Float32.inf)
            lse_log2 = cutlass.select_(none, Float32.inf, lse * LOG2E)
            delta = cutlass.select_(none, Float32(0), quad_sum(deltas[row_half]))
            if row < item.rows and products.thread % 4 == 0:
                operands.statistic_of(item, row, 0).store(lse_log2)
                operands.statistic_of(item, row, 1).store(delta)
            statistics.lse_log2.append(lse_log2)
            statistics.delta.append(delta)
        return statistics

    @cute.jit
    def staged_deltas(self, operands: DqOperands, smem: DqSm90Smem, item: DensePrefillItem, products: DqSm90Products, done: Int32):
        """Return the thread's shares of delta of its rows, once Q and dO are in shared memory."""
        # on their way while TMA brings dO
        outs = [self.load_out(operands, item, products, row_half) for row_half in range(ROWS_PER_THREAD)]
        smem.query_ready.consumer_wait(done * GROUPS + products.group)
        return [self.share_of_delta(smem, products, row_half, outs[row_half]) for row_half in range(ROWS_PER_THREAD)]

    def load_out(self, operands: DqOperands, item: DensePrefillItem, products: DqSm90Products, row_half: int) -> list[cute.Tensor]:
        """Load the lane's quarter of a row of out: runs of 8 columns, 32 columns apart."""
        row = operands.row("out", item, smaller(products.row(row_half), item.rows - 1)) + CHUNK * (products.thread % 4)
        return [load_chunk(row + first, self.dtype) for first in range(0, self.geometry.config.d_v, 4 * CHUNK)]

    def share_of_delta(self, smem: DqSm90Smem, products: DqSm90Products, row_half: int, outs: list[cute.Tensor]) -> Float32:
        """Return the lane's share of a row's delta. The 128-byte swizzle moves run c of a row to run c ^ (row % 8)."""
        row, total = fragment_row(products.thread, row_half), Float32(0)
        base = smem.sD.iterator + (products.group * (GROUP_ROWS * self.geometry.config.d_v) + row * BOX_COLUMNS)
        for number, out in enumerate(outs):
            box, run = divmod(4 * number, BOX_COLUMNS // CHUNK)
            place = (run + products.thread % 4) ^ (row % CHUNK)
            dout = load_chunk(base + (box * (GROUP_ROWS * BOX_COLUMNS) + CHUNK * place), self.dtype)
            for i in range(CHUNK):
                total = cute.math.fma(out[i].to(Float32), dout[i].to(Float32), total)
        return total

    @cute.jit
    def write_rows(self, operands: DqOperands, item: DensePrefillItem, products: DqSm90Products):
        """Write the rows of dQ that the sequence has."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            words, row = products.gradient.row_words(row_half, operands.args.softmax_scale), products.row(row_half)
            words = gather_runs(words, products.thread)
            if row < item.rows:
                store_row_words(operands.row("dq", item, row), words, products.thread, True)


def load_chunk(source: cute.Pointer, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Load 16 bytes, at a multiple of 16 bytes."""
    chunk = cute.make_rmem_tensor(cute.make_layout(CHUNK), dtype)
    cute.autovec_copy(cute.make_tensor(aligned(source, 16), cute.make_layout(CHUNK)), chunk)
    return chunk
