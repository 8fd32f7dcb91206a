"""The score role of the SM90 kernels over a latent: S = Q K^T, softmax, P and rescale factors to shared memory, lse.

One warpgroup. A kernel gives it the products that make S (LatentSm90Scores for 16-bit operands), the mask, and the factor of a row's
output. dense_decode/sm90.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import RowRange
from ..attention.scheduler import BOX_COLUMNS, KeyTile, LatentOperands, TileRange, WorkTile, first_query_row
from ..attention.softmax import LN2, OnlineSoftmax, RowScale
from ..primitives.arithmetic import pin_register
from ..primitives.copies import BOX_ROW_BYTES, store_groups, writer_address
from ..primitives.pipeline import arrive, barrier_at
from ..primitives.rows import load_word
from ..primitives.wgmma import (
    A_STRIDES,
    A_VALUES,
    K_STEP,
    REGISTERS_PER_STEP,
    ROWS_PER_THREAD,
    RowPair,
    flat,
    fragment_column,
    fragment_row,
    half,
    packed,
    tiled_mma,
)
from .cta import (
    BOX_BYTES,
    SCORE_BARRIER,
    STAGE_COLUMNS,
    STEPS_PER_BOX,
    WARPGROUP,
    LatentSm90Queries,
    LatentSm90Smem,
    LatentSm90TileState,
)

NO_BARRIER = 0  # address of a barrier that does not exist
WARP_ROWS = 16
STEPS_PER_STAGE = STAGE_COLUMNS // K_STEP
ALL_VALID = -1
IS_SPLIT = 1  # added to the address of a row of the split accumulators: all addresses are even


class LatentSm90KeyMask(Protocol):
    """The keys that a row sees."""

    def apply(self, operands: Any, smem: Any, scores: Any, state: LatentSm90TileState, keys: KeyTile) -> None:
        """Set the scores of keys that a row does not see to -inf."""


class LatentSm90AbsentKeyMask:
    """Mask of keys that are not present, the same for all rows of a CTA."""

    @cute.jit
    def apply(self, operands: Any, smem: LatentSm90Smem, scores: LatentSm90Scores, state: LatentSm90TileState, keys: KeyTile):
        """Set the scores of absent keys to -inf."""
        low, high = smem.valid_words(state.rope.stage)
        if (low & high) != ALL_VALID:
            mask_absent(scores.scores, scores.thread, {0: low, 1: high})


def mask_absent(scores: cute.Tensor, thread: Int32, words: dict[int, Int32], row_half: int | None = None) -> None:
    """Set the scores of keys whose bit is 0 to -inf. Selects, so that NaN vanishes.

    words: bits of the keys 0..31, word 0, or 32..63, word 1, or of both. row_half: one of the thread's rows; None: both.
    """
    rS = flat(scores)
    shifted = {number: word >> fragment_column(thread, 0) for number, word in words.items()}
    for i in range(cute.size(rS)):
        number, bit = divmod(fragment_column(0, i), TILE_KEYS // 2)
        if number in shifted and row_half in (None, half(i)):
            absent = (shifted[number] & Int32(1 << bit)) == 0
            rS[i] = cutlass.select_(absent, -Float32.inf, rS[i])


class LatentSm90RowResults:
    """Results of a row besides out and lse, and what they need to see. The base class has none."""

    def begin(self, operands: Any, keys: Int32) -> None:
        """Begin the rows of a work tile of so many keys."""

    def see_tile(self, softmax: OnlineSoftmax, scores: Any, remaining: Int32) -> None:
        """See the scores of a tile before they are added to the softmax. remaining: keys of the work tile from this tile on."""

    def store(self, stored: RowRange, row: Int32, softmax: OnlineSoftmax, row_half: int) -> None:
        """Write results of a row that exists, with its lse."""

    def end(self, operands: Any, req: Int32, softmax: OnlineSoftmax, thread: Int32) -> None:
        """Write results for which the output role need not wait."""


LSE_ONLY = LatentSm90RowResults()


@dataclass(frozen=True)
class LatentSm90Scores:
    """S (64 rows x 64 keys) = Q K^T of 16-bit operands: the first columns of Q from registers, the others from shared memory."""

    smem: LatentSm90Smem
    queries: LatentSm90Queries
    thread: Int32
    from_registers: cute.TiledMma
    from_smem: cute.TiledMma
    rQ: cute.Tensor  # A fragments of the column tiles in registers
    rStaged: cute.Tensor  # one column tile on its way to smem
    tQ: cute.Tensor
    tK: cute.Tensor
    tRope: cute.Tensor
    scores: cute.Tensor
    probs: Int32  # this lane's row of its warp's matrix stores, in the first RoPE stage, which P goes to
    staged: Int32  # and in the first smem tile of Q
    factors: RowPair  # rescale factors, beside P

    reads_ahead = False  # whether another role brings Q, of which part is taken before the rows of the work tile before are finished
    row_halves = ROWS_PER_THREAD  # of the thread's rows, those whose probabilities it computes

    @staticmethod
    def create(queries: LatentSm90Queries, smem: LatentSm90Smem, thread: Int32) -> LatentSm90Scores:
        """Partition the tiles for one thread of the score warpgroup."""
        dtype = smem.sKv.element_type
        mma = tiled_mma(dtype, TILE_KEYS, warpgroup.OperandSource.RMEM, OperandMajorMode.K)
        mma_smem = tiled_mma(dtype, TILE_KEYS, warpgroup.OperandSource.SMEM, OperandMajorMode.K)
        slice_, slice_smem = mma.get_slice(thread), mma_smem.get_slice(thread)
        steps = queries.in_registers * STEPS_PER_BOX
        writer = writer_address(thread // 32 * (WARP_ROWS * BOX_ROW_BYTES), thread % 32, BOX_ROW_BYTES)
        scores = cute.make_rmem_tensor(slice_.partition_shape_C((64, TILE_KEYS)), Float32)
        return LatentSm90Scores(
            smem=smem,
            queries=queries,
            thread=thread,
            from_registers=mma,
            from_smem=mma_smem,
            rQ=cute.make_rmem_tensor(cute.make_layout((A_VALUES, 1, steps), stride=(A_STRIDES, 0, REGISTERS_PER_STEP)), dtype),
            rStaged=cute.make_rmem_tensor_like(scores, dtype),
            tQ=slice_smem.make_fragment_A(slice_smem.partition_A(smem.sQ)),
            tK=slice_.make_fragment_B(slice_.partition_B(smem.sKv)),
            tRope=slice_.make_fragment_B(slice_.partition_B(smem.sRope)),
            scores=scores,
            probs=pin_register(smem.sRope.iterator.toint() + writer),
            staged=smem.sQ.iterator.toint() + writer,
            factors=RowPair.of(smem.sAlpha, thread),
        )

    @cute.jit
    def load_queries(self, operands: LatentOperands, req: Int32):
        """Load Q of a work tile: the first column tiles to registers, the others through registers to smem.

        Rows past the last one repeat it; their results go nowhere.
        """
        rows, stored = [], operands.row_range(req)
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = stored.nearest(self.query_row(row_half))
            rows.append(stored.q_row(row) + 2 * (self.thread % 4))
        for tile in cutlass.range_constexpr(self.queries.tiles):
            rQ = self.query_tile(tile)
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                for eight in cutlass.range_constexpr(self.queries.columns(tile) // 8):
                    source = rows[row_half] + (self.query_column(tile) + 8 * eight)
                    rQ[2 * eight + row_half] = load_word(source)
            if cutlass.const_expr(tile >= self.queries.in_registers):
                store_box(self.staged + (tile - self.queries.in_registers) * BOX_BYTES, self.rStaged)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)

    def query_row(self, row_half: int) -> Int32:
        """Return the row, among all row tiles, that one of the thread's fragment rows is."""
        return query_row(self.thread, row_half)

    def query_column(self, tile: int) -> int | Int32:
        """Return the first column of a column tile of Q."""
        return tile * BOX_COLUMNS

    def await_smem_queries(self) -> None:
        """Do nothing: load_queries has waited for all of Q."""

    def release_queries(self, last: Boolean) -> None:
        """Do nothing: this role loads Q itself. last: whether S that is complete is the last one of a work tile."""

    def query_tile(self, tile: int) -> cute.Tensor:
        """Return the 32-bit registers that column tile `tile` of Q is loaded into.

        Columns 8 e + 2 (t % 4) and the next of row half h are register 2 e + h.
        """
        if tile >= self.queries.in_registers:
            return packed(self.rStaged)
        words = STEPS_PER_BOX * REGISTERS_PER_STEP // 2
        registers = cute.recast_tensor(flat(self.rQ), Int32)
        return cute.make_tensor(registers.iterator + tile * words, cute.make_layout(words))

    def multiply(self, state: LatentSm90TileState) -> None:
        """Issue the products of S of one key tile. Wait for each stage just before its first use: kv_ready, rope_ready.

        Columns ascend, wherever the RoPE columns come among the stages: so prefill and decode have the same bits.
        """
        self.from_registers.set(warpgroup.Field.ACCUMULATE, False)
        self.from_smem.set(warpgroup.Field.ACCUMULATE, True)
        smem, stages, kv = self.smem, self.smem.stages, state.kv
        for part in range(stages.count):
            if part == stages.before_rope:
                self.await_smem_queries()
            smem.kv_ready.consumer_wait(kv)
            self._multiply_columns(stages.columns[part], STEPS_PER_STAGE, self.tK, kv.stage)
            kv = smem.kv_ready.advance_in_tile(kv, part)
        if stages.has_rope:
            smem.rope_ready.consumer_wait(state.rope)
            self._multiply_columns(stages.d_v, stages.rope_columns // K_STEP, self.tRope, state.rope.stage)
        warpgroup.commit_group()

    def arrival(self, state: LatentSm90TileState) -> tuple[cute.Pointer, Int32]:
        """Return barrier and phase of the RoPE columns, or of the second stage where no barrier tells of those."""
        barriers, use = self.smem.rope_ready, state.rope
        if barriers is None:
            barriers, use = self.smem.kv_ready, self.smem.kv_ready.advance_in_tile(state.kv, 0)
        return barriers.barrier(use), use.phase

    def complete(self, state: LatentSm90TileState) -> None:
        """Wait until S of a tile is complete. All stages of the tile have been waited for then."""
        warpgroup.wait_group(0)
        if self.smem.rope_ready is not None and not self.smem.stages.has_rope:
            self.smem.rope_ready.consumer_wait(state.rope)

    def _multiply_columns(self, first: int, steps: int, tK: cute.Tensor, stage: Int32) -> None:
        """Add the products of columns of Q and K, from column `first` on, 16 a step; the first step of a tile overwrites S."""
        warpgroup.fence()
        for i in range(steps):
            step = first // K_STEP + i
            tile, step_in_tile = divmod(step, STEPS_PER_BOX)
            tK_step = tK[None, None, i, stage]
            if tile < self.queries.in_registers:
                cute.gemm(self.from_registers, self.scores, self.rQ[None, None, step], tK_step, self.scores)
                self.from_registers.set(warpgroup.Field.ACCUMULATE, True)
            else:
                tQ = self.tQ[None, None, step_in_tile, tile - self.queries.in_registers]
                cute.gemm(self.from_smem, self.scores, tQ, tK_step, self.scores)

    def release_keys(self, state: LatentSm90TileState) -> None:
        """Wait until every warp's WGMMA has read the RoPE columns, which P overwrites."""
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def store_probs(self, state: LatentSm90TileState, alpha: list[Float32]):
        """Write P, packed to 16 bits, over the RoPE columns of its tile, and the rescale factors beside it. Not handed over yet."""
        dtype = self.rStaged.element_type
        rP = cute.make_rmem_tensor_like(self.scores, dtype)
        rP.store(self.scores.load().to(dtype))
        store_box(self.probs + state.rope.stage * BOX_BYTES, rP)
        if self.thread % 4 == 0:
            self.factors.store(state.rope.stage, alpha)

    def probs_barrier(self, state: LatentSm90TileState) -> cute.Pointer:
        """Return the barrier that hands over P of a tile."""
        return self.smem.probs_ready.barrier(state.rope)


def store_box(place: Int32, fragment: cute.Tensor) -> None:
    """Store a 64x64 fragment of 16 bits to a box of 64 columns. place: writer_address in it."""
    words = packed(fragment)
    for pair in range(cute.size(words) // 4):
        store_groups(place, 0, pair, [words[4 * pair + i] for i in range(4)])


@dataclass(frozen=True)
class LatentSm90ScoreRole:
    """One warpgroup.

    partition: the products of one thread, from shared memory and thread: LatentSm90Scores, or a class with its public methods.
    new_softmax: the state of a thread's rows, from the factor of the scores.
    """

    partition: Callable[[Any, Int32], Any]
    mask: LatentSm90KeyMask
    row_scale: RowScale
    new_softmax: Callable[[Float32], OnlineSoftmax] = OnlineSoftmax.create
    results: LatentSm90RowResults = LSE_ONLY

    row_halves = ROWS_PER_THREAD  # of a thread's rows, those whose results this CTA has

    def query_row(self, thread: Int32, row_half: int) -> Int32:
        """Return the row, among all row tiles, that one of the thread's fragment rows is."""
        return query_row(thread, row_half)

    def hand_over(self, probs_barrier: Int32) -> None:
        """Hand over P that is written. probs_barrier: its address."""
        arrive(barrier_at(probs_barrier))

    def share_probs(self, gemm: Any, state: LatentSm90TileState) -> None:
        """Do nothing: no other CTA reads P. Behind the fence of P."""

    def commit_rows(self, smem: Any, done: Int32) -> None:
        """Hand over factors and places of the rows of a work tile."""
        smem.stats_ready.producer_commit(done)

    def leave(self, smem: Any, done: Int32) -> None:
        """Do nothing: no other CTA's arrivals may be on their way. done: work tiles of this CTA."""

    @cute.jit
    def run(self, operands: LatentOperands, smem: Any, thread: Int32):
        """Wait valid_ready, kv_ready, rope_ready, stats_free. Signal probs_ready, stats_ready. Write lse."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile, done = Int32(0), Int32(0)
        gemm = self.partition(smem, thread)
        softmax = self.new_softmax(self.row_scale.score_scale(operands))
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            softmax.reset()
            self.results.begin(operands, tile_range.keys)
            if tile_range.tiles > 0:
                gemm.load_queries(operands, req)
                self.score_tiles(operands, smem, gemm, softmax, tile_range, tile)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            if cutlass.const_expr(gemm.reads_ahead):
                self.read_ahead(operands, gemm, work_tile, last)
            smem.stats_free.producer_acquire(done)
            if cutlass.const_expr(smem.sTarget is not None):
                totals = self.publish_rows(operands, smem, req, work_tile, softmax, thread)
                self.commit_rows(smem, done)
                self.finish_rows(operands, req, work_tile, softmax, totals, thread)
            else:
                self.publish_and_finish(operands, smem, req, work_tile, softmax, thread)
                smem.stats_ready.producer_commit(done)
            self.results.end(operands, req, softmax, thread)
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        self.leave(smem, done)

    @cute.jit
    def score_tiles(
        self, operands: LatentOperands, smem: Any, gemm: LatentSm90Scores, softmax: OnlineSoftmax, tile_range: TileRange, tile: Int32
    ):
        """Score the tiles of a work tile, the first of which is the tile-th of this CTA.

        States are divided out: no registers are left to carry them.

        P of one tile is handed over only when all products of S of the next are issued: P V queues behind them and fills the tensor cores
        during the next softmax, without a gap before. When the next keys have not come yet there is nothing to wait for, and P goes at
        once: the RoPE columns tell, or the second stage. deferred_barrier: the address of the barrier that hands over a P that is
        written, or NO_BARRIER.
        """
        deferred_barrier = Int32(NO_BARRIER)
        for t in cutlass.range(tile_range.tiles, unroll=1):
            state, last = smem.tile(tile + t), t + 1 == tile_range.tiles
            if deferred_barrier != NO_BARRIER:
                here = cute.arch.mbarrier_test_wait(*gemm.arrival(state))
                if not cute.arch.vote_all_sync(here):
                    self.hand_over(deferred_barrier)
                    deferred_barrier = Int32(NO_BARRIER)
            if cutlass.const_expr(smem.valid_ready is not None):
                smem.valid_ready.consumer_wait(state.rope)
                if smem.has_keys(state.rope.stage):
                    self.multiply_tile(gemm, state, deferred_barrier, last)
                    self.softmax_step(operands, smem, gemm, softmax, state, tile_range.tile(t))
                    deferred_barrier = gemm.probs_barrier(state).toint()
                else:
                    self.skip_tile(smem, gemm, state, deferred_barrier, last)
                    deferred_barrier = Int32(NO_BARRIER)
            else:
                self.multiply_tile(gemm, state, deferred_barrier, last)
                self.softmax_step(operands, smem, gemm, softmax, state, tile_range.tile(t))
                deferred_barrier = gemm.probs_barrier(state).toint()
        if deferred_barrier != NO_BARRIER:
            self.hand_over(deferred_barrier)

    @cute.jit
    def read_ahead(self, operands: LatentOperands, gemm: Any, work_tile: WorkTile, last: Int32):
        """Begin to load Q of the work tile behind this one, if it has keys."""
        tiles = Int32(0)
        if work_tile.next_req <= last:
            tiles = operands.schedule.tile_range(work_tile.next_req, work_tile.next_tile).tiles
        if tiles > 0:
            gemm.take_queries()

    @cute.jit
    def multiply_tile(self, gemm: LatentSm90Scores, state: LatentSm90TileState, deferred_barrier: Int32, last: Boolean):
        """Compute S of one tile. Hand over P of the tile before, if that was deferred, behind the products. last: of the work tile."""
        gemm.multiply(state)
        if deferred_barrier != NO_BARRIER:
            self.hand_over(deferred_barrier)
        gemm.complete(state)
        gemm.release_queries(last)
        gemm.release_keys(state)

    @cute.jit
    def softmax_step(
        self, operands: LatentOperands, smem: Any, gemm: LatentSm90Scores, softmax: OnlineSoftmax, state: LatentSm90TileState, keys: KeyTile
    ):
        """Turn S of one tile into P, in shared memory with its rescale factors. Not handed over yet."""
        self.mask.apply(operands, smem, gemm, state, keys)
        self.results.see_tile(softmax, gemm, keys.remaining)
        alpha = softmax.add_tile(gemm.scores)
        gemm.store_probs(state, alpha)
        cute.arch.fence_proxy("async.shared", space="cta")
        self.share_probs(gemm, state)

    @cute.jit
    def skip_tile(self, smem: LatentSm90Smem, gemm: LatentSm90Scores, state: LatentSm90TileState, deferred_barrier: Int32, last: Boolean):
        """Pass on a tile without keys: handshakes only.

        Its stages are handed over before its RoPE columns, so that those tell of all, and no barrier is two phases ahead of what this
        role has seen.
        """
        if deferred_barrier != NO_BARRIER:
            arrive(barrier_at(deferred_barrier))
        gemm.release_queries(last)
        smem.rope_ready.consumer_wait(state.rope)
        smem.probs_ready.producer_commit(state.rope)

    @cute.jit
    def publish_rows(self, operands: LatentOperands, smem: Any, req: Int32, work_tile: WorkTile, softmax: OnlineSoftmax, thread: Int32):
        """Publish the factor of each row of O, 0 for a row that attends to nothing, and where the row goes. Return the row sums.

        The output role waits for it, so all that it does not wait for comes behind.
        """
        totals = [softmax.row_sum(row_half) for row_half in range(ROWS_PER_THREAD)]
        rows = [query_row(thread, row_half) for row_half in range(ROWS_PER_THREAD)]
        stored = operands.row_range(req)
        targets = [output_target(operands, stored, work_tile, row, smem.d_v) for row in rows]
        if thread % 4 == 0:
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                place, total = fragment_row(thread, row_half), totals[row_half]
                weight = self.row_scale.weight(operands, lambda: work_tile, rows[row_half], total, softmax.row_ref[row_half])
                smem.sInverse[place] = cutlass.select_(total == 0.0, Float32(0), weight)
                smem.sTarget[place] = targets[row_half]
        return totals

    @cute.jit
    def finish_rows(
        self, operands: LatentOperands, req: Int32, work_tile: WorkTile, softmax: OnlineSoftmax, totals: list[Float32], thread: Int32
    ):
        """Write lse of each row: natural log if the work tile is the whole request, else base 2. totals: the row sums."""
        stored = operands.row_range(req)
        for row_half in cutlass.range_constexpr(self.row_halves):
            row = self.query_row(thread, row_half)
            lse = softmax.row_ref[row_half] + cute.math.log2(totals[row_half], fastmath=True)
            empty = totals[row_half] == 0.0
            if (thread % 4 == 0) & stored.holds(row):
                self.store_lse(stored, work_tile, softmax, row_half, row, lse, empty)

    @cute.jit
    def publish_and_finish(
        self, operands: LatentOperands, smem: Any, req: Int32, work_tile: WorkTile, softmax: OnlineSoftmax, thread: Int32
    ):
        """Publish the factors and write lse in one pass, where registers do not last for two. The output role finds out the places."""
        stored = operands.row_range(req)
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = softmax.row_sum(row_half)
            empty = total == 0.0
            row = query_row(thread, row_half)
            lse = softmax.row_ref[row_half] + cute.math.log2(total, fastmath=True)
            if thread % 4 == 0:
                weight = self.row_scale.weight(operands, lambda: work_tile, row, total, softmax.row_ref[row_half])
                smem.sInverse[fragment_row(thread, row_half)] = cutlass.select_(empty, Float32(0), weight)
                if stored.holds(row):
                    self.store_lse(stored, work_tile, softmax, row_half, row, lse, empty)

    @cute.jit
    def store_lse(
        self, stored: RowRange, work_tile: WorkTile, softmax: OnlineSoftmax, row_half: int, row: Int32, lse: Float32, empty: Boolean
    ):
        """Write lse of a row that exists. lse: in base 2. empty: whether the row attends to nothing."""
        operands = stored.operands
        if cutlass.const_expr(work_tile.always_direct):
            stored.lse_of(row).store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
        else:
            if work_tile.direct:
                target = stored.lse_of(row)
                target.store(cutlass.select_(empty, operands.empty_lse, lse * LN2))
            else:
                target = operands.lse_accum + operands.accum_row(work_tile, row)
                target.store(cutlass.select_(empty, -Float32.inf, lse))
        self.results.store(stored, row, softmax, row_half)


def query_row(thread: Int32, row_half: int) -> Int32:
    """Return the row, among all row tiles, that one of the thread's fragment rows is."""
    return first_query_row() + fragment_row(thread, row_half)


def output_target(operands: Any, stored: RowRange, work_tile: WorkTile, row: Int32, d_v: int) -> Int64:
    """Return the address of a row of out, that of a row of the split accumulators plus IS_SPLIT, or 0 for a row that does not exist.

    operands: LatentOperands where requests may be split.
    """
    target = stored.out_row(row).toint()
    if not work_tile.always_direct:
        accum = operands.out_accum + operands.accum_row(work_tile, row) * d_v
        target = cutlass.select_(work_tile.direct, target, accum.toint() + IS_SPLIT)
    return cutlass.select_(stored.holds(row), target, Int64(0))
