"""The score role of the SM90 kernels over a latent: S = Q K^T, softmax, P and rescale factors to shared memory, lse.

One warpgroup. A kernel gives it the products that make S (LatentScores for 16-bit operands), the mask, the factor of a row's
output, and, where tiles may turn out to have no keys, what tells so. dense_decode/sm90.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import RowRange
from ..attention.scheduler import BOX_COLUMNS, KeyTile, LatentOperands, QueryOperands, TileRange, WorkTile, first_query_row
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
    fragment_row,
    packed,
    tiled_mma,
)
from .config import BOX_BYTES, STAGE_COLUMNS, STEPS_PER_BOX, Geometry, Pipes, Tiles, TileState
from .row_targets import target_of
from .warpgroups import SCORE_BARRIER, WARPGROUP

NO_BARRIER = 0  # address of a barrier that does not exist
WARP_ROWS = 16
STEPS_PER_STAGE = STAGE_COLUMNS // K_STEP


class KeyMask(Protocol):
    """The keys that a row sees."""

    def apply(self, operands: Any, tiles: Any, scores: TileScores, state: TileState, keys: KeyTile) -> None:
        """Set the scores of keys that a row does not see to -inf."""


class TileValidity(Protocol):
    """The tiles without keys, for kernels that know them ahead."""

    def wait(self, pipes: Any, state: TileState) -> None:
        """Block until a tile's bits are there."""

    def has_keys(self, tiles: Tiles, stage: Int32) -> Boolean:
        """Return whether a tile has any key, from its bits. The same for all lanes."""


class TileScores(Protocol):
    """S of one tile, for one thread: products, and the way of P to shared memory."""

    @property
    def thread(self) -> Int32:
        """Return the thread of the score warpgroup."""

    @property
    def scores(self) -> cute.Tensor:
        """Return the fragment of S, and then of P."""

    def load_queries(self, operands: Any, req: Int32) -> None:
        """Load Q of a work tile. Rows past the last one repeat it; their results go nowhere."""

    def take_queries(self) -> None:
        """Begin load_queries of the next work tile. Only for a role that `reads_ahead`."""

    def release_queries(self, last: Boolean) -> None:
        """Hand the memory of Q on, if S that is complete is the last one of a work tile and another role brings Q."""

    def multiply(self, pipes: Any, state: TileState) -> None:
        """Issue the products of S of one key tile. Wait for each stage just before its first use."""

    def arrival(self, pipes: Any, state: TileState) -> tuple[cute.Pointer, Int32]:
        """Return the barrier, and its phase, that tells that about half of a tile's keys have come."""

    def complete(self, pipes: Any, state: TileState) -> None:
        """Wait until S of a tile is complete. All of its stages have been waited for then."""

    def release_keys(self, pipes: Any, state: TileState) -> None:
        """Hand the keys' memory on, after S."""

    def store_probs(self, pipes: Any, state: TileState, alpha: list[Float32]) -> None:
        """Write P, which has replaced the scores, and the rescale factors. Not handed over yet."""

    def probs_barrier(self, pipes: Any, state: TileState) -> cute.Pointer:
        """Return the barrier that hands over P of a tile."""


@dataclass(frozen=True)
class LatentScores:
    """S (64 rows x 64 keys) = Q K^T of 16-bit operands: the first columns of Q from registers, the others from shared memory."""

    geometry: Geometry
    dtype: type[cutlass.Numeric]
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

    @staticmethod
    def create(geometry: Geometry, dtype: type[cutlass.Numeric], tiles: Tiles, thread: Int32) -> LatentScores:
        """Partition the tiles for one thread of the score warpgroup."""
        mma = tiled_mma(dtype, TILE_KEYS, warpgroup.OperandSource.RMEM, OperandMajorMode.K)
        mma_smem = tiled_mma(dtype, TILE_KEYS, warpgroup.OperandSource.SMEM, OperandMajorMode.K)
        slice_, slice_smem = mma.get_slice(thread), mma_smem.get_slice(thread)
        steps = geometry.q_tiles_in_registers * STEPS_PER_BOX
        writer = writer_address(thread // 32 * (WARP_ROWS * BOX_ROW_BYTES), thread % 32, BOX_ROW_BYTES)
        scores = cute.make_rmem_tensor(slice_.partition_shape_C((64, TILE_KEYS)), Float32)
        return LatentScores(
            geometry=geometry,
            dtype=dtype,
            thread=thread,
            from_registers=mma,
            from_smem=mma_smem,
            rQ=cute.make_rmem_tensor(cute.make_layout((A_VALUES, 1, steps), stride=(A_STRIDES, 0, REGISTERS_PER_STEP)), dtype),
            rStaged=cute.make_rmem_tensor_like(scores, dtype),
            tQ=slice_smem.make_fragment_A(slice_smem.partition_A(tiles.sQ)),
            tK=slice_.make_fragment_B(slice_.partition_B(tiles.sKv)),
            tRope=slice_.make_fragment_B(slice_.partition_B(tiles.sRope)),
            scores=scores,
            probs=pin_register(tiles.sRope.iterator.toint() + writer),
            staged=tiles.sQ.iterator.toint() + writer,
            factors=RowPair.of(tiles.sAlpha, thread),
        )

    @cute.jit
    def load_queries(self, operands: QueryOperands, req: Int32):
        """Load Q of a work tile: the first column tiles to registers, the others through registers to smem."""
        rows, stored = [], operands.row_range(req)
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = stored.nearest(query_row(self.thread, row_half))
            rows.append(stored.q_row(row) + 2 * (self.thread % 4))
        for tile in cutlass.range_constexpr(self.geometry.q_tiles):
            rQ = self.query_tile(tile)
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                for eight in cutlass.range_constexpr(BOX_COLUMNS // 8):
                    source = rows[row_half] + (tile * BOX_COLUMNS + 8 * eight)
                    rQ[2 * eight + row_half] = load_word(source)
            if cutlass.const_expr(tile >= self.geometry.q_tiles_in_registers):
                store_box(self.staged + (tile - self.geometry.q_tiles_in_registers) * BOX_BYTES, self.rStaged)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)

    def take_queries(self) -> None:
        """Do nothing: this role loads Q itself."""

    def await_smem_queries(self) -> None:
        """Do nothing: load_queries has waited for all of Q."""

    def release_queries(self, last: Boolean) -> None:
        """Do nothing: this role loads Q itself."""

    def query_tile(self, tile: int) -> cute.Tensor:
        """Return the 32-bit registers that column tile `tile` of Q is loaded into.

        Columns 8 e + 2 (t % 4) and the next of row half h are register 2 e + h.
        """
        if tile >= self.geometry.q_tiles_in_registers:
            return packed(self.rStaged)
        words = STEPS_PER_BOX * REGISTERS_PER_STEP // 2
        registers = cute.recast_tensor(flat(self.rQ), Int32)
        return cute.make_tensor(registers.iterator + tile * words, cute.make_layout(words))

    def multiply(self, pipes: Pipes, state: TileState) -> None:
        """Issue the products of S of one key tile. Wait for each stage just before its first use."""
        self.from_registers.set(warpgroup.Field.ACCUMULATE, False)
        self.from_smem.set(warpgroup.Field.ACCUMULATE, True)
        kv = state.kv
        for i in range(self.geometry.tile_stages):
            if i == self.geometry.rope_after:
                self.await_smem_queries()
                self._multiply_rope(pipes, state)
            pipes.kv_ready.consumer_wait(kv)
            warpgroup.fence()
            for step in range(STEPS_PER_STAGE):
                self._multiply_step(self.geometry.first_column(i) // K_STEP + step, self.tK[None, None, step, kv.stage])
            kv = pipes.kv_ready.advance_in_tile(kv, i)
        if self.geometry.rope_after == self.geometry.tile_stages:
            self._multiply_rope(pipes, state)
        warpgroup.commit_group()

    def arrival(self, pipes: Pipes, state: TileState) -> tuple[cute.Pointer, Int32]:
        """Return barrier and phase of the RoPE columns, or of the second stage where no barrier tells of those."""
        barriers, use = pipes.rope_ready, state.rope
        if not self.geometry.signals_rope:
            barriers, use = pipes.kv_ready, pipes.kv_ready.advance_in_tile(state.kv, 0)
        return barriers.barrier(use), use.phase

    def complete(self, pipes: Pipes, state: TileState) -> None:
        """Wait until S of a tile is complete."""
        warpgroup.wait_group(0)
        if self.geometry.signals_rope and not self.geometry.has_rope:
            pipes.rope_ready.consumer_wait(state.rope)

    def _multiply_rope(self, pipes: Pipes, state: TileState) -> None:
        """Return S += the RoPE columns of Q times those of K, where keys have any. Wait rope_ready."""
        if self.geometry.has_rope:
            pipes.rope_ready.consumer_wait(state.rope)
            warpgroup.fence()
            for step in range(STEPS_PER_BOX):
                self._multiply_step(self.geometry.tile_stages * STEPS_PER_STAGE + step, self.tRope[None, None, step, state.rope.stage])

    def _multiply_step(self, step: int, tK: cute.Tensor) -> None:
        """Return S += 16 columns of Q times 16 columns of K; the first step of a tile overwrites S."""
        tile, step_in_tile = divmod(step, STEPS_PER_BOX)
        if tile < self.geometry.q_tiles_in_registers:
            cute.gemm(self.from_registers, self.scores, self.rQ[None, None, step], tK, self.scores)
            self.from_registers.set(warpgroup.Field.ACCUMULATE, True)
        else:
            tQ = self.tQ[None, None, step_in_tile, tile - self.geometry.q_tiles_in_registers]
            cute.gemm(self.from_smem, self.scores, tQ, tK, self.scores)

    def release_keys(self, pipes: Pipes, state: TileState) -> None:
        """Wait until every warp's WGMMA has read the RoPE columns, which P overwrites."""
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def store_probs(self, pipes: Pipes, state: TileState, alpha: list[Float32]):
        """Write P, packed to 16 bits, over the RoPE columns of its tile, and the rescale factors beside it."""
        rP = cute.make_rmem_tensor_like(self.scores, self.dtype)
        rP.store(self.scores.load().to(self.dtype))
        store_box(self.probs + state.rope.stage * BOX_BYTES, rP)
        if self.thread % 4 == 0:
            self.factors.store(state.rope.stage, alpha)

    def probs_barrier(self, pipes: Pipes, state: TileState) -> cute.Pointer:
        """Return the barrier that hands over P of a tile."""
        return pipes.probs_ready.barrier(state.rope)


def store_box(place: Int32, fragment: cute.Tensor) -> None:
    """Store a 64x64 fragment of 16 bits to a box of 64 columns. place: writer_address in it."""
    words = packed(fragment)
    for pair in range(cute.size(words) // 4):
        store_groups(place, 0, pair, [words[4 * pair + i] for i in range(4)])


@dataclass(frozen=True)
class ScoreRole:
    """One warpgroup.

    partition: the products of one thread, from tiles and thread. new_softmax: the state of a thread's rows, from the factor of the
    scores. validity: None where every tile has keys. writes_max_logits: whether the greatest logit of every row is a result too.
    reads_ahead: whether another role brings Q, of which part is taken before the rows of the work tile before are finished. d_v: columns of
    out.
    """

    partition: Callable[[Any, Int32], TileScores]
    mask: KeyMask
    row_scale: RowScale
    new_softmax: Callable[[Float32], OnlineSoftmax] = OnlineSoftmax.create
    validity: TileValidity | None = None
    writes_max_logits: bool = False
    reads_ahead: bool = False
    d_v: int = D_LATENT

    @cute.jit
    def run(self, operands: QueryOperands, tiles: Tiles, pipes: Pipes, thread: Int32):
        """Wait kv_ready, rope_ready, stats_free. Signal probs_ready, stats_ready. Write lse."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile, done = Int32(0), Int32(0)
        gemm = self.partition(tiles, thread)
        softmax = self.new_softmax(self.row_scale.score_scale(operands))
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            self.begin_rows(operands, softmax, tile_range)
            if tile_range.tiles > 0:
                gemm.load_queries(operands, req)
                self.score_tiles(operands, tiles, pipes, gemm, softmax, tile_range, tile)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            if cutlass.const_expr(self.reads_ahead):
                self.read_ahead(operands, gemm, work_tile, last)
            pipes.stats_free.producer_acquire(done)
            if cutlass.const_expr(tiles.sTarget is not None):
                totals = self.publish_rows(operands, tiles, req, work_tile, softmax, thread)
                pipes.stats_ready.producer_commit(done)
                self.finish_rows(operands, req, work_tile, softmax, totals, thread)
            else:
                self.publish_and_finish(operands, tiles, req, work_tile, softmax, thread)
                pipes.stats_ready.producer_commit(done)
            self.end_rows(operands, req, softmax, thread)
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    def begin_rows(self, operands: QueryOperands, softmax: OnlineSoftmax, tile_range: TileRange) -> None:
        """Begin the rows of a work tile."""
        softmax.reset()

    def watch_tile(self, softmax: OnlineSoftmax, gemm: TileScores, left: Int32) -> None:
        """Look at the scores of a tile that are to be added to the softmax. left: keys of the work tile from this tile on."""

    def end_rows(self, operands: QueryOperands, req: Int32, softmax: OnlineSoftmax, thread: Int32) -> None:
        """Write further results of the rows of a work tile, which the output role need not wait for."""

    @cute.jit
    def score_tiles(
        self,
        operands: QueryOperands,
        tiles: Tiles,
        pipes: Pipes,
        gemm: TileScores,
        softmax: OnlineSoftmax,
        tile_range: TileRange,
        tile: Int32,
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
            state, last = pipes.tile(tile + t), t + 1 == tile_range.tiles
            if deferred_barrier != NO_BARRIER:
                here = cute.arch.mbarrier_test_wait(*gemm.arrival(pipes, state))
                if not cute.arch.vote_all_sync(here):
                    arrive(barrier_at(deferred_barrier))
                    deferred_barrier = Int32(NO_BARRIER)
            if cutlass.const_expr(self.validity is not None):
                self.validity.wait(pipes, state)
                if self.validity.has_keys(tiles, state.rope.stage):
                    self.multiply_tile(pipes, gemm, state, deferred_barrier, last)
                    self.softmax_step(operands, tiles, pipes, gemm, softmax, state, tile_range.tile(t))
                    deferred_barrier = gemm.probs_barrier(pipes, state).toint()
                else:
                    self.skip_tile(pipes, gemm, state, deferred_barrier, last)
                    deferred_barrier = Int32(NO_BARRIER)
            else:
                self.multiply_tile(pipes, gemm, state, deferred_barrier, last)
                self.softmax_step(operands, tiles, pipes, gemm, softmax, state, tile_range.tile(t))
                deferred_barrier = gemm.probs_barrier(pipes, state).toint()
        if deferred_barrier != NO_BARRIER:
            arrive(barrier_at(deferred_barrier))

    @cute.jit
    def read_ahead(self, operands: QueryOperands, gemm: TileScores, work_tile: WorkTile, last: Int32):
        """Begin to load Q of the work tile behind this one, if it has keys."""
        tiles = Int32(0)
        if work_tile.next_req <= last:
            tiles = operands.schedule.tile_range(work_tile.next_req, work_tile.next_tile).tiles
        if tiles > 0:
            gemm.take_queries()

    @cute.jit
    def multiply_tile(self, pipes: Pipes, gemm: TileScores, state: TileState, deferred_barrier: Int32, last: Boolean):
        """Compute S of one tile. Hand over P of the tile before, if that was deferred, behind the products. last: of the work tile."""
        gemm.multiply(pipes, state)
        if deferred_barrier != NO_BARRIER:
            arrive(barrier_at(deferred_barrier))
        gemm.complete(pipes, state)
        gemm.release_queries(last)
        gemm.release_keys(pipes, state)

    @cute.jit
    def softmax_step(
        self, operands: QueryOperands, tiles: Tiles, pipes: Pipes, gemm: TileScores, softmax: OnlineSoftmax, state: TileState, keys: KeyTile
    ):
        """Turn S of one tile into P, in shared memory with its rescale factors. Not handed over yet."""
        self.mask.apply(operands, tiles, gemm, state, keys)
        self.watch_tile(softmax, gemm, keys.left)
        alpha = softmax.add_tile(gemm.scores)
        gemm.store_probs(pipes, state, alpha)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def skip_tile(self, pipes: Pipes, gemm: TileScores, state: TileState, deferred_barrier: Int32, last: Boolean):
        """Pass on a tile without keys: handshakes only.

        Its stages are handed over before its RoPE columns, so that those tell of all, and no barrier is two phases ahead of what this
        role has seen.
        """
        if deferred_barrier != NO_BARRIER:
            arrive(barrier_at(deferred_barrier))
        gemm.release_queries(last)
        pipes.rope_ready.consumer_wait(state.rope)
        pipes.probs_ready.producer_commit(state.rope)

    @cute.jit
    def publish_rows(self, operands: LatentOperands, tiles: Tiles, req: Int32, work_tile: WorkTile, softmax: OnlineSoftmax, thread: Int32):
        """Publish the factor of each row of O, 0 for a row that attends to nothing, and where the row goes. Return the row sums.

        The output role waits for it, so all that it does not wait for comes behind.
        """
        totals = [softmax.row_sum(row_half) for row_half in range(ROWS_PER_THREAD)]
        rows = [query_row(thread, row_half) for row_half in range(ROWS_PER_THREAD)]
        stored = operands.row_range(req)
        targets = [target_of(operands, stored, work_tile, row, self.d_v) for row in rows]
        if thread % 4 == 0:
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                place, total = fragment_row(thread, row_half), totals[row_half]
                weight = self.row_scale.weight(operands, lambda: work_tile, rows[row_half], total, softmax.row_ref[row_half])
                tiles.sInverse[place] = cutlass.select_(total == 0.0, Float32(0), weight)
                tiles.sTarget[place] = targets[row_half]  # type: ignore[index]  # not None here
        return totals

    @cute.jit
    def finish_rows(
        self, operands: LatentOperands, req: Int32, work_tile: WorkTile, softmax: OnlineSoftmax, totals: list[Float32], thread: Int32
    ):
        """Write lse of each row: natural log if the work tile is the whole request, else base 2. totals: the row sums."""
        stored = operands.row_range(req)
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = query_row(thread, row_half)
            lse = softmax.row_ref[row_half] + cute.math.log2(totals[row_half], fastmath=True)
            empty = totals[row_half] == 0.0
            if (thread % 4 == 0) & stored.holds(row):
                self.store_lse(stored, work_tile, softmax, row_half, row, lse, empty)

    @cute.jit
    def publish_and_finish(
        self, operands: LatentOperands, tiles: Tiles, req: Int32, work_tile: WorkTile, softmax: OnlineSoftmax, thread: Int32
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
                tiles.sInverse[fragment_row(thread, row_half)] = cutlass.select_(empty, Float32(0), weight)
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
        if cutlass.const_expr(self.writes_max_logits):
            operands.max_logit_of(stored.unit, row).store(softmax.maximum(row_half) * LN2)


def query_row(thread: Int32, row_half: int) -> Int32:
    """Return the row, among all row tiles, that one of the thread's fragment rows is."""
    return first_query_row() + fragment_row(thread, row_half)
