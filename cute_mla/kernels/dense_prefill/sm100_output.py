"""The output role of the SM100 kernel: a thread has a row of O of each Q tile, a lane of tensor memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.rows import store_packed_row, store_row
from .operands import DensePrefillItem, DensePrefillOperands, ItemQueue
from .sm100_config import (
    D_V,
    EVEN_CTA,
    GROUP,
    OUTPUT_COLUMN,
    QUERY_TILES,
    TILE_ROWS,
    DensePrefillPairGeometry,
    DensePrefillPairSmem,
    DensePrefillSm100Smem,
    QueryTileWork,
    RowTables,
    cta_rank,
    first_lane,
    key_tiles,
)

SCALED_AT_ONCE = 16  # columns of O; with 32 ptxas spills two registers
STORED_AT_ONCE = 32


@dataclass(frozen=True)
class OutputRows:
    """O of one Q tile. tile, row: the Q tile, and this thread's row of it. place: address of O at the first lane of the warp.

    columns: of O.
    """

    dtype: type[cutlass.Numeric]
    smem: RowTables
    tile: int | Int32
    row: Int32
    place: Int32
    columns: int

    @staticmethod
    def create(dtype: type[cutlass.Numeric], smem: RowTables, lanes: Int32, tile: int, columns: int = D_V) -> OutputRows:
        """Return O of one Q tile for this thread. lanes: tensor memory at the first lane of the warp."""
        row = cute.arch.thread_idx()[0] % GROUP
        return OutputRows(dtype, smem, tile, row, lanes + (OUTPUT_COLUMN + tile * columns), columns)

    def factor(self) -> Float32:
        """Return the row's rescale factor."""
        return (self.smem.sAlpha + (self.tile * TILE_ROWS + self.row)).load()

    def inverse(self) -> Float32:
        """Return 1 / row sum, 0 for a row that attends to nothing."""
        return (self.smem.sInverse + (self.tile * TILE_ROWS + self.row)).load()

    def scale(self, alpha: Float32) -> None:
        """Multiply O by alpha; done when this returns."""
        for first in range(0, self.columns, SCALED_AT_ONCE):
            values = tcgen05.load_columns(self.place + first, SCALED_AT_ONCE)
            tcgen05.await_loads()
            products: list[Float32] = []
            for i in range(0, SCALED_AT_ONCE, 2):
                products += cute.arch.mul_packed_f32x2((values[i], values[i + 1]), (alpha, alpha))
            tcgen05.store_columns(self.place + first, products, Float32)
        tcgen05.await_stores()

    @cute.jit
    def store(self, target: cute.Pointer, rows: Int32, inverse: Float32, accumulated: Boolean):
        """Store O / row sum, or zeros if nothing was accumulated, to a row of out, if it is one of the `rows` of the sequence."""
        for first in cutlass.range_constexpr(0, self.columns, STORED_AT_ONCE):
            rO = cute.make_rmem_tensor(cute.make_layout(STORED_AT_ONCE), Float32)
            rO.fill(0.0)
            if accumulated:
                values = tcgen05.load_columns(self.place + first, STORED_AT_ONCE)
                tcgen05.await_loads()
                for i in cutlass.range_constexpr(STORED_AT_ONCE):
                    # a row that attends to nothing is 0 whatever tensor memory holds
                    rO[i] = cutlass.select_(inverse == 0.0, Float32(0), values[i] * inverse)
            if self.row < rows:
                store_row(target + first, [rO[i] for i in range(STORED_AT_ONCE)], self.dtype)


def ends(item: DensePrefillItem, work: QueryTileWork) -> Boolean:
    """Return whether a Q tile has rows and all products of the item."""
    return work.rows > 0 if item.complete is True else (work.rows > 0) & item.complete


@dataclass(frozen=True)
class DensePrefillSm100OutputRole:
    """Four warps."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: DensePrefillOperands, queue: ItemQueue, smem: DensePrefillSm100Smem, tmem: Int32):
        """Wait item_ready, alpha_ready, output_ready, sums_ready. Signal item_free, probs_ready, sums_free. Write out."""
        rows = [OutputRows.create(self.dtype, smem, first_lane(tmem), tile) for tile in range(QUERY_TILES)]
        own = [smem.of_tile(tile) for tile in range(QUERY_TILES)]
        more, turn = Boolean(True), Int32(0)
        # of each Q tile: key tiles, items that have some, items
        done, outputs, sums = [Int32(0), Int32(0)], [Int32(0), Int32(0)], [Int32(0), Int32(0)]
        for tile in cutlass.range_constexpr(QUERY_TILES):
            own[tile].probs_ready.producer_commit(0)  # O is free for the first item
        while more:
            more, item = queue.take(turn)
            works = [QueryTileWork.create(item, tile) for tile in range(QUERY_TILES)]
            for t in cutlass.range(item.leading, item.walk(key_tiles(item.keys)).count, unroll=1):
                for tile in cutlass.range_constexpr(QUERY_TILES):
                    step = t - works[tile].skipped
                    if item.follows(step):
                        # an item's first key tile has no factors
                        self.rescale(own[tile], rows[tile], done[tile] + step, done[tile] - outputs[tile] + step - 1)
            for tile in cutlass.range_constexpr(QUERY_TILES):
                work = works[tile]
                if ends(item, work):
                    if item.accumulated(work.tiles):
                        own[tile].output_ready.consumer_wait(outputs[tile])
                        tcgen05.fence_after_wait()
                        outputs[tile] = outputs[tile] + 1
                    own[tile].sums_ready.consumer_wait(sums[tile])
                    inverse = rows[tile].inverse()
                    own[tile].sums_free.consumer_release(sums[tile])
                    sums[tile] = sums[tile] + 1
                    target = operands.row("out", item, tile * TILE_ROWS + rows[tile].row)
                    rows[tile].store(target, work.rows, inverse, item.accumulated(work.tiles))
                    if item.accumulated(work.tiles):
                        done[tile] = done[tile] + work.tiles
                        tcgen05.fence_before_signal()
                        own[tile].probs_ready.producer_commit(done[tile])  # O is free for the next item
                if cutlass.const_expr(item.in_parts):
                    done[tile] = done[tile] + cutlass.select_(item.complete, Int32(0), work.tiles)
            turn = turn + 1

    @cute.jit
    def rescale(self, own: DensePrefillSm100Smem, rows: OutputRows, use: Int32, alpha_use: Int32):
        """Multiply O by alpha where the reference has moved, then let P V of a Q tile's next key tile begin.

        The factor has come when S of that key tile has, and S comes after P V of the key tile before.
        """
        own.alpha_ready.consumer_wait(alpha_use)
        alpha = rows.factor()
        if cute.arch.vote_any_sync(alpha != 1.0):
            tcgen05.fence_after_wait()
            rows.scale(alpha)
            tcgen05.fence_before_signal()
        own.probs_ready.producer_commit(use)


class DensePrefillPairOutputRole:
    """Four warps of each CTA."""

    def __init__(self, dtype: type[cutlass.Numeric], geometry: DensePrefillPairGeometry) -> None:
        self.dtype = dtype
        self.columns = geometry.config.d_v

    @cute.jit
    def run(self, operands: DensePrefillOperands, queue: ItemQueue, smem: DensePrefillPairSmem, tmem: Int32):
        """Wait item_ready, alpha_ready, output_ready, sums_ready. Signal item_free, probs_ready, sums_free. Write out."""
        rows = OutputRows.create(self.dtype, smem, first_lane(tmem), 0, self.columns)
        more, turn, done, sums = Boolean(True), Int32(0), Int32(0), Int32(0)
        smem.probs_ready.producer_commit(Int32(0), EVEN_CTA)  # O is free for the first item
        while more:
            more, item = queue.take(turn)
            if item.rows > 0:
                count, first_row = key_tiles(item.keys), cta_rank() * TILE_ROWS
                for t in cutlass.range(1, count, unroll=1):
                    self.rescale(smem, rows, done + t)
                if count > 0:
                    smem.output_ready.consumer_wait(done + count - 1)
                    tcgen05.fence_after_wait()
                smem.sums_ready.consumer_wait(sums)
                inverse = rows.inverse()
                smem.sums_free.consumer_release(sums)
                sums = sums + 1
                words = [Int32(0)] * (self.columns // 2)
                if count > 0:
                    words = self.take(rows, inverse)
                    done = done + count
                    tcgen05.fence_before_signal()
                    smem.probs_ready.producer_commit(done, EVEN_CTA)  # O is free for the next item
                if first_row + rows.row < item.rows:
                    store_packed_row(operands.row("out", item, first_row + rows.row), words)
            turn = turn + 1

    def take(self, rows: OutputRows, inverse: Float32) -> list[Int32]:
        """Return the thread's row of O / row sum, rounded, two columns a word. A row that attends to nothing is 0."""
        words = []
        for first in range(0, self.columns, STORED_AT_ONCE):
            values = tcgen05.load_columns(rows.place + first, STORED_AT_ONCE)
            tcgen05.await_loads()
            for i in range(0, STORED_AT_ONCE, 2):
                word = pack_pair(values[i] * inverse, values[i + 1] * inverse, self.dtype)
                words.append(cutlass.select_(inverse == 0.0, Int32(0), word))
        return words

    @cute.jit
    def rescale(self, smem: DensePrefillPairSmem, rows: OutputRows, use: Int32):
        """Multiply O by alpha where the reference has moved, then let P V of the use-th key tile, not an item's first, begin."""
        smem.alpha_ready.consumer_wait(use)
        alpha = replace(rows, tile=smem.alpha_ready.stage(use)).factor()
        smem.output_ready.consumer_wait(use - 1)
        if cute.arch.vote_any_sync(alpha != 1.0):
            tcgen05.fence_after_wait()
            rows.scale(alpha)
            tcgen05.fence_before_signal()
        smem.probs_ready.producer_commit(use, EVEN_CTA)
