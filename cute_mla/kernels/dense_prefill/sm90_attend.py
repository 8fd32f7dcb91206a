"""The attend role of the SM90 dense prefill kernel: S = Q K^T, softmax, O += P V with P and O in registers, out, lse.

Two warpgroups, each with 64 rows of an item, which issue their products in turn. sm90.py describes pipelines and the trick.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ..attention.softmax import LN2, OnlineSoftmax, mask_keys
from ..primitives.elements import store_words
from ..primitives.integers import larger, smaller
from ..primitives.pipeline import arrive
from ..primitives.wgmma import ROWS_PER_THREAD, fragment_row, gather_eights
from .board import Board
from .key_mask import EveryKey
from .operands import Operands, Rows, WorkItem
from .sm90_config import GROUP_ROWS, GROUPS, TURN_BARRIER, WARPGROUP, Geometry, Pipes, Tiles
from .sm90_gemm import Products


class AttendRole:
    """One of two warpgroups. key_mask: of the call."""

    def __init__(self, dtype: type[cutlass.Numeric], geometry: Geometry, key_mask: EveryKey) -> None:
        self.dtype = dtype
        self.geometry = geometry
        self.key_mask = key_mask

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes, thread: Int32, group: Int32):
        """Wait item_ready, key_ready, value_ready, query_ready. Signal item_free, key_free, value_free, query_free. Write out and lse.

        P V of an item's last tile goes with the first S of the next item; the very first S goes with a P of zeros.
        """
        products = Products.create(self.dtype, tiles, thread, group)
        products.clear()
        softmax, ended = (OnlineSoftmax.create(operands.scale_log2) for _ in range(2))
        factors = [Float32(1), Float32(1)]
        if group != 0:
            give_turn(group)
        # fresh: whether the next P V is the first of its item. due: whether O then still is the result of the item before, `owed`
        use, done, turn = Int32(0), Int32(0), Int32(1)
        more, item = board.take(Int32(0))
        fresh, due = self.key_mask.kept(Boolean(True)), self.key_mask.kept(Boolean(False))
        before, owed = Rows.of(item), Rows.none()
        while more:
            walk = item.walk(self.geometry.key_tiles(item.keys))
            rows, count = self.key_mask.rows_of(item, products, walk), walk.count
            if item.is_empty(count):
                self.write_empty_rows(operands, item, products)
            for i in cutlass.range(count, unroll=1):
                walk.advance()
                rows.load()
                if cutlass.const_expr(self.geometry.wide_output):
                    self.settle_output(pipes, products, factors, use + i - 2, Boolean(fresh))
                if item.opens(i):
                    # rows behind the sequence's are whatever lies there; their results go nowhere
                    pipes.query_ready.consumer_wait(done * GROUPS + products.group)
                if cutlass.const_expr(not self.geometry.wide_output):
                    self.settle_output(pipes, products, factors, use + i - 2, Boolean(fresh))
                self.start_scores(pipes, products, use + i)
                if Boolean(due):
                    give_turn(group)
                    self.finish_rows(operands, owed, products, ended)
                    warpgroup.fence()
                self.start_output(pipes, products, larger(use + i - 1, Int32(0)), Boolean(fresh))
                if not Boolean(due):
                    give_turn(group)
                warpgroup.wait_group(1)
                self.free_operands(pipes, group, use + i, done, item.closes(i, count))
                if item.opens(i):
                    start_anew(softmax, ended)
                    owed = before
                factors = self.softmax_step(item, products, softmax, walk.tile(i), rows)
                fresh = self.key_mask.kept(item.opens(i))
                due = self.key_mask.kept(Boolean(fresh) and (done > 0))
            if count > 0:
                use, done, before = use + count, item.items_after(done), Rows.of(item)
            if cutlass.const_expr(item.in_parts):
                done = self.close_item(pipes, item, products.group, done)
            more, item = board.take(turn)
            turn = turn + 1
        if done > 0:
            self.settle_output(pipes, products, factors, use - 2, Boolean(fresh))
            if Boolean(due):
                self.finish_rows(operands, owed, products, ended)
            warpgroup.fence()
            self.start_output(pipes, products, use - 1, Boolean(fresh))
            warpgroup.wait_group(0)
            self.finish_rows(operands, before, products, softmax)
        if group == 0:
            take_turn(group)  # the one that the other warpgroup has given last

    @cute.jit
    def close_item(self, pipes: Pipes, item: WorkItem, group: Int32, done: Int32) -> Int32:
        """Release Q behind an item whose last part has no tile. Return the number of items with tiles."""
        if item.closes_late():
            arrive(pipes.query_free.barrier(done * GROUPS + group))
            done = done + 1
        return done

    def softmax_step(self, item: WorkItem, products: Products, softmax: OnlineSoftmax, tile: Int32, rows: EveryKey) -> list[Float32]:
        """Turn the scores of a tile into probabilities. rows: the mask of the thread's rows. Return the factors that this asks of O."""
        rows.hide(products.scores)
        self.mask(item, products, tile)
        return softmax.add_tile(products.scores)

    def start_scores(self, pipes: Pipes, products: Products, use: Int32) -> None:
        """Issue S of a tile in this warpgroup's turn."""
        pipes.key_ready.consumer_wait(use)
        take_turn(products.group)
        warpgroup.fence()
        products.start_scores(pipes.key_ready.stage(use))

    def start_output(self, pipes: Pipes, products: Products, use: Int32, fresh: Boolean) -> None:
        """Issue P V of a tile. fresh: whether it overwrites O."""
        pipes.value_ready.consumer_wait(use)
        products.start_output(pipes.value_ready.stage(use), fresh)

    @cute.jit
    def settle_output(self, pipes: Pipes, products: Products, factors: list[Float32], use: Int32, fresh: Boolean):
        """Prepare P V of a tile: O is relative to the maximum over all tiles up to it, unless it is `fresh`, and P is rounded.

        The P V in flight, with the values of `use`, is complete on return.

        Its wait stands here, at the head of the loop, and not behind the softmax that it must not delay: in one block with the
        softmax, ptxas would move it in front.
        """
        warpgroup.wait_group(0)
        if use >= 0:
            pipes.value_free.consumer_release(use)
        if not fresh and cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
            products.scale_output(factors)
        products.round_probs()

    @cute.jit
    def free_operands(self, pipes: Pipes, group: Int32, use: Int32, done: Int32, last: Boolean):
        """Release K, and Q after the last tile: S is complete."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if last:  # first: Q of the next item is more urgent than its second tile of K
                cute.arch.mbarrier_arrive(pipes.query_free.barrier(done * GROUPS + group))
            cute.arch.mbarrier_arrive(pipes.key_free.barrier(use))

    @cute.jit
    def mask(self, item: WorkItem, products: Products, tile: Int32):
        """Mask keys past the end, and causally hidden ones."""
        tile_keys = self.geometry.tile_keys
        left = item.keys - tile * tile_keys
        seen = item.diagonal + 1 - tile * tile_keys  # by row 0 of the block
        if smaller(left, seen + products.group * GROUP_ROWS) < tile_keys:
            limits = [smaller(left, seen + block_row(products, row_half)) for row_half in range(ROWS_PER_THREAD)]
            mask_keys(products.scores, products.thread, limits)

    @cute.jit
    def finish_rows(self, operands: Operands, rows: Rows, products: Products, softmax: OnlineSoftmax):
        """Normalise, and writes the rows that the sequence has."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = softmax.row_sum(row_half)
            empty = total == 0.0
            inverse = cutlass.select_(empty, Float32(0), 1.0 / total)
            lse = (softmax.row_ref[row_half] + cute.math.log2(total, fastmath=True)) * LN2
            for first in cutlass.range_constexpr(0, self.geometry.d_v, self.geometry.written_columns):
                words = products.row_words(row_half, inverse, first, self.geometry.written_columns)
                words = [cutlass.select_(empty, Int32(0), word) for word in words]
                words = [word for i in range(0, len(words), 4) for word in gather_eights(words[i : i + 4], products.thread)]
                self.write_row(operands, rows, products, row_half, first, words, cutlass.select_(empty, operands.empty_lse, lse))

    @cute.jit
    def write_empty_rows(self, operands: Operands, item: WorkItem, products: Products):
        """Write the rows of a block that sees no key."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            words = [Int32(0)] * (self.geometry.d_v // 8)
            self.write_row(operands, Rows.of(item), products, row_half, 0, words, operands.empty_lse)

    @cute.jit
    def write_row(self, operands: Operands, rows: Rows, products: Products, row_half: int, first: int, words: list[Int32], lse: Float32):
        """Write columns of one of the thread's rows from `first` on, and with the first ones lse, if the sequence has the row."""
        row, thread = block_row(products, row_half), products.thread
        if row < rows.rows:
            if cutlass.const_expr(first == 0) and thread % 4 == 0:
                operands.lse_of(rows, row).store(lse)
            self.store_row(operands.out_row(rows, row) + first, words, thread)

    def store_row(self, target: cute.Pointer, words: list[Int32], thread: Int32) -> None:
        """Store a quad's row of out: a lane has runs of 8 columns."""
        for i in range(0, len(words), 4):
            store_words(target + (8 * i + 8 * (thread % 4)), words[i : i + 4])


def start_anew(softmax: OnlineSoftmax, ended: OnlineSoftmax) -> None:
    """Copy the state to `ended` and forget all keys."""
    for row_half in range(ROWS_PER_THREAD):
        ended.row_ref[row_half], ended.rSum[row_half] = softmax.row_ref[row_half], softmax.rSum[row_half]
    softmax.reset()


def block_row(products: Products, row_half: int) -> Int32:
    """Return the row of the item's block that one of the thread's fragment rows is."""
    return products.group * GROUP_ROWS + fragment_row(products.thread, row_half)


def take_turn(group: Int32) -> None:
    """Wait until the other warpgroup has issued its products."""
    cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=GROUPS * WARPGROUP)


def give_turn(group: Int32) -> None:
    """Let the other warpgroup issue."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=GROUPS * WARPGROUP)
