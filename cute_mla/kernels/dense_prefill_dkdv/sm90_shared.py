"""The attend roles of the SM90 dK and dV kernel where its warpgroups share the keys: heads of 256 columns.

A warpgroup has registers for one of the two sums. Both have the 64 keys of an item: one computes S^T, P^T and dV, the other dP^T, dS^T
and dK. P^T, rounded, goes from one to the other through shared memory. sm90.py describes pipelines and the trick.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ..dense_prefill.sm90_config import WARPGROUP
from ..primitives.elements import aligned, store_words
from ..primitives.wgmma import packed
from .operands import Operands
from .posted_item import PostedItem
from .sm90_attend import AttendRole, Products, Sum, key_sum, value_sum
from .sm90_config import GROUP_KEYS, Pipes, Tiles

CHUNK = 8  # elements of 16 bytes
CHUNK_WORDS = CHUNK // 2


class SharedKeyRole(AttendRole):
    """One of two warpgroups that go through the same tiles."""

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32):
        """Go through the work items, and write the rows of the sum. Wait key_ready; signal key_free."""
        products = Products.create(self.dtype, tiles, thread, Int32(0))
        own = self.sum_of(operands, products)
        use, turn = Int32(0), Int32(0)
        pipes.key_ready.consumer_wait(turn)
        item = PostedItem.of_turn(tiles.items, turn)
        while item.sums != 0:
            own[0].clear()
            if item.tiles > 0:
                first, until = use, use + item.tiles * operands.heads_per_kv
                hidden, last = item.hidden, item.hidden - (item.tiles - 1) * self.geometry.tile_queries
                while use < until:
                    self.start_scores(pipes, products, use)
                    warpgroup.wait_group(1)
                    if use > first:
                        self.release_sum(pipes, use - 1)
                    warpgroup.wait_group(0)
                    if use + 1 == until:
                        pipes.key_free.consumer_release(turn)
                    self.finish_scores(operands, tiles, pipes, products, (use, hidden))
                    warpgroup.fence()
                    own[0].start(pipes.query_ready.stage(use))
                    hidden = cutlass.select_(hidden > last, hidden - self.geometry.tile_queries, item.hidden)
                    use = use + 1
                warpgroup.wait_group(0)
                self.release_sum(pipes, use - 1)
            else:
                pipes.key_free.consumer_release(turn)
            self.write_rows(operands, item, products, (own,))
            turn = turn + 1
            pipes.key_ready.consumer_wait(turn)
            item = PostedItem.of_turn(tiles.items, turn)

    def sum_of(self, operands: Operands, products: Products) -> Sum:
        """Return the gradient that this warpgroup computes."""
        raise NotImplementedError

    def start_scores(self, pipes: Pipes, products: Products, use: Int32) -> None:
        """Issue the product of the keys with a tile."""
        raise NotImplementedError

    def finish_scores(self, operands: Operands, tiles: Tiles, pipes: Pipes, products: Products, tile: tuple[Int32, Int32]) -> None:
        """Make the factor of the sum from the product. tile: the number of its use, and the rows that key 0 of the item is hidden from."""
        raise NotImplementedError

    def release_sum(self, pipes: Pipes, use: Int32) -> None:
        """Release the tile that the sum has been multiplied with."""
        raise NotImplementedError

    def chunks(self, tiles: Tiles, products: Products, stage: Int32) -> list[cute.Pointer]:
        """Return where the thread's elements of P^T of a stage lie, 16 bytes each. Threads are neighbours, so that no banks conflict."""
        size = GROUP_KEYS * self.geometry.tile_queries
        base = tiles.probs + stage * size
        return [aligned(base + (CHUNK * WARPGROUP * i + CHUNK * products.thread), 16) for i in range(size // (CHUNK * WARPGROUP))]


class ValueSumRole(SharedKeyRole):
    """The warpgroup that computes S^T = K Q^T, P^T and dV += P^T dO."""

    def sum_of(self, operands: Operands, products: Products) -> Sum:
        """Return dV."""
        return value_sum(operands, products)

    def start_scores(self, pipes: Pipes, products: Products, use: Int32) -> None:
        """Wait query_ready. Issue S^T."""
        pipes.query_ready.consumer_wait(use)
        warpgroup.fence()
        products.scores.start(products.group, pipes.query_ready.stage(use))

    def finish_scores(self, operands: Operands, tiles: Tiles, pipes: Pipes, products: Products, tile: tuple[Int32, Int32]) -> None:
        """Compute P^T, rounded. Wait slope_ready. Signal probs_ready, query_free.

        P^T of a tile lies in the tile's stage: it is free when Q is.
        """
        use, hidden = tile
        stage = pipes.query_ready.stage(use)
        self.mask(products, hidden)
        self.probabilities(operands, tiles, products, stage)
        products.values.round(products.scores.sum)
        words = packed(products.values.factor)
        for i, chunk in enumerate(self.chunks(tiles, products, stage)):
            store_words(chunk, [words[CHUNK_WORDS * i + j] for j in range(CHUNK_WORDS)])
        pipes.probs_ready.producer_commit(use)
        pipes.query_free.consumer_release(use)
        pipes.slope_ready.consumer_wait(use)

    def release_sum(self, pipes: Pipes, use: Int32) -> None:
        """Release dO."""
        pipes.slope_free.consumer_release(use)


class KeySumRole(SharedKeyRole):
    """The warpgroup that computes dP^T = V dO^T, dS^T and dK += dS^T Q."""

    def sum_of(self, operands: Operands, products: Products) -> Sum:
        """Return dK."""
        return key_sum(operands, products)

    def start_scores(self, pipes: Pipes, products: Products, use: Int32) -> None:
        """Wait slope_ready. Issue dP^T."""
        pipes.slope_ready.consumer_wait(use)
        warpgroup.fence()
        products.slopes.start(products.group, pipes.slope_ready.stage(use))

    def finish_scores(self, operands: Operands, tiles: Tiles, pipes: Pipes, products: Products, tile: tuple[Int32, Int32]) -> None:
        """Compute dS^T, rounded. Wait probs_ready: the other warpgroup has seen that Q and its statistics are there. Signal slope_free."""
        use, stage = tile[0], pipes.query_ready.stage(tile[0])
        pipes.slope_free.consumer_release(use)
        pipes.probs_ready.consumer_wait(use)
        factor = products.values.factor
        for i, chunk in enumerate(self.chunks(tiles, products, stage)):
            eight = cute.make_layout(CHUNK)
            cute.autovec_copy(cute.make_tensor(chunk, eight), cute.make_tensor(factor.iterator + CHUNK * i, eight))
        self.slope_scores(tiles, products, stage)
        products.keys.round(products.slopes.sum)

    def release_sum(self, pipes: Pipes, use: Int32) -> None:
        """Release Q and its statistics, and P^T."""
        pipes.query_free.consumer_release(use)
