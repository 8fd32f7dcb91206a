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
from ..dense_prefill.board import Board
from ..dense_prefill.operands import WorkItem
from ..dense_prefill.sm90_attend import give_turn, take_turn
from ..dense_prefill.sm90_config import GROUP_ROWS, GROUPS
from ..dense_prefill.sm90_gradient import GradientProduct, ScoreProduct, gather_runs, store_row_words
from ..primitives.elements import aligned
from ..primitives.integers import smaller
from ..primitives.wgmma import ROWS_PER_THREAD, flat, fragment_column, fragment_row, half, quad_sum
from .operands import Operands
from .sm90_config import Geometry, Pipes, Tiles

CHUNK = 8  # elements of 16 bytes


@dataclass(frozen=True)
class Products:
    """The three products of one thread."""

    thread: Int32
    group: Int32
    scores: ScoreProduct  # S = Q K^T
    slopes: ScoreProduct  # dP = dO V^T
    gradient: GradientProduct  # dQ += dS K

    @staticmethod
    def create(dtype: type[cutlass.Numeric], tiles: Tiles, thread: Int32, group: Int32) -> Products:
        """Return the products of one thread of a warpgroup that computes."""
        return Products(
            thread=thread,
            group=group,
            scores=ScoreProduct.create(dtype, tiles.sQ, tiles.sK, thread),
            slopes=ScoreProduct.create(dtype, tiles.sD, tiles.sV, thread),
            gradient=GradientProduct.create(dtype, tiles.sK, thread),
        )

    def row(self, row_half: int) -> Int32:
        """Return the row of the item's block that one of the thread's fragment rows is."""
        return self.group * GROUP_ROWS + fragment_row(self.thread, row_half)


@dataclass(frozen=True)
class RowStatistics:
    """lse in log2 units, and delta, of the thread's two rows."""

    lse_log2: list[Float32]
    delta: list[Float32]


class AttendRole:
    """One of two warpgroups."""

    def __init__(self, dtype: type[cutlass.Numeric], geometry: Geometry) -> None:
        self.dtype = dtype
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes, thread: Int32, group: Int32):
        """Wait item_ready, key_ready, value_ready, query_ready. Signal item_free, key_free, value_free, query_free.

        Write dq and the statistics.
        """
        products = Products.create(self.dtype, tiles, thread, group)
        if group != 0:
            give_turn(group)
        use, done, turn = Int32(0), Int32(0), Int32(1)
        more, item = board.take(Int32(0))
        while more:
            products.gradient.clear()
            if item.keys > 0:
                statistics = self.row_statistics(operands, tiles, pipes, item, products, done)
                count = self.geometry.tiles(item.keys)
                for i in cutlass.range(count, unroll=1):
                    warpgroup.wait_group(0)
                    if i > 0:
                        pipes.key_free.consumer_release(use + i - 1)
                    self.start_scores(pipes, products, use + i)
                    warpgroup.wait_group(1)
                    self.probabilities(operands, products, statistics)
                    self.finish_scores(pipes, item, products, statistics, count - 1 - i)
                    self.release(pipes, group, use + i, done, i == count - 1)
                    self.start_gradient(pipes, products, use + i)
                warpgroup.wait_group(0)
                use = use + count
                pipes.key_free.consumer_release(use - 1)
                done = done + 1
            self.write_rows(operands, item, products)
            more, item = board.take(turn)
            turn = turn + 1
        if group == 0:
            take_turn(group)  # the one that the other warpgroup has given last

    @cute.jit
    def start_scores(self, pipes: Pipes, products: Products, use: Int32):
        """Issue S and dP of a tile, in this warpgroup's turn."""
        pipes.key_ready.consumer_wait(use)
        take_turn(products.group)
        warpgroup.fence()
        products.scores.start(products.group, pipes.key_ready.stage(use))
        pipes.value_ready.consumer_wait(use)
        products.slopes.start(products.group, pipes.value_ready.stage(use))
        give_turn(products.group)

    @cute.jit
    def start_gradient(self, pipes: Pipes, products: Products, use: Int32):
        """Round dS and issue dQ += dS K, in this warpgroup's turn."""
        products.gradient.round(products.scores.sum)
        take_turn(products.group)
        warpgroup.fence()
        products.gradient.start(pipes.key_ready.stage(use))
        give_turn(products.group)

    def probabilities(self, operands: Operands, products: Products, statistics: RowStatistics) -> None:
        """Replace S by P. P of keys that a row does not see is whatever their scores make it."""
        rS = flat(products.scores.sum)
        for i in range(cute.size(rS)):
            shifted = cute.math.fma(rS[i], operands.scale_log2, -statistics.lse_log2[half(i)])
            rS[i] = cute.math.exp2(shifted, fastmath=True)

    @cute.jit
    def finish_scores(self, pipes: Pipes, item: WorkItem, products: Products, statistics: RowStatistics, tile: Int32):
        """Replace P by dS = P (dP - delta), and by 0 where the row does not see the key.

        dP is complete when this begins to use it: the wait stands in both branches, since in front of them ptxas would move it in front of
        the exponentials.
        """
        size = self.geometry.tile_keys
        left = item.keys - tile * size
        seen = item.diagonal + 1 - tile * size  # by row 0 of the block
        if smaller(left, seen + products.group * GROUP_ROWS) < size:
            warpgroup.wait_group(0)
            limits = [smaller(left, seen + products.row(row_half)) for row_half in range(ROWS_PER_THREAD)]
            self.slope_scores(products, statistics, limits)
        else:
            warpgroup.wait_group(0)
            self.slope_scores(products, statistics, None)

    def slope_scores(self, products: Products, statistics: RowStatistics, limits: list[Int32] | None) -> None:
        """Replace P by dS. limits: keys of the tile that each row sees; None: all. Selects, so that NaN vanishes."""
        rS, rD = flat(products.scores.sum), flat(products.slopes.sum)
        for i in range(cute.size(rS)):
            slope = rS[i] * (rD[i] - statistics.delta[half(i)])
            if limits is not None:
                slope = cutlass.select_(fragment_column(products.thread, i) >= limits[half(i)], Float32(0), slope)
            rS[i] = slope

    @cute.jit
    def release(self, pipes: Pipes, group: Int32, use: Int32, done: Int32, last: Boolean):
        """Release V, and Q and dO after the last tile: S and dP are complete."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.value_free.barrier(use))
            if last:
                cute.arch.mbarrier_arrive(pipes.query_free.barrier(done * GROUPS + group))

    @cute.jit
    def row_statistics(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: WorkItem, products: Products, done: Int32):
        """Return lse and delta of the thread's rows, and leave them to the next kernel. Q and dO are in shared memory on return.

        Rows behind the sequence's repeat its last one; their results go nowhere. A row with an infinite lse has no gradient: its P is
        0, and so is its delta.
        """
        lses = [operands.lse_of(item, smaller(products.row(row_half), item.rows - 1)).load() for row_half in range(ROWS_PER_THREAD)]
        deltas = self.staged_deltas(operands, tiles, pipes, item, products, done)
        statistics = RowStatistics([], [])
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
    def staged_deltas(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: WorkItem, products: Products, done: Int32):
        """Return the thread's shares of delta of its rows, once Q and dO are in shared memory."""
        # on their way while TMA brings dO
        outs = [self.load_out(operands, item, products, row_half) for row_half in range(ROWS_PER_THREAD)]
        pipes.query_ready.consumer_wait(done * GROUPS + products.group)
        return [self.share_of_delta(tiles, products, row_half, outs[row_half]) for row_half in range(ROWS_PER_THREAD)]

    def load_out(self, operands: Operands, item: WorkItem, products: Products, row_half: int) -> list[cute.Tensor]:
        """Load the lane's quarter of a row of out: runs of 8 columns, 32 columns apart."""
        row = operands.out_row(item, smaller(products.row(row_half), item.rows - 1)) + CHUNK * (products.thread % 4)
        return [load_chunk(row + first, self.dtype) for first in range(0, self.geometry.d_v, 4 * CHUNK)]

    def share_of_delta(self, tiles: Tiles, products: Products, row_half: int, outs: list[cute.Tensor]) -> Float32:
        """Return the lane's share of a row's delta. The 128-byte swizzle moves run c of a row to run c ^ (row % 8)."""
        row, total = fragment_row(products.thread, row_half), Float32(0)
        base = tiles.sD.iterator + (products.group * (GROUP_ROWS * self.geometry.d_v) + row * BOX_COLUMNS)
        for number, out in enumerate(outs):
            box, run = divmod(4 * number, BOX_COLUMNS // CHUNK)
            place = (run + products.thread % 4) ^ (row % CHUNK)
            dout = load_chunk(base + (box * (GROUP_ROWS * BOX_COLUMNS) + CHUNK * place), self.dtype)
            for i in range(CHUNK):
                total = cute.math.fma(out[i].to(Float32), dout[i].to(Float32), total)
        return total

    @cute.jit
    def write_rows(self, operands: Operands, item: WorkItem, products: Products):
        """Write the rows of dQ that the sequence has."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            words, row = products.gradient.row_words(row_half, operands.softmax_scale), products.row(row_half)
            words = gather_runs(words, products.thread)
            if row < item.rows:
                store_row_words(operands.dq_row(item, row), words, products.thread, True)


def load_chunk(source: cute.Pointer, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Load 16 bytes, at a multiple of 16 bytes."""
    chunk = cute.make_rmem_tensor(cute.make_layout(CHUNK), dtype)
    cute.autovec_copy(cute.make_tensor(aligned(source, 16), cute.make_layout(CHUNK)), chunk)
    return chunk
