"""The score role of the SM100 kernels over a latent: Q to tensor memory, softmax, P and rescale factors to shared memory, lse.

Thread t of the score warps has query row t % 64 and half t / 64 of the keys of every tile, or of both halves of every tile where S
comes in two parts. The tensor cores leave the partial sums of a row over two halves of the columns in lanes t % 64 and 64 + t % 64,
so the two threads of a row swap half of what they read: each sends the partial scores of the other's keys. The row maximum takes a
second swap.

A kernel gives the role the mask, the factor of a row's output and who loads Q. dense_decode/sm100.py describes tiles, pipelines and
the trick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Protocol, Self

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from ...manifest import NamedBarrier
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_ROPE
from ..attention.scheduler import KeyTile, LatentOperands, TileRange, WorkTile
from ..attention.softmax import LN2, RowScale, follow_maximum, shift_of
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_word
from ..primitives.rows import SECTOR_BYTES, aligned, store_vector
from .config import (
    ALL_SEEN,
    BOX_BYTES,
    GROUP_WARPS,
    HALF_KEYS,
    HALF_LANES,
    QUERY_COLUMN,
    ROW_BYTES,
    SCORE_BARRIER,
    SEEN_WORDS,
    VECTOR,
    WORD_BYTES,
    LatentGeometrySm100,
    LatentSmemSm100,
    thread_and_lanes,
)

COPY_WORDS = 16  # of Q that a thread moves from gmem to its lane of tensor memory at a time
VECTORS = HALF_KEYS // VECTOR
MAX_CHAINS = 4  # independent maxima, so that none waits for the one before
NAMED_BARRIERS = (NamedBarrier("lower_rows", SCORE_BARRIER), NamedBarrier("upper_rows", SCORE_BARRIER + 1))


@dataclass(frozen=True)
class QueryColumns:
    """Contiguous columns of a row of Q, and where they go.

    begin: the first element, of the threads that have the first half of the columns. apart: elements from there to the first one of the
    other threads. words: how many. column: of tensor memory.
    """

    begin: int | Int32
    apart: int
    words: int
    column: int


@dataclass(frozen=True)
class LatentQueriesSm100:
    """The loads of Q by four warps, each thread's row: the columns that its lane multiplies. has_rope: whether keys have RoPE columns.

    Rows past the last one repeat it; their results go nowhere.
    """

    geometry: LatentGeometrySm100
    has_rope: bool

    def row_bytes(self) -> int:
        """Return the bytes of a row of Q, or as many as this pair of CTAs looks for."""
        return (self.geometry.latent + (D_ROPE if self.has_rope else 0)) * self.geometry.element_bytes

    @cute.jit
    def load(self, operands: LatentOperands, smem: LatentSmemSm100, req: Int32, thread: Int32, lanes: Int32):
        """Load Q of a work tile that has keys, once every score of the one before has been computed. Signal query_ready."""
        half, source = self.half_and_source(operands, req, thread)
        for run in self.runs():
            first = cute.recast_ptr(source + (half * run.apart + run.begin), dtype=Int32)
            tcgen05.store_columns(lanes + run.column, load_words(first, run.words, VECTOR * WORD_BYTES))
        self.hand_over(smem)

    @cute.jit
    def fetch(self, operands: LatentOperands, req: Int32, thread: Int32, rWords: cute.Tensor):
        """Start to load the thread's row of Q, for store: whole sectors of L2 at a time, if the rows of all lanes begin at one."""
        _, source = self.half_and_source(operands, req, thread)
        self.fetch_row(source.toint(), thread, rWords)

    def registers(self) -> cute.Tensor:
        """Return registers for the words of a thread."""
        return cute.make_rmem_tensor(cute.make_layout(sum(run.words for run in self.runs())), Int32)

    @cute.jit
    def fetch_row(self, row: Int64, thread: Int32, rWords: cute.Tensor):
        """Do as fetch. row: the address of the thread's row."""
        if cute.arch.vote_all_sync((row & (SECTOR_BYTES - 1)) == 0):
            self.load_runs(row, thread, rWords, SECTOR_BYTES)
        else:
            self.load_runs(row, thread, rWords, VECTOR * WORD_BYTES)

    def load_runs(self, row: Int64, thread: Int32, rWords: cute.Tensor, nbytes: int) -> None:
        """Load the words of all runs of columns, so many bytes at a time."""
        first, half = 0, self.half_of(thread)
        for run in self.runs():
            offset = (half * run.apart + run.begin) * self.geometry.element_bytes
            source = cute.make_ptr(Int32, row + offset, cute.AddressSpace.gmem, assumed_align=nbytes)
            for i, word in enumerate(load_words(source, run.words, nbytes)):
                rWords[first + i] = word
            first += run.words

    def store(self, smem: LatentSmemSm100, rWords: cute.Tensor, lanes: Int32) -> None:
        """Store what fetch has loaded, once every score of the work tile before has been computed. Signal query_ready."""
        first = 0
        for run in self.runs():
            tcgen05.store_columns(lanes + run.column, [rWords[first + i] for i in range(run.words)])
            first += run.words
        self.hand_over(smem)

    def hand_over(self, smem: LatentSmemSm100) -> None:
        """Signal query_ready, when Q is in tensor memory."""
        tcgen05.await_stores()
        tcgen05.fence_before_signal()
        smem.query_ready.producer_commit(Int32(0), cta=self.geometry.mma_cta)

    def half_and_source(self, operands: LatentOperands, req: Int32, thread: Int32) -> tuple[Int32, cute.Pointer]:
        """Return the number of the half of the columns that the thread's lane has, and the first element of its row that the pair needs."""
        row = operands.row_at(thread % TILE_ROWS if self.geometry.paired else thread // 32 * HALF_LANES + thread % HALF_LANES, req)
        stored = operands.row_range(req)
        return self.half_of(thread), stored.q_row(stored.nearest(row)) + self.geometry.first_column()

    def half_of(self, thread: Int32) -> Int32:
        """Return the number of the half of the columns that the thread's lane has."""
        return thread // TILE_ROWS if self.geometry.paired else thread // HALF_LANES % 2

    def runs(self) -> list[QueryColumns]:
        """Return the columns that a thread loads."""
        elements = self.geometry.word_elements
        copied, columns = COPY_WORDS * elements, self.geometry.cta_columns
        runs = [QueryColumns(i * copied, columns, COPY_WORDS, QUERY_COLUMN + i * COPY_WORDS) for i in range(columns // copied)]
        half_rope = self.geometry.half_rope
        rope = QueryColumns(self.geometry.rope_begin(), half_rope, half_rope // elements, QUERY_COLUMN + columns // elements)
        return [*runs, rope] if self.has_rope else runs


def load_words(source: cute.Pointer, count: int, nbytes: int) -> list[Int32]:
    """Load contiguous words of Q, so many bytes at a time, of which the source is a multiple."""
    words, at_once = [], nbytes // WORD_BYTES
    for first in range(0, count, at_once):
        rWords = cute.make_rmem_tensor(cute.make_layout(at_once), Int32)
        cute.autovec_copy(cute.make_tensor(aligned(source + first, nbytes), rWords.layout), rWords)
        words += [rWords[i] for i in range(at_once)]
    return words


@dataclass(frozen=True)
class LatentRowsSm100:
    """One thread's scores and running softmax state.

    tmem: address of the warp's first lane. half: which keys of a tile are this thread's. rS: scores, then
    probabilities. row_ref: the reference, log2 units. rSum: this thread's share of the row sum. row_max: the greatest score of the
    row, unscaled, which the reference only follows. Where nobody reads it, the compiler drops it. dtype: of P.
    """

    dtype: type[cutlass.Numeric]
    smem: LatentSmemSm100
    tmem: Int32
    half: Int32
    row: Int32
    scale_log2: Float32
    rS: cute.Tensor
    row_ref: cute.Tensor
    rSum: cute.Tensor
    row_max: cute.Tensor

    @classmethod
    def create(cls, dtype: type[cutlass.Numeric], smem: LatentSmemSm100, tmem: Int32, thread: Int32, scale_log2: Float32) -> Self:
        """Return the state of a row that has seen nothing."""
        rS = cute.make_rmem_tensor(cute.make_layout(HALF_KEYS), Float32)
        row_ref, rSum, row_max = (cute.make_rmem_tensor(cute.make_layout(1), Float32) for _ in range(3))
        return cls(dtype, smem, tmem, thread // TILE_ROWS, thread % TILE_ROWS, scale_log2, rS, row_ref, rSum, row_max)

    @property
    def thread(self) -> Int32:
        """Return the number of this thread among those that have the tile."""
        return self.half * TILE_ROWS + self.row

    @property
    def publishes(self) -> Boolean:
        """Return whether this thread hands on what a row has come to."""
        return self.half == 0

    @property
    def stores_lse(self) -> Boolean:
        """Return whether this thread stores the lse of a row."""
        return self.publishes

    @property
    def result_row(self) -> Int32:
        """Return the row that this thread hands on."""
        return self.row

    def reset(self) -> None:
        """Forget all keys."""
        self.row_ref[0] = -Float32.inf
        self.rSum[0] = Float32(0)
        self.row_max[0] = -Float32.inf

    # ---- the loop over tiles: a thread has them all -----------------------------------------------------------------

    tile_step = 1  # from one of the thread's tiles to the next

    def store_ones(self) -> None:
        """Write what P is multiplied with for its sum, where that is asked for."""

    def load_queries(self, queries: LatentQueriesSm100 | None, operands: LatentOperands, req: Int32, thread: Int32, lanes: Int32) -> None:
        """Load Q of a work tile that has keys: every score of the one before has been computed."""
        queries.load(operands, self.smem, req, thread, lanes)

    def begin(self, tile: Int32) -> int | Int32:
        """Return the first of the thread's tiles of a work tile, which begins with the tile-th tile."""
        return 0

    def conclude(self, last: Int32) -> None:
        """Bring the state to the end of a work tile, whose last tile is the last-th."""

    def leave(self, tiles: Int32) -> None:
        """Wait for the last signals to this thread. tiles: of all work tiles."""

    # ---- one tile ---------------------------------------------------------------------------------------------------

    def sync_halves(self) -> None:
        """Wait for the warp that has the other half of this warp's rows."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cute.arch.barrier(barrier_id=SCORE_BARRIER + warp % (GROUP_WARPS // 2), number_of_threads=64)

    @cute.jit
    def read_scores(self, tile: Int32):
        """Wait scores_ready, signal scores_free. Load the partial scores of a tile; add those of the row's other thread to this one's."""
        parts = self.smem.geometry.score_parts
        for part in range(parts):
            use = tile * parts + part
            self.smem.scores_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
            others = self._take_partial_sums(part, use)
            self.smem.scores_free.consumer_release(use, cta=self.smem.geometry.mma_cta)
            self._send_partial_sums(part, others)
        self._add_partial_sums()

    def _take_partial_sums(self, part: int, use: Int32) -> Any:
        """Load a part of the partial scores from tensor memory, where it may be overwritten when this returns.

        Those of this thread's keys become its scores. Return those of the other's keys.
        """
        geometry = self.smem.geometry
        run_keys = geometry.run_keys
        first = self.tmem + geometry.score_column(part, self.smem.scores_ready.stage(use))
        own = tcgen05.load_columns(first + self.half * run_keys, run_keys)
        others = tcgen05.load_columns(first + (1 - self.half) * run_keys, run_keys)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        for i in range(run_keys):
            self.rS[part * run_keys + i] = own[i]
        return others

    def _send_partial_sums(self, part: int, others: Any) -> None:
        """Send the other thread of the row its partial scores."""
        vectors = self.smem.geometry.run_keys // VECTOR
        for vector in range(vectors):
            words = [others[vector * VECTOR + i] for i in range(VECTOR)]
            store_vector(self._exchanged(self.half, part * vectors + vector), words, Float32)

    def _add_partial_sums(self) -> None:
        """Complete the scores by what the other thread of the row has sent."""
        self.sync_halves()
        for vector in range(VECTORS):
            rIn = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            source = aligned(self._exchanged(1 - self.half, vector), 16)
            cute.autovec_copy(cute.make_tensor(source, rIn.layout), rIn)
            for i in range(0, VECTOR, 2):
                k = vector * VECTOR + i
                self.rS[k], self.rS[k + 1] = cute.arch.add_packed_f32x2((self.rS[k], self.rS[k + 1]), (rIn[i], rIn[i + 1]))

    def _exchanged(self, sender: Int32, vector: int) -> cute.Pointer:
        return self.smem.sExchange + ((sender * VECTORS + vector) * TILE_ROWS + self.row) * VECTOR

    def own_bits(self, words: list[Int32]) -> Int32:
        """Return the bits of this thread's keys, in its order. words: bits of the keys 0..31 and 32..63 of a tile."""
        run_keys = self.smem.geometry.run_keys
        if run_keys == HALF_KEYS:
            return cutlass.select_(self.half == 0, words[0], words[1])
        seen, run = Int32(0), (1 << run_keys) - 1
        for part, word in enumerate(words):
            seen = seen | (((word >> (self.half * run_keys)) & run) << (part * run_keys))
        return seen

    def mask_unseen(self, seen: Int32) -> None:
        """Set the scores of keys whose bit is 0 to -inf, among the bits of this thread's keys."""
        for i in range(HALF_KEYS):
            self.rS[i] = cutlass.select_((seen & (1 << i)) == 0, -Float32.inf, self.rS[i])

    @cute.jit
    def mask_seen(self, tile: Int32):
        """Set scores of keys that do not count to -inf, by the bits of the tile, which are there."""
        seen = (self.smem.sSeen + (self.smem.seen_ready.stage(tile) * SEEN_WORDS + self.half)).load()
        if seen != ALL_SEEN:
            self.mask_unseen(seen)

    def swap(self, value: Float32) -> Float32:
        """Return the value that the other thread of the row gives. Two calls need a sync_halves between them."""
        (self.smem.sRowValue + (self.half * TILE_ROWS + self.row)).store(value)
        self.sync_halves()
        return (self.smem.sRowValue + ((1 - self.half) * TILE_ROWS + self.row)).load()

    def advance(self, tile: Int32) -> Float32:
        """Move the reference to this tile if need be.

        Return the factor for everything accumulated before: 1 if the reference stays.
        """
        self.row_ref[0], alpha = follow_maximum(self.row_ref[0], self.tile_maximum())
        return alpha

    def tile_maximum(self) -> Float32:
        """Return the greatest score of the row in this tile, log2 units."""
        chains = [self.rS[i] for i in range(MAX_CHAINS)]
        for i in range(MAX_CHAINS, HALF_KEYS):
            chains[i % MAX_CHAINS] = cute.arch.fmax(chains[i % MAX_CHAINS], self.rS[i])
        best = reduce(cute.arch.fmax, chains)
        best = cute.arch.fmax(best, self.swap(best))
        self.row_max[0] = cute.arch.fmax(self.row_max[0], best)
        return best * self.scale_log2

    @cute.jit
    def publish_alpha(self, tile: Int32, alpha: Float32):
        """Hand the factor of a row of O to the output role. Signal alpha_ready."""
        if self.half == 0:
            (self.smem.sAlpha + ((tile % self.smem.geometry.parities) * TILE_ROWS + self.row)).store(alpha)
            self.smem.alpha_ready.producer_commit(tile)

    def exponentiate(self, alpha: Float32) -> None:
        """Replace the scores by unnormalised probabilities and add them to the row sum."""
        sums = (self.rSum[0] * alpha, Float32(0))
        scale, shift = (self.scale_log2, self.scale_log2), (-shift_of(self.row_ref[0]),) * 2
        for i in range(0, HALF_KEYS, 2):
            exponents = cute.arch.fma_packed_f32x2((self.rS[i], self.rS[i + 1]), scale, shift)
            self.rS[i], self.rS[i + 1] = (cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
            sums = cute.arch.add_packed_f32x2(sums, (self.rS[i], self.rS[i + 1]))
        self.rSum[0] = sums[0] + sums[1]

    def word_of_probs(self, first: int) -> Int32:
        """Return as many probabilities as make a word, rounded."""
        return pack_word([self.rS[first + i] for i in range(self.smem.geometry.word_elements)], self.dtype)

    def store_probs(self, tile: Int32) -> None:
        """Store the probabilities, packed, over the RoPE columns of their tile: rows of 128 swizzled bytes."""
        geometry = self.smem.geometry
        line = self.smem.stage(self.smem.kv_ready.stage(tile)) + (geometry.rope_box * BOX_BYTES + self.row * ROW_BYTES)
        chunk_keys = VECTOR * geometry.word_elements  # of 16 bytes
        run_chunks = geometry.run_keys // chunk_keys
        for chunk in range(HALF_KEYS // chunk_keys):
            rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            for i in range(VECTOR):
                rWords[i] = self.word_of_probs(chunk * chunk_keys + i * geometry.word_elements)
            part, place_in_run = divmod(chunk, run_chunks)
            place = (self.half * run_chunks + (part * 2 * run_chunks + place_in_run)) ^ (self.row % 8)
            target = cute.recast_ptr(aligned(line + place * 16, 16), dtype=Int32)
            cute.autovec_copy(rWords, cute.make_tensor(target, rWords.layout))

    def hand_over_probs(self, tile: Int32) -> None:
        """Signal probs_ready: P is written, behind the fence of every lane."""
        self.smem.probs_ready.producer_commit(tile, cta=self.smem.geometry.mma_cta)

    def hand_on_weight(self, weight: Float32) -> None:
        """Store the factor of this thread's row of O."""
        (self.smem.sInverse + self.result_row).store(weight)

    def hand_over_weights(self, done: Int32) -> None:
        """Signal stats_ready of a work tile."""
        self.smem.stats_ready.producer_commit(done)

    def row_sum(self) -> Float32:
        """Return the sum over all keys seen, 0 iff the row attends to nothing."""
        self.sync_halves()
        return self.rSum[0] + self.swap(self.rSum[0])


class LatentMaskSm100(Protocol):
    """The keys that count."""

    def apply(self, operands: Any, rows: Any, keys: KeyTile, tile: Int32) -> None:
        """Set scores of keys that do not count to -inf, in the tile-th tile of this CTA."""

    def clear_values(self, operands: Any, rows: Any, stage: Int32, keys: KeyTile) -> None:
        """Make values of keys that do not count zeros, where they are not already: 0 times NaN is NaN."""


class SeenMaskSm100:
    """Mask of keys that do not count, among those that indices name."""

    def apply(self, operands: Any, rows: Any, keys: KeyTile, tile: Int32) -> None:
        """Set scores of keys that do not count to -inf."""
        rows.mask_seen(tile)

    def clear_values(self, operands: Any, rows: Any, stage: Int32, keys: KeyTile) -> None:
        """Do nothing: keys that do not count are zeros."""


@dataclass(frozen=True)
class LatentScoreRoleSm100:
    """Four warps, or two groups of four that take tiles in turn (alternating.py).

    dtype: of P. queries: loads Q when a work tile begins. create_rows: the state of a thread, from dtype, shared memory, lanes, thread and
    scale. row_scale, queries: None in a subclass that leaves Q and the results of a row to another role.
    """

    dtype: type[cutlass.Numeric]
    mask: LatentMaskSm100
    row_scale: RowScale | None = None
    queries: LatentQueriesSm100 | None = None
    create_rows: Callable[..., LatentRowsSm100] = LatentRowsSm100.create

    @cute.jit
    def run(self, operands: LatentOperands, smem: LatentSmemSm100, tmem: Int32):
        """Wait scores_ready, stats_free. Signal query_ready, scores_free, alpha_ready, probs_ready, stats_ready. Write lse."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        rows = self.create_rows(self.dtype, smem, lanes, thread, operands.scale_log2)
        rows.store_ones()
        req, begin_tile = schedule.first_work_tile()
        tile, done = Int32(0), Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            rows.reset()
            if tile_range.tiles > 0:
                self.score_tiles(operands, rows, tile_range, tile, thread, lanes)
            tile = tile + tile_range.tiles
            smem.stats_free.producer_acquire(done)
            total = self.publish(operands, rows, req, begin_tile)
            rows.hand_over_weights(done)
            done = done + 1
            work_tile = schedule.work_tile(req, begin_tile)
            self.store_lse(operands, rows, req, work_tile, total)
            schedule.release(begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        rows.leave(tile)

    @cute.jit
    def score_tiles(
        self, operands: LatentOperands, rows: LatentRowsSm100, tile_range: TileRange, tile: Int32, thread: Int32, lanes: Int32
    ):  # fmt: skip
        """Load Q, and score the tiles of a work tile that are this thread's. tile: number of the work tile's first tile."""
        if cutlass.const_expr(self.queries is not None):
            rows.load_queries(self.queries, operands, tile_range.req, thread, lanes)
        for t in cutlass.range(rows.begin(tile), tile_range.tiles, rows.tile_step, unroll=1):
            score_tile(self.mask, operands, rows, tile_range.tile(t), tile + t)
        rows.conclude(tile + tile_range.tiles - 1)

    @cute.jit
    def publish(self, operands: LatentOperands, rows: LatentRowsSm100, req: Int32, begin_tile: Int32) -> Float32:
        """Hand the factor of a row of O to the output role. Return the row sum."""
        total = rows.row_sum()
        if rows.publishes:
            empty = total == 0.0
            row, work_tile = operands.row_at(rows.result_row, req), partial(operands.schedule.work_tile, req, begin_tile)
            weight = self.row_scale.weight(operands, work_tile, row, total, rows.row_ref[0])
            rows.hand_on_weight(cutlass.select_(empty, Float32(0), weight))
        return total

    @cute.jit
    def store_lse(self, operands: LatentOperands, rows: LatentRowsSm100, req: Int32, work_tile: WorkTile, total: Float32):
        """Store the natural logarithm if the work tile is the whole request, else base 2."""
        empty = total == 0.0
        row = operands.row_at(rows.result_row, req)
        lse = rows.row_ref[0] + cute.math.log2(total, fastmath=True)
        stored = operands.row_range(req)
        if rows.stores_lse and stored.holds(row):
            if work_tile.direct:
                stored.lse_of(row).store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
            else:
                target = operands.lse_accum + operands.accum_row(work_tile, row)
                target.store(cutlass.select_(empty, -Float32.inf, lse))


@cute.jit
def score_tile(mask: LatentMaskSm100, operands: LatentOperands, rows: LatentRowsSm100, keys: KeyTile, tile: Int32):
    """Turn S of one tile into P. Wait scores_ready. Signal scores_free, alpha_ready, probs_ready."""
    smem = rows.smem
    rows.read_scores(tile)
    mask.apply(operands, rows, keys, tile)
    alpha = rows.advance(tile)
    rows.publish_alpha(tile, alpha)
    rows.exponentiate(alpha)
    rows.store_probs(tile)
    mask.clear_values(operands, rows, smem.kv_ready.stage(tile), keys)
    cute.arch.fence_proxy("async.shared", space="cta")
    rows.hand_over_probs(tile)
