"""The attend role of the SM90 dK and dV kernel: S^T = K Q^T, dP^T = V dO^T, P^T, dS^T, dV += P^T dO, dK += dS^T Q.

Two warpgroups, each with 64 keys of an item, which issue their products in turn. sm90.py describes pipelines and the trick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...spec.dense_prefill_dq import STATISTICS
from ..dense_prefill.sm90_attend import give_turn, take_turn
from ..dense_prefill.sm90_gradient import GradientProduct, ScoreProduct, gather_runs, store_row_words
from ..primitives.elements import aligned
from ..primitives.wgmma import ROWS_PER_THREAD, flat, fragment_column, fragment_row, half
from .operands import Operands
from .posted_item import PostedItem
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
            slopes=ScoreProduct.create(dtype, tiles.sV, tiles.sD, thread),
            values=GradientProduct.create(dtype, tiles.sD, thread),
            keys=GradientProduct.create(dtype, tiles.sQ, thread),
        )

    def key(self, row_half: int) -> Int32:
        """Return the key of the item that one of the thread's fragment rows is."""
        return self.group * GROUP_KEYS + fragment_row(self.thread, row_half)


# a gradient of the item's keys: the product whose sum it is, its factor, and where the row of a key lies
Sum = tuple[GradientProduct, Float32, Callable[[PostedItem, Int32], cute.Pointer]]


def key_sum(operands: Operands, products: Products) -> Sum:
    """Return dK."""
    return products.keys, operands.softmax_scale, operands.dk_row


def value_sum(operands: Operands, products: Products) -> Sum:
    """Return dV."""
    return products.values, Float32(1), operands.dv_row


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
            take_turn(group)  # half a tile behind the other warpgroup
            give_turn(group)
        use, turn = Int32(0), Int32(0)
        pipes.key_ready.consumer_wait(turn)
        item = PostedItem.of_turn(tiles.items, turn)
        while item.sums != 0:
            products.values.clear()
            products.keys.clear()
            if item.tiles > 0:
                until = use + item.tiles * operands.heads_per_kv
                hidden = item.hidden
                last = item.hidden - (item.tiles - 1) * self.geometry.tile_queries
                while use < until:
                    warpgroup.wait_group(0)
                    if use > 0:
                        self.release(pipes, use - 1)
                    self.attend_scores(operands, tiles, pipes, products, hidden, use)
                    if use + 1 == until:
                        pipes.key_free.consumer_release(turn)
                    self.attend_gradients(tiles, pipes, products, use)
                    hidden = cutlass.select_(hidden > last, hidden - self.geometry.tile_queries, item.hidden)
                    use = use + 1
                warpgroup.wait_group(0)
            else:
                pipes.key_free.consumer_release(turn)
                take_turn(group)  # without products: the other warpgroup waits for it with its last half tile
                give_turn(group)
            # read again, so that fewer registers are held during the loop
            sums = (key_sum(operands, products), value_sum(operands, products))
            self.write_rows(operands, PostedItem.of_turn(tiles.items, turn), products, sums)
            turn = turn + 1
            pipes.key_ready.consumer_wait(turn)
            item = PostedItem.of_turn(tiles.items, turn)
        if group == 0:
            take_turn(group)
            give_turn(group)  # for the half tile that the other warpgroup is behind
            take_turn(group)  # the one that it has given last

    @cute.jit
    def attend_scores(self, operands: Operands, tiles: Tiles, pipes: Pipes, products: Products, hidden: Int32, use: Int32):
        """Compute P^T, rounded, and dP^T of a tile, in two turns.

        hidden: rows of the tile, from its first on, that key 0 of the item is hidden from.
        """
        stage, group = pipes.query_ready.stage(use), products.group
        pipes.query_ready.consumer_wait(use)
        take_turn(group)
        warpgroup.fence()
        products.scores.start(group, stage)
        give_turn(group)
        warpgroup.wait_group(0)
        self.mask(products, hidden)
        self.probabilities(operands, tiles, products, stage)
        products.values.round(products.scores.sum)
        pipes.slope_ready.consumer_wait(use)
        take_turn(group)
        warpgroup.fence()
        products.slopes.start(group, stage)
        give_turn(group)
        warpgroup.wait_group(0)

    @cute.jit
    def attend_gradients(self, tiles: Tiles, pipes: Pipes, products: Products, use: Int32):
        """Issue dV and dK of a tile, in the third turn. They are not complete on return."""
        stage, group = pipes.query_ready.stage(use), products.group
        self.slope_scores(tiles, products, stage)
        products.keys.round(products.slopes.sum)
        take_turn(group)
        warpgroup.fence()
        products.values.start(stage)
        products.keys.start(stage)
        give_turn(group)

    @cute.jit
    def release(self, pipes: Pipes, use: Int32):
        """Release a tile of Q and of dO: all products with it are complete."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.query_free.barrier(use))
            cute.arch.mbarrier_arrive(pipes.slope_free.barrier(use))

    @cute.jit
    def mask(self, products: Products, hidden: Int32):
        """Set the scores of rows that do not see a key to -inf. Selects, so that NaN vanishes."""
        if hidden + (products.group + 1) * GROUP_KEYS > 1:
            rS = flat(products.scores.sum)
            limits = [hidden + products.key(row_half) for row_half in range(ROWS_PER_THREAD)]
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = cutlass.select_(fragment_column(products.thread, i) < limits[half(i)], -Float32.inf, rS[i])

    def statistic(self, tiles: Tiles, products: Products, stage: Int32, which: int, eight: int) -> cute.Tensor:
        """Load a statistic of the two rows that are columns 8 e + 2 (t % 4) and the next of the fragments."""
        size = self.geometry.tile_queries
        source = tiles.statistics + (stage * (STATISTICS * size) + which * size + 8 * eight + PAIR * (products.thread % 4))
        pair = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
        cute.autovec_copy(cute.make_tensor(aligned(source, 8), cute.make_layout(PAIR)), pair)
        return pair

    def probabilities(self, operands: Operands, tiles: Tiles, products: Products, stage: Int32) -> None:
        """Replace S^T by P^T."""
        rS = flat(products.scores.sum)
        for eight in range(self.geometry.tile_queries // 8):
            lse_log2 = self.statistic(tiles, products, stage, 0, eight)
            for i in range(4 * eight, 4 * eight + 4):
                shifted = cute.math.fma(rS[i], operands.scale_log2, -lse_log2[i % PAIR])
                rS[i] = cute.math.exp2(shifted, fastmath=True)

    def slope_scores(self, tiles: Tiles, products: Products, stage: Int32) -> None:
        """Replace dP^T by dS^T = P^T (dP^T - delta). P^T as it is rounded: there are no registers to keep it in fp32."""
        rP, rD = flat(products.values.factor), flat(products.slopes.sum)
        for eight in range(self.geometry.tile_queries // 8):
            delta = self.statistic(tiles, products, stage, 1, eight)
            for i in range(4 * eight, 4 * eight + 4):
                rD[i] = rP[i].to(Float32) * (rD[i] - delta[i % PAIR])

    @cute.jit
    def write_rows(self, operands: Operands, item: PostedItem, products: Products, sums: tuple[Sum, ...]):
        """Write the rows of some of dK and dV that the sequence has."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            key, thread = products.key(row_half), products.thread
            words = [product.row_words(row_half, factor) for product, factor, _ in sums]
            if operands.args.aligned != 0:
                runs = [gather_runs(of_row, thread) for of_row in words]
                if key < item.keys:
                    for number, (_, _, row) in enumerate(sums):
                        store_row_words(row(item, key), runs[number], thread, True)
            else:
                if key < item.keys:
                    for number, (_, _, row) in enumerate(sums):
                        store_row_words(row(item, key), words[number], thread, False)
