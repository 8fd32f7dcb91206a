"""The attend role of the SM90 dK and dV kernel: S^T = K Q^T, dP^T = V dO^T, P^T, dS^T, dV += P^T dO, dK += dS^T Q.

Two warpgroups, each with 64 keys of an item, which issue their products in turn. sm90.py describes pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...spec.dense_prefill_dq import STATISTICS
from ..dense_prefill.sm90_attend import give_turn, take_turn
from ..dense_prefill.sm90_gradient import GradientProduct, ScoreProduct, gather_runs, store_row_words
from ..primitives.elements import aligned
from ..primitives.wgmma import ROWS_PER_THREAD, flat, fragment_column, fragment_row, half
from .operands import KeyItem, Operands
from .sm90_config import GROUP_KEYS, Geometry, Pipes, Tiles

PAIR = 2  # neighbouring columns of a fragment


@dataclass(frozen=True)
class Products:
    """The four products of one thread."""

    thread: Int32
    group: Int32
    scores: ScoreProduct  # S^T = K Q^T
    slopes: ScoreProduct  # dP^T = V dO^T
    values: GradientProduct  # dV += P^T dO
    keys: GradientProduct  # dK += dS^T Q

    @staticmethod
    def create(dtype: type[cutlass.Numeric], tiles: Tiles, thread: Int32, group: Int32) -> Products:
        """Return the products of one thread of a warpgroup that computes."""
        return Products(
            thread=thread,
            group=group,
            scores=ScoreProduct.create(dtype, tiles.sK, tiles.sQ, thread),
            slopes=ScoreProduct.create(dtype, tiles.sV, tiles.sdO, thread),
            values=GradientProduct.create(dtype, tiles.sdO, thread),
            keys=GradientProduct.create(dtype, tiles.sQ, thread),
        )

    def key(self, row_half: int) -> Int32:
        """Return the key of the item that one of the thread's fragment rows is."""
        return self.group * GROUP_KEYS + fragment_row(self.thread, row_half)


class AttendRole:
    """One of two warpgroups."""

    def __init__(self, dtype: type[cutlass.Numeric], geometry: Geometry) -> None:
        self.dtype = dtype
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32, group: Int32):
        """Wait key_ready, query_ready, slope_ready. Signal key_free, query_free, slope_free. Write dk and dv."""
        products = Products.create(self.dtype, tiles, thread, group)
        if group != 0:
            give_turn(group)
        use, done, size = Int32(0), Int32(0), self.geometry.tile_queries
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            if item.keys > 0:
                products.values.clear()
                products.keys.clear()
                count = self.geometry.tiles(item)
                if count > 0:
                    pipes.key_ready.consumer_wait(done)
                    first = item.first_query
                    for i in cutlass.range(count * operands.heads_per_kv, unroll=1):
                        warpgroup.wait_group(0)
                        if i > 0:
                            self.release(pipes, use + i - 1)
                        self.start_scores(pipes, products, use + i)
                        warpgroup.wait_group(1)
                        self.probabilities(operands, tiles, products, pipes.query_ready.stage(use + i))
                        self.finish_scores(tiles, item, products, first, pipes.query_ready.stage(use + i))
                        self.start_gradients(pipes, products, use + i)
                        first = first + size
                        first = cutlass.select_(first < item.queries, first, item.first_query)
                    warpgroup.wait_group(0)
                    use = use + count * operands.heads_per_kv
                    self.release(pipes, use - 1)
                    pipes.key_free.consumer_release(done)
                    done = done + 1
                self.write_rows(operands, item, products)
        if group == 0:
            take_turn(group)  # the one that the other warpgroup has given last

    @cute.jit
    def start_scores(self, pipes: Pipes, products: Products, use: Int32):
        """Issue S^T and dP^T of a tile, in this warpgroup's turn."""
        pipes.query_ready.consumer_wait(use)
        take_turn(products.group)
        warpgroup.fence()
        products.scores.start(products.group, pipes.query_ready.stage(use))
        pipes.slope_ready.consumer_wait(use)
        products.slopes.start(products.group, pipes.slope_ready.stage(use))
        give_turn(products.group)

    @cute.jit
    def start_gradients(self, pipes: Pipes, products: Products, use: Int32):
        """Round P and dS and issue dV += P^T dO and dK += dS^T Q, in this warpgroup's turn."""
        products.values.round(products.scores.sum)
        products.keys.round(products.slopes.sum)
        take_turn(products.group)
        warpgroup.fence()
        products.values.start(pipes.slope_ready.stage(use))
        products.keys.start(pipes.query_ready.stage(use))
        give_turn(products.group)

    @cute.jit
    def release(self, pipes: Pipes, use: Int32):
        """Release a tile of Q and of dO: all products with it are complete."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.query_free.barrier(use))
            cute.arch.mbarrier_arrive(pipes.slope_free.barrier(use))

    def statistic(self, tiles: Tiles, products: Products, stage: Int32, which: int, eight: int) -> cute.Tensor:
        """Load a statistic of the two rows that are columns 8 e + 2 (t % 4) and the next of the fragments."""
        size = self.geometry.tile_queries
        source = tiles.statistics + (stage * (STATISTICS * size) + which * size + 8 * eight + PAIR * (products.thread % 4))
        pair = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
        cute.autovec_copy(cute.make_tensor(aligned(source, 8), cute.make_layout(PAIR)), pair)
        return pair

    def probabilities(self, operands: Operands, tiles: Tiles, products: Products, stage: Int32) -> None:
        """Replace S^T by P^T. P of keys that a row does not see is whatever their scores make it."""
        rS = flat(products.scores.sum)
        for eight in range(self.geometry.tile_queries // 8):
            lse_log2 = self.statistic(tiles, products, stage, 0, eight)
            for i in range(4 * eight, 4 * eight + 4):
                shifted = cute.math.fma(rS[i], operands.scale_log2, -lse_log2[i % PAIR])
                rS[i] = cute.math.exp2(shifted, fastmath=True)

    @cute.jit
    def finish_scores(self, tiles: Tiles, item: KeyItem, products: Products, first: Int32, stage: Int32):
        """Replace dP^T by dS^T = P^T (dP^T - delta), and both P^T and dS^T by 0 where the row does not see the key.

        dP^T is complete when this begins to use it: the wait stands in both branches, since in front of them ptxas would move it in front
        of the exponentials.
        """
        hidden = item.diagonal - first  # key 0 of the item is hidden from that many rows of the tile
        if hidden + (products.group + 1) * GROUP_KEYS > 1:
            warpgroup.wait_group(0)
            self.slope_scores(tiles, products, stage, [hidden + products.key(row_half) for row_half in range(ROWS_PER_THREAD)])
        else:
            warpgroup.wait_group(0)
            self.slope_scores(tiles, products, stage, None)

    def slope_scores(self, tiles: Tiles, products: Products, stage: Int32, hidden: list[Int32] | None) -> None:
        """Replace dP^T by dS^T. hidden: rows of the tile that each of the thread's keys is hidden from. Selects, so that NaN vanishes."""
        rS, rdP = flat(products.scores.sum), flat(products.slopes.sum)
        for eight in range(self.geometry.tile_queries // 8):
            delta = self.statistic(tiles, products, stage, 1, eight)
            for i in range(4 * eight, 4 * eight + 4):
                slope = rS[i] * (rdP[i] - delta[i % PAIR])
                if hidden is not None:
                    beyond = fragment_column(products.thread, i) < hidden[half(i)]
                    slope = cutlass.select_(beyond, Float32(0), slope)
                    rS[i] = cutlass.select_(beyond, Float32(0), rS[i])
                rdP[i] = slope

    @cute.jit
    def write_rows(self, operands: Operands, item: KeyItem, products: Products):
        """Write the rows of dK and dV that the sequence has."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            key, thread = products.key(row_half), products.thread
            of_keys = products.keys.row_words(row_half, operands.softmax_scale)
            of_values = products.values.row_words(row_half, Float32(1))
            if operands.args.aligned != 0:
                keys_runs, values_runs = gather_runs(of_keys, thread), gather_runs(of_values, thread)
                if key < item.keys:
                    store_row_words(operands.dk_row(item, key), keys_runs, thread, True)
                    store_row_words(operands.dv_row(item, key), values_runs, thread, True)
            else:
                if key < item.keys:
                    store_row_words(operands.dk_row(item, key), of_keys, thread, False)
                    store_row_words(operands.dv_row(item, key), of_values, thread, False)
