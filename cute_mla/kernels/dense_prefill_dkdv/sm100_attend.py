"""The attend role of the SM100 dK and dV kernel: P^T and dS^T from S^T and dP^T, and the rows of dK and dV.

A thread has a key, which is a lane of tensor memory, and half of the query rows of a tile. sm100.py describes pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.dense_prefill import D_V
from ...spec.dense_prefill_dkdv import TILE_KEYS
from ...spec.dense_prefill_dq import STATISTICS
from ..primitives import tcgen05
from ..primitives.elements import aligned, pack_pair, store_row
from .operands import Operands
from .posted_item import PostedItem
from .sm100_config import GROUP_WARPS, HALVES, KEYS_COLUMN, TMEM_LANE, VALUES_COLUMN, Geometry, Pipes, Tiles

STORED_AT_ONCE = 32  # columns of dV and dK
VECTOR = 4  # statistics of one access
WORD_BITS = 32


@dataclass(frozen=True)
class KeyRow:
    """A thread's key and its half of the query rows of a tile.

    lanes: tensor memory at the first lane of the warp. half: of the query rows. key: of the item. rP: fp32, P of the tile.
    """

    dtype: type[cutlass.Numeric]
    geometry: Geometry
    tiles: Tiles
    lanes: Int32
    half: Int32
    key: Int32
    scale_log2: Float32
    rP: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], geometry: Geometry, tiles: Tiles, tmem: Int32, half: Int32, scale_log2: Float32) -> KeyRow:
        """Return the row of this thread."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
        rP = cute.make_rmem_tensor(cute.make_layout(geometry.half_queries), Float32)
        key = cute.arch.thread_idx()[0] % TILE_KEYS
        return KeyRow(dtype, geometry, tiles, tmem + warp * (32 * TMEM_LANE), half, key, scale_log2, rP)

    def load(self, column: int) -> list[Float32]:
        """Load the thread's columns of S or dP, which begins at a column. They may be overwritten when this returns."""
        first, parts, count = self._columns(column), [], self.geometry.half_queries
        done = 0
        while done < count:
            size = 1 << ((count - done).bit_length() - 1)
            parts.append((tcgen05.load_columns(first + done, size), size))
            done += size
        tcgen05.await_loads()
        return [values[i] for values, size in parts for i in range(size)]

    def store(self, column: int, values: list[Float32]) -> None:
        """Store values, rounded, as A operand over the first of the thread's columns of S or dP; done when this returns."""
        words = [pack_pair(values[i], values[i + 1], self.dtype) for i in range(0, len(values), 2)]
        done = 0
        while done < len(words):
            size = 1 << ((len(words) - done).bit_length() - 1)
            tcgen05.store_columns(self._columns(column) + done, words[done : done + size])
            done += size
        tcgen05.await_stores()

    def statistic(self, stage: Int32, which: int) -> list[Float32]:
        """Load lse or delta of the thread's query rows."""
        size, half = self.geometry.tile_queries, self.geometry.half_queries
        source = self.tiles.statistics + (stage * (STATISTICS * size) + which * size + self.half * half)
        values: list[Float32] = []
        for first in range(0, half, VECTOR):
            rValues = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            cute.autovec_copy(cute.make_tensor(aligned(source + first, 16), rValues.layout), rValues)
            values += [rValues[i] for i in range(VECTOR)]
        return values

    def set_probabilities(self, scores: list[Float32], lse_log2: list[Float32]) -> None:
        """Set P to the exponentials of the scores."""
        for i in range(0, self.geometry.half_queries, 2):
            shift = (-lse_log2[i], -lse_log2[i + 1])
            exponents = cute.arch.fma_packed_f32x2((scores[i], scores[i + 1]), (self.scale_log2,) * 2, shift)
            self.rP[i], self.rP[i + 1] = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)

    def mask(self, hidden: Int32) -> None:
        """Set P of the rows that do not see the key to 0. hidden: rows of the tile, from its first on, that key 0 is hidden from.

        Selects, so that NaN vanishes.
        """
        limit = hidden + self.key - self.half * self.geometry.half_queries
        for start in range(0, self.geometry.half_queries, WORD_BITS):
            below = limit - start  # of this word's rows; ptxas makes predicates of seven bits at a time
            some = cutlass.select_(below > 0, ~(Int32(-1) << (below & (WORD_BITS - 1))), Int32(0))
            unseen = cutlass.select_(below >= WORD_BITS, Int32(-1), some)
            for bit in range(min(WORD_BITS, self.geometry.half_queries - start)):
                self.rP[start + bit] = cutlass.select_((unseen & (1 << bit)) != 0, Float32(0), self.rP[start + bit])

    def dscores(self, dprobs: list[Float32], delta: list[Float32]) -> list[Float32]:
        """Return dS^T = P^T (dP^T - delta)."""
        values: list[Float32] = []
        for i in range(0, self.geometry.half_queries, 2):
            slopes = cute.arch.fma_packed_f32x2((delta[i], delta[i + 1]), (Float32(-1.0),) * 2, (dprobs[i], dprobs[i + 1]))
            values += cute.arch.mul_packed_f32x2((self.rP[i], self.rP[i + 1]), slopes)
        return values

    def _columns(self, column: int) -> Int32:
        return self.lanes + (self.half * self.geometry.half_queries + column)


class AttendRole:
    """Two groups of four warps, each with half of the query rows of a tile."""

    def __init__(self, dtype: type[cutlass.Numeric], geometry: Geometry) -> None:
        self.dtype = dtype
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes, tmem: Int32, half: Int32):
        """Wait key_ready, query_ready, scores_ready, dprobs_ready, sums_ready.

        Signal key_free, probs_ready, dscores_ready, sums_free. Write dk and dv.
        """
        row = KeyRow.create(self.dtype, self.geometry, tiles, tmem, half, operands.scale_log2)
        use, turn, filled = Int32(0), Int32(0), Int32(0)
        pipes.key_ready.consumer_wait(turn)
        item = PostedItem.of_turn(tiles.items, turn)
        while item.more != 0:
            pipes.key_free.consumer_release(turn)
            until = use + item.tiles * operands.heads_per_kv
            hidden, last = item.hidden, item.hidden - (item.tiles - 1) * self.geometry.tile_queries
            while use < until:
                self.attend_tile(pipes, row, hidden, use)
                hidden = cutlass.select_(hidden > last, hidden - self.geometry.tile_queries, item.hidden)
                use = use + 1
            if item.tiles > 0:
                pipes.sums_ready.consumer_wait(filled)
                tcgen05.fence_after_wait()
            self.write_rows(operands, item, row)
            if item.tiles > 0:
                tcgen05.fence_before_signal()
                pipes.sums_free.consumer_release(filled)
                filled = filled + 1
            turn = turn + 1
            pipes.key_ready.consumer_wait(turn)
            item = PostedItem.of_turn(tiles.items, turn)

    @cute.jit
    def attend_tile(self, pipes: Pipes, row: KeyRow, hidden: Int32, use: Int32):
        """Compute P^T and dS^T of a tile. hidden: rows of the tile, from its first on, that key 0 of the item is hidden from."""
        geometry, stage = self.geometry, pipes.query_ready.stage(use)
        pipes.query_ready.consumer_wait(use)
        lse_log2 = row.statistic(stage, 0)
        pipes.scores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        row.set_probabilities(row.load(geometry.scores_column), lse_log2)
        if hidden + (TILE_KEYS - 1) > row.half * geometry.half_queries:
            row.mask(hidden)
        row.store(geometry.scores_column, [row.rP[i] for i in range(geometry.half_queries)])
        tcgen05.fence_before_signal()
        pipes.probs_ready.producer_commit(use)
        delta = row.statistic(stage, 1)
        pipes.dprobs_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        row.store(geometry.dprobs_column, row.dscores(row.load(geometry.dprobs_column), delta))
        tcgen05.fence_before_signal()
        pipes.dscores_ready.producer_commit(use)

    @cute.jit
    def write_rows(self, operands: Operands, item: PostedItem, row: KeyRow):
        """Write half of the columns of the key's rows of dV and dK, zeros if no row sees the item."""
        for first, columns, target, factor in (
            (VALUES_COLUMN, D_V, operands.dv_row(item, row.key), Float32(1)),
            (KEYS_COLUMN, self.geometry.d_qk, operands.dk_row(item, row.key), operands.softmax_scale),
        ):
            of_half = columns // HALVES
            for step in cutlass.range_constexpr(0, of_half, STORED_AT_ONCE):
                column = row.half * of_half + step
                values = tcgen05.load_columns(row.lanes + (first + column), STORED_AT_ONCE)
                tcgen05.await_loads()
                results = [cutlass.select_(item.tiles > 0, values[i] * factor, Float32(0)) for i in range(STORED_AT_ONCE)]
                if row.key < item.keys:
                    if operands.args.aligned != 0:
                        store_row(target + column, results, self.dtype, True)
                    else:
                        store_row(target + column, results, self.dtype, False)
