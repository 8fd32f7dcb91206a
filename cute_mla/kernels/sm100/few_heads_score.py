"""The score role of the SM100 kernels with keys on M: softmax over the lanes, P to shared memory, rescale factors.

A column of S^T is a query row, whose 64 keys lie in eight lanes of four warps. So a row's maximum takes shuffles among eight lanes and one
exchange among the warps of a group, through shared memory. All threads then know the references of their rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..attention.softmax import Window, follow_maximum, follow_tile, shift_of
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_word, pin_register, product
from ..primitives.copies import CHUNK
from ..primitives.rows import store_vector
from ..primitives.smem import clear_rows
from .config import GROUP, GROUP_WARPS
from .few_heads_cta import (
    KEYS_APART,
    PART_BOXES,
    ROW_GROUP,
    SOFTMAX_BARRIER,
    THREAD_ROWS,
    FewHeadsSmemSm100,
    FewHeadsThreadSm100,
    registers_of,
)

LANES_APART = (4, 8, 16)  # that have the same rows
WARP = 32
# of the greatest P of a tile: sm100_fp8.py
WINDOW = Window(placed=5.0, above=3.75)


def log2_dither(lane: Int32) -> Float32:
    """Return the binary logarithm of the factor of a thread's probabilities before they are rounded: attention.softmax.DITHER.

    Neighbouring keys have different factors, a thread's two keys the same.
    """
    r = lane // 4
    reversed_bits = (r & 1) * 4 + (r & 2) + (r >> 2)
    return cute.math.log2(Float32(2 * reversed_bits + 249) * Float32(1 / 256), fastmath=True)


@dataclass(frozen=True)
class FewHeadsSoftmaxSm100:
    """Running state of a thread's rows.

    dither: log2_dither of e4m3 probabilities; None of others. rS: S^T, then probabilities. reference, greatest: as follow_tile has them.
    rSum: this thread's share of the sums.
    """

    smem: FewHeadsSmemSm100
    thread: FewHeadsThreadSm100
    scale_log2: Float32
    dither: Float32 | None
    rS: cute.Tensor
    reference: cute.Tensor
    greatest: cute.Tensor
    rSum: cute.Tensor

    @classmethod
    def create(cls, smem: FewHeadsSmemSm100, thread: FewHeadsThreadSm100, scale_log2: Float32) -> Self:
        """Return the state of rows that have seen nothing."""
        rows = smem.geometry.thread_rows
        scores, *state = (cute.make_rmem_tensor(cute.make_layout(count), Float32) for count in (2 * rows, rows, rows, rows))
        dither = log2_dither(thread.lane) if smem.geometry.sums_probs else None
        return cls(smem, thread, scale_log2, dither, scores, *state)

    @property
    def rows(self) -> int:
        """Return the rows of a thread."""
        return self.smem.geometry.thread_rows

    def reset(self) -> None:
        """Forget all keys."""
        self.reference.fill(-Float32.inf)
        self.greatest.fill(-Float32.inf)
        self.rSum.fill(0.0)

    @cute.jit
    def read(self, tile: Int32, lanes: Int32):
        """Load S^T of a tile. Wait scores_ready, signal scores_free. lanes: tensor memory at the warp's first lane."""
        smem, geometry = self.smem, self.smem.geometry
        smem.scores_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        column = smem.scores_ready.stage(tile) * geometry.rows + self.thread.group * geometry.group_rows
        scores = tcgen05.load_fragment(lanes + (geometry.score_column + column), geometry.group_rows)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        for i in cutlass.range_constexpr(2 * self.rows):
            self.rS[i] = scores[i]
        smem.scores_free.consumer_release(tile)

    def mask_row(self, row: int, seen: Int32) -> None:
        """Set the scores of one of the thread's rows from key `seen` on, counted from the thread's first key, to -inf."""
        for half, i in enumerate(registers_of(row)):
            self.rS[i] = cutlass.select_(half * KEYS_APART >= seen, -Float32.inf, self.rS[i])

    @cute.jit
    def add_tile(self, tile: Int32):
        """Replace S^T, absent keys -inf, by unnormalised probabilities. Write rescale factors, signal alpha_ready."""
        maxima = self.maxima(tile)
        factors = []
        for row in cutlass.range_constexpr(self.rows):
            candidate = maxima[row] * self.scale_log2
            self.reference[row], alpha = self.follow(row, candidate)
            factors.append(alpha)
        self.publish_alpha(tile, factors)
        for row in cutlass.range_constexpr(self.rows):
            shift = -shift_of(self.reference[row])
            if cutlass.const_expr(self.dither is not None):
                shift = shift + self.dither
            first, second = registers_of(row)
            for i in (first, second):
                self.rS[i] = cute.math.exp2(cute.math.fma(self.rS[i], self.scale_log2, shift), fastmath=True)
            self.rSum[row] = self.rSum[row] * factors[row] + (self.rS[first] + self.rS[second])

    def follow(self, row: int, candidate: Float32) -> tuple[Float32, Float32]:
        """Return (a row's new reference, the factor for what was accumulated) from the scaled maximum of a tile."""
        if not self.smem.geometry.sums_probs:
            return follow_maximum(self.reference[row], candidate)
        self.greatest[row] = cute.arch.fmax(self.greatest[row], candidate)
        return follow_tile(self.reference[row], candidate, self.greatest[row], WINDOW)

    @cute.jit
    def publish_alpha(self, tile: Int32, factors: list[Float32]):
        """Hand the rescale factors of a tile to the output role. One warp of a group."""
        if self.thread.warp == 0:
            if self.thread.lane < 4:
                self._store_rows(self.smem.sAlpha + self.smem.alpha_ready.stage(tile) * self.smem.geometry.rows, factors)
            self.smem.alpha_ready.producer_commit(tile)

    def maxima(self, tile: Int32) -> list[Float32]:
        """Return the maxima of the thread's rows over all keys of a tile.

        Of the eight lanes with the same rows, each gets the maximum of one row, or two that of one; it meets those of the other warps. So a
        warp reads shared memory four times, a word a lane, whatever the rows.
        """
        found = []
        for row in range(self.rows):
            first, second = registers_of(row)
            found.append(cute.arch.fmax(self.rS[first], self.rS[second]))
        for apart in LANES_APART[::-1]:
            found = self._halved(found, apart)
        lane = self.thread.lane
        table = self.smem.sMaxima + ((tile & 1) * self.smem.geometry.groups + self.thread.group) * GROUP
        (table + (self.thread.warp * WARP + lane)).store(found[0])
        self.sync_group()
        a, b, c, d = ((table + (warp * WARP + lane)).load() for warp in range(GROUP_WARPS))
        own = cute.arch.fmax(cute.arch.fmax(a, b), cute.arch.fmax(c, d))
        holders = WARP // self.rows  # from a lane with a row to that with the next one
        return [cute.arch.shuffle_sync(own, lane % 4 + row * holders) for row in range(self.rows)]

    def _halved(self, values: list[Float32], apart: int) -> list[Float32]:
        """Return the maxima of half of the values, the second half in the upper of two lanes; of a single one in both."""
        if len(values) == 1:
            return [cute.arch.fmax(values[0], cute.arch.shuffle_sync_bfly(values[0], apart))]
        lower, upper = values[: len(values) // 2], values[len(values) // 2 :]
        is_upper = (self.thread.lane & apart) != 0
        kept = [cutlass.select_(is_upper, high, low) for low, high in zip(lower, upper, strict=True)]
        sent = [cutlass.select_(is_upper, low, high) for low, high in zip(lower, upper, strict=True)]
        return [cute.arch.fmax(own, cute.arch.shuffle_sync_bfly(other, apart)) for own, other in zip(kept, sent, strict=True)]

    def _summed(self, value: Float32) -> Float32:
        """Return the sum over the lanes that have the same rows."""
        for apart in LANES_APART:
            value = value + cute.arch.shuffle_sync_bfly(value, apart)
        return value

    @cute.jit
    def sync_group(self):
        """Synchronise the four warps of a group."""
        if cutlass.const_expr(self.smem.geometry.groups == 1) or self.thread.group == 0:
            cute.arch.barrier(barrier_id=SOFTMAX_BARRIER, number_of_threads=GROUP)
        else:
            cute.arch.barrier(barrier_id=SOFTMAX_BARRIER + 1, number_of_threads=GROUP)

    def _store_rows(self, table: cute.Pointer, values: list[Float32]) -> None:
        for first in range(0, self.rows, THREAD_ROWS):
            store_vector(table + self.thread.row(self.smem.geometry, first), values[first : first + THREAD_ROWS], Float32)

    def store_probs(self, tile: Int32, dtype: type[cutlass.Numeric]) -> None:
        """Store P of a tile, over its RoPE columns: a row of swizzled bytes for each key."""
        geometry, thread = self.smem.geometry, self.thread
        nbytes, own_bytes = geometry.element_bytes, THREAD_ROWS * geometry.element_bytes
        place = self.smem.rope(tile) + thread.key * geometry.probs_bytes
        chunks, threads = geometry.probs_bytes // CHUNK, CHUNK // own_bytes  # threads: whose rows are a chunk
        flip = thread.key // (8 // chunks) % chunks
        for group in range(geometry.group_rows // ROW_GROUP):
            number = (thread.group * (geometry.group_rows // ROW_GROUP) + group) * nbytes + thread.lane % 4 // threads
            for half in range(2):
                values = [self.rS[8 * group + 4 * pair + 2 * half + place] for pair in range(2) for place in range(2)]
                words = [pack_word(values[first : first + 4 // nbytes], dtype) for first in range(0, THREAD_ROWS, 4 // nbytes)]
                target = place + ((number ^ flip) * CHUNK + thread.lane % threads * own_bytes + half * KEYS_APART * geometry.probs_bytes)
                store_vector(target, words)

    def publish(self, done: Int32) -> None:
        """Hand the sums of a work tile to the output role. Wait stats_free, signal stats_ready. done: number of the work tile."""
        shares = [self.rSum[row] for row in range(self.rows)]
        if self.dither is not None:
            undithered = cute.math.exp2(-self.dither, fastmath=True)
            shares = [product(share, undithered) for share in shares]
        sums = [self._summed(share) for share in shares]
        self.smem.stats_free.producer_acquire(done)
        self._store_sums(sums)
        self.smem.stats_ready.producer_commit(done)

    @cute.jit
    def _store_sums(self, sums: list[Float32]):
        if self.thread.lane < 4:
            self._store_rows(self.smem.sSums + self.thread.warp * self.smem.geometry.rows, sums)
            if self.thread.warp == 0:
                self._store_rows(self.smem.sSeen, [self.reference[row] for row in range(self.rows)])


@dataclass(frozen=True)
class FewHeadsScoreRoleSm100:
    """Four warps, or two groups of four. dtype: of P."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: Any, smem: FewHeadsSmemSm100, tmem: Int32):
        """Wait scores_ready, stats_free. Signal scores_free, alpha_ready, probs_ready, stats_ready."""
        schedule, thread = operands.schedule, FewHeadsThreadSm100.create()
        softmax = FewHeadsSoftmaxSm100.create(smem, thread, operands.scale_log2)
        lanes = tmem + (thread.warp << 21)
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile, done = Int32(0), Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            softmax.reset()
            for t in cutlass.range(tile_range.tiles, unroll=1):
                self.score_tile(operands, softmax, tile_range.tile(t), tile + t, lanes)
            softmax.publish(done)
            tile, done = tile + tile_range.tiles, done + 1
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def score_tile(self, operands: Any, softmax: FewHeadsSoftmaxSm100, keys: KeyTile, tile: Int32, lanes: Int32):
        """Turn S^T of one tile into P."""
        smem, thread = softmax.smem, softmax.thread
        softmax.read(tile, lanes)
        self.mask(operands, softmax, keys)
        softmax.add_tile(tile)
        softmax.store_probs(tile, self.dtype)
        if (thread.group == 0) & operands.hides_values(keys):
            # P is 0 there, but 0 times a NaN of an unused row is NaN
            for part in cutlass.range_constexpr(smem.geometry.parts):
                clear_rows(smem.part(tile, part), PART_BOXES, keys.remaining, pin_register(thread.warp * WARP + thread.lane))
        cute.arch.fence_proxy("async.shared", space="cta")
        smem.probs_ready.producer_commit(tile)

    @cute.jit
    def mask(self, operands: Any, softmax: FewHeadsSoftmaxSm100, keys: KeyTile):
        """Set the scores of keys that a row does not see to -inf."""
        if keys.remaining - operands.args.hidden_keys < TILE_KEYS:
            thread = softmax.thread
            for row in cutlass.range_constexpr(softmax.rows):
                token, _ = operands.token_and_head(thread.row(softmax.smem.geometry, row))
                softmax.mask_row(row, operands.key_limit(keys, token) - thread.key)
