"""The attend role of the SM90 dense prefill kernel: S = Q K^T, softmax, O += P V with P and O in registers, out, lse.

Two warpgroups, each with 64 rows of an item, which issue their products in turn. sm90.py describes pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ..attention.softmax import OnlineSoftmax
from ..primitives.arithmetic import larger
from ..primitives.pipeline import arrive
from ..primitives.wgmma import ROWS_PER_THREAD
from .fragments import FragmentRows
from .operands import DensePrefillItem, DensePrefillOperands, DensePrefillRows, EveryKey, ItemQueue
from .sm90_config import GROUPS, TURN_BARRIER, WARPGROUP, DensePrefillSm90Geometry, DensePrefillSm90Smem
from .sm90_gemm import DensePrefillProducts


@dataclass(frozen=True)
class DensePrefillSm90AttendRole:
    """One of two warpgroups. key_mask: of the call."""

    dtype: type[cutlass.Numeric]
    geometry: DensePrefillSm90Geometry
    key_mask: EveryKey

    @property
    def rows(self) -> FragmentRows:
        """Return the rows of a thread."""
        return FragmentRows(self.geometry.tile_keys, self.geometry.config.d_v, self.geometry.written_columns)

    @cute.jit
    def run(
        self,
        operands: DensePrefillOperands,
        queue: ItemQueue,
        smem: DensePrefillSm90Smem,
        thread: Int32,
        group: Int32,
    ):
        """Wait item_ready, key_ready, value_ready, query_ready. Signal item_free, key_free, value_free, query_free. Write out and lse.

        P V of an item's last tile goes with the first S of the next item; the very first S goes with a P of zeros.
        """
        products = DensePrefillProducts.create(self.dtype, smem, thread, group)
        products.scores.clear()
        products.output.clear()
        softmax, ended = (OnlineSoftmax.create(operands.args.scale_log2) for _ in range(2))
        factors = [Float32(1), Float32(1)]
        if group != 0:
            give_turn(group)
        # fresh: whether the next P V is the first of its item. due: whether O then still is the result of the item before, `owed`
        use, done, turn = Int32(0), Int32(0), Int32(1)
        more, item = queue.take(Int32(0))
        fresh, due = self.key_mask.kept(Boolean(True)), self.key_mask.kept(Boolean(False))
        before, owed = DensePrefillRows.of(item), DensePrefillRows.none()
        while more:
            walk = item.walk(self.geometry.key_tiles(item.keys))
            rows, count = self.key_mask.rows_of(item, products, walk), walk.count
            if item.is_empty(count):
                self.rows.write_empty(operands, item, products)
            for i in cutlass.range(count, unroll=1):
                walk.advance()
                rows.load()
                if cutlass.const_expr(self.geometry.wide_output):
                    self.settle_output(smem, products, factors, use + i - 2, Boolean(fresh))
                if item.opens(i):
                    # rows past the sequence's end are whatever lies there; their results go nowhere
                    smem.query_ready.consumer_wait(done * GROUPS + products.group)
                if cutlass.const_expr(not self.geometry.wide_output):
                    self.settle_output(smem, products, factors, use + i - 2, Boolean(fresh))
                self.start_scores(smem, products, use + i)
                if Boolean(due):
                    give_turn(group)
                    self.rows.finish(operands, owed, products, ended)
                    warpgroup.fence()
                self.start_output(smem, products, larger(use + i - 1, Int32(0)), Boolean(fresh))
                if not Boolean(due):
                    give_turn(group)
                warpgroup.wait_group(1)
                self.free_operands(smem, group, use + i, done, item.closes(i, count))
                if item.opens(i):
                    start_anew(softmax, ended)
                    owed = before
                factors = self.softmax_step(item, products, softmax, walk.tile(i), rows)
                fresh = self.key_mask.kept(item.opens(i))
                due = self.key_mask.kept(Boolean(fresh) and (done > 0))
            if count > 0:
                use, done, before = use + count, item.items_after(done), DensePrefillRows.of(item)
            if cutlass.const_expr(item.in_parts):
                done = self.close_item(smem, item, products.group, done)
            more, item = queue.take(turn)
            turn = turn + 1
        if done > 0:
            self.settle_output(smem, products, factors, use - 2, Boolean(fresh))
            if Boolean(due):
                self.rows.finish(operands, owed, products, ended)
            warpgroup.fence()
            self.start_output(smem, products, use - 1, Boolean(fresh))
            warpgroup.wait_group(0)
            self.rows.finish(operands, before, products, softmax)
        if group == 0:
            take_turn(group)  # the one that the other warpgroup has given last

    @cute.jit
    def close_item(self, smem: DensePrefillSm90Smem, item: DensePrefillItem, group: Int32, done: Int32) -> Int32:
        """Release Q after an item whose last part has no tile. Return the number of items with tiles."""
        if item.closes_late():
            arrive(smem.query_free.barrier(done * GROUPS + group))
            done = done + 1
        return done

    def softmax_step(
        self, item: DensePrefillItem, products: DensePrefillProducts, softmax: OnlineSoftmax, tile: Int32, rows: EveryKey
    ) -> list[Float32]:
        """Turn the scores of a tile into probabilities. rows: the mask of the thread's rows. Return the factors that this asks of O."""
        rows.hide(products.scores.sum)
        self.rows.mask(item, products, products.scores.sum, tile)
        return softmax.add_tile(products.scores.sum)

    def start_scores(self, smem: DensePrefillSm90Smem, products: DensePrefillProducts, use: Int32) -> None:
        """Issue S of a tile in this warpgroup's turn."""
        smem.key_ready.consumer_wait(use)
        take_turn(products.group)
        warpgroup.fence()
        products.scores.start(products.group, smem.key_ready.stage(use))

    def start_output(self, smem: DensePrefillSm90Smem, products: DensePrefillProducts, use: Int32, fresh: Boolean) -> None:
        """Issue P V of a tile. fresh: whether it overwrites O."""
        smem.value_ready.consumer_wait(use)
        products.output.start(smem.value_ready.stage(use), fresh)

    @cute.jit
    def settle_output(self, smem: DensePrefillSm90Smem, products: DensePrefillProducts, factors: list[Float32], use: Int32, fresh: Boolean):
        """Prepare P V of a tile: O is relative to the maximum over all tiles up to it, unless it is `fresh`, and P is rounded.

        The P V in flight, with the values of `use`, is complete on return.

        Its wait stands here, at the head of the loop, and not after the softmax that it must not delay: in one block with the
        softmax, ptxas would move it in front.
        """
        warpgroup.wait_group(0)
        if use >= 0:
            smem.value_free.consumer_release(use)
        if not fresh and cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
            products.output.scale(factors)
        products.output.round(products.scores.sum)

    @cute.jit
    def free_operands(self, smem: DensePrefillSm90Smem, group: Int32, use: Int32, done: Int32, last: Boolean):
        """Release K, and Q after the last tile: S is complete."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            if last:  # first: Q of the next item is more urgent than its second tile of K
                cute.arch.mbarrier_arrive(smem.query_free.barrier(done * GROUPS + group))
            cute.arch.mbarrier_arrive(smem.key_free.barrier(use))


def start_anew(softmax: OnlineSoftmax, ended: OnlineSoftmax) -> None:
    """Copy the state to `ended` and forget all keys."""
    for row_half in range(ROWS_PER_THREAD):
        ended.row_ref[row_half], ended.rSum[row_half] = softmax.row_ref[row_half], softmax.rSum[row_half]
    softmax.reset()


def take_turn(group: Int32) -> None:
    """Wait until the other warpgroup has issued its products."""
    cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=GROUPS * WARPGROUP)


def give_turn(group: Int32) -> None:
    """Let the other warpgroup issue."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=GROUPS * WARPGROUP)
