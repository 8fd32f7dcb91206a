"""The attend role of the SM100 dK and dV kernel: P^T and dS^T from S^T and dP^T, and the rows of dK and dV.

A warp has 32 keys, which are lanes of tensor memory, and half of the query rows of a tile. sm100.py describes pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_prefill_dq import STATISTICS
from ..dense_prefill.sm100_softmax import exp2_on_fma
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_pair
from ..primitives.rows import aligned, store_row
from .load import DkdvPostedItem
from .operands import DkdvOperands
from .sm100_config import (
    GROUP_WARPS,
    HALVES,
    POLYNOMIAL_PAIRS,
    TILE_KEYS,
    TMEM_LANE,
    VALUES_COLUMN,
    DkdvSm100Geometry,
    DkdvSm100Smem,
)

STORED_AT_ONCE = 32  # columns of dV and dK
LANE_PARTS = 2  # of a warp's lanes of tensor memory: 16 each
QUAD = 4  # threads that share keys
EIGHT = 8  # query rows of a quad
PAIR = 2  # of them, of a thread
PAIRS_PER_GROUP = 8  # of exponentials

Pair = tuple[Float32, Float32]


@dataclass(frozen=True)
class DkdvKeyRows:
    """A thread's part of S or dP of a tile: four keys, and a quarter of the query rows of its half.

    Elements are those of load_fragment, of 16 keys and then of the next 16. A row a lane would need four times as many loads of lse and
    delta, which are the same for all keys.
    first_lane: tensor memory at the first lane of the warp. half: of the query rows. key: the first of the thread's keys, of the item.
    """

    dtype: type[cutlass.Numeric]
    geometry: DkdvSm100Geometry
    smem: DkdvSm100Smem
    first_lane: Int32
    half: Int32
    key: Int32
    scale_log2: Float32

    @staticmethod
    def create(
        dtype: type[cutlass.Numeric], geometry: DkdvSm100Geometry, smem: DkdvSm100Smem, tmem: Int32, half: Int32, scale_log2: Float32
    ) -> DkdvKeyRows:
        """Return the part of this thread."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
        key = warp * 32 + cute.arch.lane_idx() // QUAD
        return DkdvKeyRows(dtype, geometry, smem, tmem + warp * (32 * TMEM_LANE), half, key, scale_log2)

    def load(self, column: int, first: int, end: int) -> list[Float32]:
        """Load the thread's part of rows first .. end - 1 of S or dP, which begins at a column. It may be overwritten when this returns."""
        runs = power_runs(first, end)
        parts = [(tcgen05.load_fragment(self._place(column, part) + row, size), size) for part in range(LANE_PARTS) for row, size in runs]
        tcgen05.await_loads()
        return [values[i] for values, size in parts for i in range(size // 2)]

    def store(self, column: int, first: int, values: list[Float32]) -> None:
        """Store values of rows from `first` on, rounded, as A operand in the first of the half's columns; done when this returns."""
        words = [pack_pair(values[i], values[i + 1], self.dtype) for i in range(0, len(values), PAIR)]
        count = len(words) // LANE_PARTS
        for part in range(LANE_PARTS):
            own = words[part * count : (part + 1) * count]
            for word, size in power_runs(0, count):
                tcgen05.store_fragment(self._place(column, part) + (first // PAIR + word * 2), own[word : word + size])
        tcgen05.await_stores()

    def statistic(self, stage: Int32, which: int) -> list[Pair]:
        """Load lse or delta of the thread's query rows, in pairs, one of every eight rows."""
        size, half = self.geometry.tile_queries, self.geometry.half_queries
        place = which * size + self.half * half + PAIR * (cute.arch.lane_idx() % QUAD)
        source = self.smem.statistics + (stage * (STATISTICS * size) + place)
        pairs = []
        for eight in range(0, half, EIGHT):
            rPair = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
            cute.autovec_copy(cute.make_tensor(aligned(source + eight, 8), rPair.layout), rPair)
            pairs.append((rPair[0], rPair[1]))
        return pairs

    def set_probabilities(self, probs: cute.Tensor, scores: list[Float32], lse_log2: list[Pair]) -> None:
        """Set P to the exponentials of the scores of as many rows."""
        shifts, on_fma = [(-first, -second) for first, second in lse_log2], POLYNOMIAL_PAIRS[self.geometry.config.d_qk]
        for i in range(0, len(scores), PAIR):
            exponents = cute.arch.fma_packed_f32x2((scores[i], scores[i + 1]), (self.scale_log2,) * 2, shifts[eight_of(i, len(scores))])
            if i // PAIR * on_fma % PAIRS_PER_GROUP < on_fma:
                probs[i], probs[i + 1] = exp2_on_fma(exponents)
            else:
                probs[i], probs[i + 1] = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)

    def mask(self, probs: cute.Tensor, hidden: Int32) -> None:
        """Set P of the rows that do not see a key to 0. hidden: rows from the first one on that key 0 is hidden from.

        Selects, so that NaN vanishes.
        """
        count = cute.size(probs)
        limit = hidden + self.key - PAIR * (cute.arch.lane_idx() % QUAD)
        for i in range(count):
            part, of_part = i // (count // LANE_PARTS), i // PAIR % 2
            row = EIGHT * eight_of(i, count) + i % PAIR - (16 * part + EIGHT * of_part)
            probs[i] = cutlass.select_(limit > row, Float32(0), probs[i])

    def dscores(self, probs: cute.Tensor, dprobs: list[Float32], delta: list[Pair]) -> list[Float32]:
        """Return dS^T = P^T (dP^T - delta) of as many rows."""
        values: list[Float32] = []
        for i in range(0, len(dprobs), PAIR):
            differences = cute.arch.fma_packed_f32x2(delta[eight_of(i, len(dprobs))], (Float32(-1.0),) * 2, (dprobs[i], dprobs[i + 1]))
            values += cute.arch.mul_packed_f32x2((probs[i], probs[i + 1]), differences)
        return values

    def _place(self, column: int, part: int) -> Int32:
        return self.first_lane + (self.half * self.geometry.half_queries + column + part * (16 * TMEM_LANE))


def power_runs(first: int, end: int) -> list[tuple[int, int]]:
    """Return (first, size) of runs that make up first .. end - 1, with powers of two for sizes."""
    runs = []
    while first < end:
        size = 1 << ((end - first).bit_length() - 1)
        runs.append((first, size))
        first += size
    return runs


def eight_of(element: int, count: int) -> int:
    """Return which eight of the query rows of `count` elements one of them is in."""
    return element % (count // LANE_PARTS) // 4


@dataclass(frozen=True)
class DkdvSm100AttendRole:
    """Two groups of four warps, each with half of the query rows of a tile."""

    dtype: type[cutlass.Numeric]
    geometry: DkdvSm100Geometry

    @cute.jit
    def run(self, operands: DkdvOperands, smem: DkdvSm100Smem, tmem: Int32, half: Int32):
        """Wait key_ready, statistic_ready, scores_ready, dprobs_ready, sums_ready.

        Signal key_free, statistic_free, probs_ready, rest_ready, dscores_ready, sums_free. Write dk and dv.
        """
        rows = DkdvKeyRows.create(self.dtype, self.geometry, smem, tmem, half, operands.args.scale_log2)
        use, turn, filled = Int32(0), Int32(0), Int32(0)
        smem.key_ready.consumer_wait(turn)
        item = DkdvPostedItem.of_turn(smem.items, turn)
        while item.sums != 0:
            smem.key_free.consumer_release(turn)
            sums = self.geometry.sums_of(item)
            until = use + item.tiles * operands.args.heads_per_kv
            hidden, last = item.hidden, item.hidden - (item.tiles - 1) * self.geometry.tile_queries
            while use < until:
                self.attend_tile(smem, rows, (hidden, use), sums)
                hidden = cutlass.select_(hidden > last, hidden - self.geometry.tile_queries, item.hidden)
                use = use + 1
            if item.tiles > 0:
                smem.sums_ready.consumer_wait(filled)
                tcgen05.fence_after_wait()
            self.write_rows(operands, item, rows)
            if item.tiles > 0:
                tcgen05.fence_before_signal()
                smem.sums_free.consumer_release(filled)
                filled = filled + 1
            turn = turn + 1
            smem.key_ready.consumer_wait(turn)
            item = DkdvPostedItem.of_turn(smem.items, turn)

    @cute.jit
    def attend_tile(self, smem: DkdvSm100Smem, rows: DkdvKeyRows, tile: tuple[Int32, Int32], sums: tuple[Boolean | bool, Boolean | bool]):
        """Compute P^T and dS^T of a tile.

        tile: the rows of the tile, from its first on, that key 0 of the item is hidden from; the number of its use. sums: whether the
        item has dV, dK: what it does not need is not computed, but handed over all the same.
        """
        (hidden, use), (of_values, of_keys) = tile, sums
        geometry, stage = self.geometry, smem.statistic_ready.stage(use)
        ranges, signals = geometry.parts, (smem.probs_ready, smem.rest_ready)
        probs = [cute.make_rmem_tensor(cute.make_layout(end - first), Float32) for first, end in ranges]
        smem.statistic_ready.consumer_wait(use)
        lse_log2 = rows.statistic(stage, 0)
        smem.scores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        for part in cutlass.range_constexpr(len(ranges)):
            first, end = ranges[part]
            scores = rows.load(geometry.scores_column, first, end)
            rows.set_probabilities(probs[part], scores, lse_log2[first // EIGHT : end // EIGHT])
            hidden_of_part = hidden - (rows.half * geometry.half_queries + first)
            if hidden_of_part + (TILE_KEYS - 1) > 0:
                rows.mask(probs[part], hidden_of_part)
            if of_values:
                rows.store(geometry.scores_column, first, [probs[part][i] for i in range(end - first)])
            tcgen05.fence_before_signal()
            signals[part].producer_commit(use)
        delta = rows.statistic(stage, 1)
        smem.statistic_free.consumer_release(use)
        smem.dprobs_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        if of_keys:
            for part in cutlass.range_constexpr(len(ranges)):
                first, end = ranges[part]
                dprobs = rows.load(geometry.dprobs_column, first, end)
                rows.store(geometry.dprobs_column, first, rows.dscores(probs[part], dprobs, delta[first // EIGHT : end // EIGHT]))
        tcgen05.fence_before_signal()
        smem.dscores_ready.producer_commit(use)

    @cute.jit
    def write_rows(self, operands: DkdvOperands, item: DkdvPostedItem, rows: DkdvKeyRows):
        """Write half of the columns of a key's rows of the item's sums, zeros if no row sees the item. A thread has a key."""
        key, geometry = cute.arch.thread_idx()[0] % TILE_KEYS, self.geometry
        of_values, of_keys = geometry.sums_of(item)
        for wanted, first, columns, target, factor in (
            (of_values, VALUES_COLUMN, geometry.config.d_v, operands.row("dv", item, key), Float32(1)),
            (of_keys, geometry.keys_column, geometry.config.d_qk, operands.row("dk", item, key), operands.args.softmax_scale),
        ):
            of_half = columns // HALVES
            if wanted:
                for step in cutlass.range_constexpr(0, of_half, STORED_AT_ONCE):
                    column = rows.half * of_half + step
                    values = tcgen05.load_columns(rows.first_lane + (first + column), STORED_AT_ONCE)
                    tcgen05.await_loads()
                    results = [cutlass.select_(item.tiles > 0, values[i] * factor, Float32(0)) for i in range(STORED_AT_ONCE)]
                    if key < item.keys:
                        if operands.args.aligned != 0:
                            store_row(target + column, results, self.dtype, True)
                        else:
                            store_row(target + column, results, self.dtype, False)
