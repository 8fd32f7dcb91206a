"""The score role of the SM100 kernels over a latent: Q to tensor memory, softmax, P and rescale factors to shared memory, lse.

Thread t of the score warps has query row t % 64 and half t / 64 of the keys of every tile, or of both halves of every tile where S
comes in two parts. The tensor cores leave the partial sums of a row over two halves of the columns in lanes t % 64 and 64 + t % 64,
so the two threads of a row swap half of what they read: each sends the partial scores of the other's keys. The row maximum takes a
second swap.

A kernel gives the role the mask, the factor of a row's output, who loads Q, and, where tiles may turn out to have no keys, what
tells so. dense_decode/sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...manifest import NamedBarrier
from ...spec.dense_decode import TILE_ROWS
from ..attention.scheduler import KeyTile, LatentOperands, QueryOperands, TileRange, WorkTile, first_query_row
from ..attention.softmax import LN2, RowScale, follow_maximum, shift_of
from ..primitives import tcgen05
from ..primitives.arithmetic import pack_word
from ..primitives.rows import aligned
from .config import (
    CTA_ROPE,
    GROUP,
    GROUP_WARPS,
    HALF_KEYS,
    QUERY_COLUMN,
    ROW_BYTES,
    SCORE_BARRIER,
    SCORE_COLUMN,
    VECTOR,
    Geometry,
    Pipes,
    Tiles,
)
from .mma import TileValidity

COPY_WORDS = 16  # of Q that a thread moves from gmem to its lane of tensor memory at a time
VECTORS = HALF_KEYS // VECTOR
MAX_CHAINS = 4  # independent maxima, so that none waits for the one before
NAMED_BARRIERS = (NamedBarrier("lower_rows", SCORE_BARRIER), NamedBarrier("upper_rows", SCORE_BARRIER + 1))


@dataclass(frozen=True)
class QueryRun:
    """Contiguous columns of a row of Q, and where they go.

    begin: the first element, of the threads that have the first half of the columns. apart: elements from there to the first one of the
    other threads. words: how many. column: of tensor memory.
    """

    begin: int
    apart: int
    words: int
    column: int

    def first(self, half: Int32) -> Int32:
        """Return the first element of a thread that has this half of the columns."""
        return half * self.apart + self.begin


@dataclass(frozen=True)
class QueryLoader:
    """The loads of four warps. has_rope: whether keys have columns that are not values."""

    geometry: Geometry
    has_rope: bool

    def load(self, operands: QueryOperands, pipes: Pipes, req: Int32, thread: Int32, lanes: Int32) -> None:
        """Load Q of a work tile that has keys, once every score of the one before has been computed. Signal query_ready."""
        self.load_rows(operands, req, thread, lanes)
        pipes.query_ready.producer_commit(Int32(0), cta=self.geometry.mma_cta)

    @cute.jit
    def load_rows(self, operands: QueryOperands, req: Int32, thread: Int32, lanes: Int32):
        """Load the thread's row of Q: the columns that its lane multiplies.

        Rows past the last one repeat it; their results go nowhere.
        """
        half = self.geometry.query_half(thread)
        source = self.source(operands, req, thread)
        for run in self.runs():
            first = run.first(half)
            tcgen05.store_columns(lanes + run.column, self.load_words(source + first, run.words))
        tcgen05.await_stores()
        tcgen05.fence_before_signal()

    def fetch(self, operands: QueryOperands, req: Int32, thread: Int32) -> list[Int32]:
        """Start to load the thread's row of Q, as load_rows does. Return its words, for store."""
        half = self.geometry.query_half(thread)
        source = self.source(operands, req, thread)
        return [word for run in self.runs() for word in self.load_words(source + run.first(half), run.words)]

    def store(self, pipes: Pipes, rWords: cute.Tensor, lanes: Int32) -> None:
        """Store what fetch has loaded, once every score of the work tile before has been computed. Signal query_ready."""
        first = 0
        for run in self.runs():
            tcgen05.store_columns(lanes + run.column, [rWords[first + i] for i in range(run.words)])
            first += run.words
        tcgen05.await_stores()
        tcgen05.fence_before_signal()
        pipes.query_ready.producer_commit(Int32(0), cta=self.geometry.mma_cta)

    def source(self, operands: QueryOperands, req: Int32, thread: Int32) -> cute.Pointer:
        """Return element 0 of the thread's row."""
        row = first_query_row() + self.geometry.query_row(thread)
        stored = operands.row_range(req)
        return stored.q_row(stored.nearest(row))

    def runs(self) -> list[QueryRun]:
        """Return the columns that a thread loads."""
        elements = self.geometry.word_elements
        copied, columns = COPY_WORDS * elements, self.geometry.cta_columns
        runs = [QueryRun(i * copied, columns, COPY_WORDS, QUERY_COLUMN + i * COPY_WORDS) for i in range(columns // copied)]
        rope = QueryRun(self.geometry.latent, CTA_ROPE, CTA_ROPE // elements, self.geometry.query_rope_column)
        return [*runs, rope] if self.has_rope else runs

    def load_words(self, source: cute.Pointer, count: int) -> list[Int32]:
        """Load contiguous words of elements of Q."""
        words = []
        elements = self.geometry.word_elements
        for vector in range(count // VECTOR):
            first = source + vector * VECTOR * elements
            rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            cute.autovec_copy(cute.make_tensor(cute.recast_ptr(aligned(first, 16), dtype=Int32), rWords.layout), rWords)
            words += [rWords[i] for i in range(VECTOR)]
        return words


@dataclass(frozen=True)
class ScoreRows:
    """One thread's scores and running softmax state.

    tmem: address of the warp's first lane. half: which keys of a tile are this thread's. rS: scores, then
    probabilities. row_ref: the reference, log2 units. rSum: this thread's share of the row sum. row_max: the greatest score of the
    row, unscaled, which the reference only follows. Where nobody reads it, the compiler drops it. dtype: of P.
    """

    dtype: type[cutlass.Numeric]
    tiles: Tiles
    tmem: Int32
    half: Int32
    row: Int32
    scale_log2: Float32
    rS: cute.Tensor
    row_ref: cute.Tensor
    rSum: cute.Tensor
    row_max: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], tiles: Tiles, tmem: Int32, thread: Int32, scale_log2: Float32) -> ScoreRows:
        """Return the state of a row that has seen nothing."""
        rS = cute.make_rmem_tensor(cute.make_layout(HALF_KEYS), Float32)
        row_ref, rSum, row_max = (cute.make_rmem_tensor(cute.make_layout(1), Float32) for _ in range(3))
        return ScoreRows(dtype, tiles, tmem, thread // TILE_ROWS, thread % TILE_ROWS, scale_log2, rS, row_ref, rSum, row_max)

    @property
    def publishes(self) -> Boolean:
        """Return whether this thread hands on what a row has come to."""
        return self.half == 0

    def reset(self) -> None:
        """Forget all keys."""
        self.row_ref[0] = -Float32.inf
        self.rSum[0] = Float32(0)
        self.row_max[0] = -Float32.inf

    # ---- the loop over tiles: a thread has them all -----------------------------------------------------------------

    tile_step = 1  # from one of the thread's tiles to the next

    def store_ones(self) -> None:
        """Write what P is multiplied with for its sum, where that is asked for."""

    def load_queries(
        self, queries: QueryLoader, operands: QueryOperands, pipes: Pipes, req: Int32, thread: Int32, lanes: Int32
    ) -> None:  # fmt: skip
        """Load Q of a work tile that has keys: every score of the one before has been computed."""
        queries.load(operands, pipes, req, thread, lanes)

    def begin(self, tile: Int32) -> int | Int32:
        """Return the first of the thread's tiles of a work tile, which begins with the tile-th tile."""
        return 0

    def conclude(self, pipes: Any, last: Int32) -> None:
        """Bring the state to the end of a work tile, whose last tile is the last-th."""

    # ---- one tile ---------------------------------------------------------------------------------------------------

    def sync_halves(self) -> None:
        """Wait for the warp that has the other half of this warp's rows."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cute.arch.barrier(barrier_id=SCORE_BARRIER + warp % (GROUP_WARPS // 2), number_of_threads=64)

    def take_partial_sums(self, part: int) -> Any:
        """Load a part of the partial scores from tensor memory, where it may be overwritten when this returns.

        Those of this thread's keys become its scores. Return those of the other's keys.
        """
        geometry = self.tiles.geometry
        run_keys = geometry.run_keys
        first = self.tmem + (SCORE_COLUMN + part * geometry.part_keys)
        own = tcgen05.load_columns(first + self.half * run_keys, run_keys)
        others = tcgen05.load_columns(first + (1 - self.half) * run_keys, run_keys)
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        for i in range(run_keys):
            self.rS[part * run_keys + i] = own[i]
        return others

    def send_partial_sums(self, part: int, others: Any) -> None:
        """Send the other thread of the row what belongs to it."""
        vectors = self.tiles.geometry.run_keys // VECTOR
        for vector in range(vectors):
            rOut = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            for i in range(VECTOR):
                rOut[i] = others[vector * VECTOR + i]
            cute.autovec_copy(rOut, self._exchanged(self.half, part * vectors + vector))

    def add_partial_sums(self) -> None:
        """Complete the scores by what the other thread of the row has sent."""
        self.sync_halves()
        for vector in range(VECTORS):
            rIn = cute.make_rmem_tensor(cute.make_layout(VECTOR), Float32)
            cute.autovec_copy(self._exchanged(1 - self.half, vector), rIn)
            for i in range(0, VECTOR, 2):
                k = vector * VECTOR + i
                self.rS[k], self.rS[k + 1] = cute.arch.add_packed_f32x2((self.rS[k], self.rS[k + 1]), (rIn[i], rIn[i + 1]))

    def _exchanged(self, sender: Int32, vector: int) -> cute.Tensor:
        offset = ((sender * VECTORS + vector) * TILE_ROWS + self.row) * VECTOR
        return cute.make_tensor(aligned(self.tiles.sExchange + offset, 16), cute.make_layout(VECTOR))

    def own_bits(self, words: list[Int32]) -> Int32:
        """Return the bits of this thread's keys, in its order. words: bits of the keys 0..31 and 32..63 of a tile."""
        run_keys = self.tiles.geometry.run_keys
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

    def swap(self, value: Float32) -> Float32:
        """Return the value that the other thread of the row gives. Two calls need a sync_halves between them."""
        (self.tiles.sRowValue + (self.half * TILE_ROWS + self.row)).store(value)
        self.sync_halves()
        return (self.tiles.sRowValue + ((1 - self.half) * TILE_ROWS + self.row)).load()

    def advance(self, pipes: Any, tile: Int32) -> Float32:
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
        return pack_word([self.rS[first + i] for i in range(self.tiles.geometry.word_elements)], self.dtype)

    def store_probs(self, stage: Int32) -> None:
        """Store the probabilities, packed, over the RoPE columns of their tile: rows of 128 swizzled bytes."""
        geometry = self.tiles.geometry
        line = self.tiles.stage(stage) + (geometry.probs_offset + self.row * ROW_BYTES)
        chunk_keys = VECTOR * geometry.word_elements  # of 16 bytes
        run_chunks = geometry.run_keys // chunk_keys
        for chunk in range(HALF_KEYS // chunk_keys):
            rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
            for i in range(VECTOR):
                k = chunk * chunk_keys + i * geometry.word_elements
                rWords[i] = self.word_of_probs(k)
            part, place_in_run = divmod(chunk, run_chunks)
            place = (self.half * run_chunks + (part * 2 * run_chunks + place_in_run)) ^ (self.row % 8)
            target = cute.recast_ptr(aligned(line + place * 16, 16), dtype=Int32)
            cute.autovec_copy(rWords, cute.make_tensor(target, cute.make_layout(VECTOR)))

    def row_sum(self) -> Float32:
        """Return the sum over all keys seen, 0 iff the row attends to nothing."""
        self.sync_halves()
        return self.rSum[0] + self.swap(self.rSum[0])


class KeyMask(Protocol):
    """The keys that count."""

    def apply(self, operands: Any, pipes: Any, rows: ScoreRows, keys: KeyTile, tile: Int32) -> None:
        """Set scores of keys that do not count to -inf, in the tile-th tile of this CTA."""

    def clear_values(self, operands: Any, rows: ScoreRows, stage: Int32, keys: KeyTile) -> None:
        """Make values of keys that do not count zeros, where they are not already: 0 times NaN is NaN."""


@dataclass(frozen=True)
class ScoreRole:
    """Four warps, or two groups of four that take tiles in turn (alternating.py).

    dtype: of P. queries: loads Q when a work tile begins; None where the output role loads it ahead. create_rows: the state of a
    thread, from dtype, tiles, lanes, thread and scale. validity: None where every tile has keys. row_scale: None in a subclass that
    leaves the results of a row to another role.
    """

    geometry: Geometry
    dtype: type[cutlass.Numeric]
    mask: KeyMask
    row_scale: RowScale | None
    queries: QueryLoader | None
    create_rows: Callable[..., ScoreRows] = ScoreRows.create
    validity: TileValidity | None = None

    @cute.jit
    def run(self, operands: QueryOperands, tiles: Tiles, pipes: Pipes, tmem: Int32):
        """Wait scores_ready, stats_free. Signal query_ready, scores_free, alpha_ready, probs_ready, stats_ready. Write lse."""
        schedule = operands.schedule
        thread, lanes = thread_and_lanes(tmem)
        rows = self.create_rows(self.dtype, tiles, lanes, thread, operands.scale_log2)
        rows.store_ones()
        req, begin_tile = schedule.first_work_tile()
        tile, done = Int32(0), Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            rows.reset()
            if tile_range.tiles > 0:
                if cutlass.const_expr(self.queries is not None):
                    rows.load_queries(self.queries, operands, pipes, req, thread, lanes)  # type: ignore[arg-type]  # not None here
                self.score_tiles(operands, pipes, rows, tile_range, tile)
            tile = tile + tile_range.tiles
            pipes.stats_free.producer_acquire(done)
            total = self.publish(operands, pipes, rows, req, begin_tile)
            pipes.stats_ready.producer_commit(done)
            done = done + 1
            work_tile = schedule.work_tile(req, begin_tile)
            self.store_lse(operands, rows, req, work_tile, total)
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def score_tiles(self, operands: QueryOperands, pipes: Pipes, rows: ScoreRows, tile_range: TileRange, tile: Int32):
        """Score the tiles of a work tile that are this thread's."""
        for t in cutlass.range(rows.begin(tile), tile_range.tiles, rows.tile_step, unroll=1):
            if cutlass.const_expr(self.validity is None):
                self.score_tile(operands, pipes, rows, tile_range.tile(t), tile + t)
            else:
                self.score_valid_tile(operands, pipes, rows, tile_range.tile(t), tile + t)
        rows.conclude(pipes, tile + tile_range.tiles - 1)

    @cute.jit
    def score_tile(self, operands: QueryOperands, pipes: Pipes, rows: ScoreRows, keys: KeyTile, tile: Int32):
        """Turn S of one tile into P."""
        for part in range(self.geometry.score_parts):
            use = tile * self.geometry.score_parts + part
            pipes.scores_ready.consumer_wait(use)
            tcgen05.fence_after_wait()
            others = rows.take_partial_sums(part)
            pipes.scores_free.consumer_release(use, cta=self.geometry.mma_cta)
            rows.send_partial_sums(part, others)
        rows.add_partial_sums()
        self.mask.apply(operands, pipes, rows, keys, tile)
        alpha = rows.advance(pipes, tile)
        if rows.half == 0:
            (rows.tiles.sAlpha + ((tile % self.geometry.parities) * TILE_ROWS + rows.row)).store(alpha)
            pipes.alpha_ready.producer_commit(tile)
        rows.exponentiate(alpha)
        stage = pipes.kv_ready.stage(tile)
        rows.store_probs(stage)
        self.mask.clear_values(operands, rows, stage, keys)
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.probs_ready.producer_commit(tile, cta=self.geometry.mma_cta)

    @cute.jit
    def score_valid_tile(self, operands: QueryOperands, pipes: Pipes, rows: ScoreRows, keys: KeyTile, tile: Int32):
        """Turn S of one tile into P, or pass the tile on if it has no keys."""
        self.validity.wait(pipes, tile)
        if self.validity.has_keys(pipes, tile):
            self.score_tile(operands, pipes, rows, keys, tile)
        else:
            for part in cutlass.range_constexpr(self.geometry.score_parts):
                use = tile * self.geometry.score_parts + part
                pipes.scores_ready.consumer_wait(use)
                pipes.scores_free.consumer_release(use, cta=self.geometry.mma_cta)
            if rows.half == 0:
                pipes.alpha_ready.producer_commit(tile)
            pipes.probs_ready.producer_commit(tile, cta=self.geometry.mma_cta)

    @cute.jit
    def publish(self, operands: QueryOperands, pipes: Any, rows: ScoreRows, req: Int32, begin_tile: Int32) -> Float32:
        """Hand the factor of a row of O to the output role. Return the row sum."""
        total = rows.row_sum()
        if rows.publishes:
            empty = total == 0.0
            row, work_tile = first_query_row() + rows.row, partial(operands.schedule.work_tile, req, begin_tile)
            assert self.row_scale is not None
            weight = self.row_scale.weight(operands, work_tile, row, total, rows.row_ref[0])
            (rows.tiles.sInverse + rows.row).store(cutlass.select_(empty, Float32(0), weight))
        return total

    @cute.jit
    def store_lse(self, operands: LatentOperands, rows: ScoreRows, req: Int32, work_tile: WorkTile, total: Float32):
        """Store the natural logarithm if the work tile is the whole request, else base 2."""
        empty = total == 0.0
        row = first_query_row() + rows.row
        lse = rows.row_ref[0] + cute.math.log2(total, fastmath=True)
        stored = operands.row_range(req)
        if rows.publishes and stored.holds(row):
            if cutlass.const_expr(work_tile.always_direct):
                stored.lse_of(row).store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
            else:
                if work_tile.direct:
                    stored.lse_of(row).store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
                else:
                    target = operands.lse_accum + operands.accum_row(work_tile, row)
                    target.store(cutlass.select_(empty, -Float32.inf, lse))


def thread_and_lanes(tmem: Int32) -> tuple[Int32, Int32]:
    """Return (number of this thread among the four warps of its role, tensor memory at the first of its warp's lanes)."""
    thread = cute.arch.thread_idx()[0] % GROUP
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
    return thread, tmem + (warp << 21)
