"""The output role of the SM90 kernels over a latent: O += P V in registers, rescale, epilogue.

Two warpgroups, each with half of the latent columns. A kernel gives the role the products that make O (LatentSm90Output for 16-bit
operands). dense_decode/sm90.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile, LatentOperands
from ..primitives.arithmetic import pack_pair
from ..primitives.pipeline import PipelineState
from ..primitives.rows import aligned, store_word
from ..primitives.wgmma import K_STEP, ROWS_PER_THREAD, RowPair, flat, fragment_row, half, tiled_mma
from .cta import OUTPUT_BARRIER, OUTPUT_GROUPS, STAGE_COLUMNS, WARPGROUP, LatentSm90Smem, LatentSm90TileState, clear_rows
from .score import IS_SPLIT, output_target, query_row


@dataclass(frozen=True)
class LatentSm90Accumulators:
    """O (64 rows x half of the latent columns) of one thread, as chunks of 128 columns, one stage of keys each.

    A subclass says how a tile is added. The accumulators are 64 x 128 fragments: ptxas refuses a single 64 x 256 one under the
    128 registers that 512 threads start with, although the role raises them.
    """

    thread: Int32
    mma: cute.TiledMma
    tProbs: cute.Tensor
    tV: cute.Tensor
    factors: RowPair
    accumulators: tuple[cute.Tensor, ...]

    def add_tile(self, smem: Any, state: LatentSm90TileState, begun: Boolean, keys: KeyTile, side: Int32) -> Boolean:
        """Add P V of one tile to O; O = P V unless O has begun. Return whether O has begun now."""
        raise NotImplementedError

    def row_factors(self, factors: list[Float32], begun: Boolean) -> list[Float32]:
        """Return the factors of the thread's two rows of O from those that the score role has published. begun: whether O holds anything.

        The factor of a row that attends to nothing is 0.
        """
        return factors

    def multiply_steps(self, mma: cute.TiledMma, chunk: int, steps: int, probs_stage: Int32, kv_stage: Int32, adds: Boolean) -> None:
        """Issue one chunk as its own group of WGMMAs, which adds to O or else overwrites it. steps: over the keys of a tile."""
        accumulator = self.accumulators[chunk]
        for step in range(steps):
            mma.set(warpgroup.Field.ACCUMULATE, adds if step == 0 else True)
            tP, tV = self.tProbs[None, None, step, probs_stage], self.tV[None, None, step, kv_stage]
            cute.gemm(mma, accumulator, tP, tV, accumulator)
        warpgroup.commit_group()

    @cute.jit
    def rescale(self, stage: Int32, begun: Boolean):
        """Multiply O, if it has begun, by the factors of a tile, which lie in a stage of P."""
        alpha = self.factors.load(stage)
        if cute.arch.vote_any_sync(begun & ((alpha[0] != 1.0) | (alpha[1] != 1.0))):
            for accumulator in self.accumulators:
                rO = flat(accumulator)
                for i in cutlass.range_constexpr(cute.size(rO)):
                    rO[i] = rO[i] * alpha[half(i)]

    @cute.jit
    def clear_weightless(self, weights: list[Float32]):
        """Make rows of weight 0 finite: they attend to nothing, and are 0 whatever was accumulated, if anything was."""
        if cute.arch.vote_any_sync((weights[0] == 0.0) | (weights[1] == 0.0)):
            for accumulator in self.accumulators:
                rO = flat(accumulator)
                for i in cutlass.range_constexpr(cute.size(rO)):
                    rO[i] = cutlass.select_(weights[half(i)] == 0.0, Float32(0), rO[i])

    def lane_column(self) -> Int32:
        """Return the first column of the thread's first pair."""
        return 2 * (self.thread % 4)

    def pair_column(self, pair: int) -> int:
        """Return the distance from there to the first column of another pair."""
        return 8 * pair

    def pair_registers(self, pair: int, row_half: int) -> tuple[int, int]:
        """Return the accumulators of a pair of neighbouring columns of one of the thread's rows."""
        first = 4 * pair + 2 * row_half
        return first, first + 1

    def pair(self, pair: int, row_half: int, weight: Float32) -> tuple[Float32, Float32]:
        """Return a pair of neighbouring columns of one of the thread's rows, normalised."""
        values = []
        for register in self.pair_registers(pair, row_half):
            chunk, i = divmod(register, STAGE_COLUMNS // 2)
            values.append(flat(self.accumulators[chunk])[i] * weight)
        return values[0], values[1]


@dataclass(frozen=True)
class LatentSm90Output(LatentSm90Accumulators):
    """O += P V of 16-bit operands, with V the transposed key tile.

    cluster: CTAs that share the stages. unseen: operands that tell which keys of a tile no query token sees, where such keys come as they
    are: hides_values, whether there are any; hole, those before the end. None: the producer has cleared them.
    """

    cluster: int
    unseen: Any

    @staticmethod
    def create(cluster: int, unseen: Any, smem: LatentSm90Smem, thread: Int32) -> LatentSm90Output:
        """Partition the tiles for one thread of an output warpgroup."""
        mma = tiled_mma(smem.sKv.element_type, STAGE_COLUMNS, warpgroup.OperandSource.SMEM, OperandMajorMode.MN)
        slice_ = mma.get_slice(thread)
        shape = (STAGE_COLUMNS, TILE_KEYS, smem.kv_ready.stages)
        transposed = cute.make_layout(shape, stride=(TILE_KEYS, 1, TILE_KEYS * STAGE_COLUMNS))
        sV = cute.composition(smem.sKv, transposed)
        shape = slice_.partition_shape_C((64, STAGE_COLUMNS))
        return LatentSm90Output(
            thread=thread,
            mma=mma,
            tProbs=slice_.make_fragment_A(slice_.partition_A(smem.sRope)),
            tV=slice_.make_fragment_B(slice_.partition_B(sV)),
            factors=RowPair.of(smem.sAlpha, thread),
            accumulators=tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(smem.stages.output_stages)),
            cluster=cluster,
            unseen=unseen,
        )

    @cute.jit
    def add_tile(self, smem: LatentSm90Smem, state: LatentSm90TileState, begun: Boolean, keys: KeyTile, side: Int32) -> Boolean:
        """Add P V of one tile to O. Wait probs_ready, right_turn. Signal kv_free, rope_free, right_turn."""
        # the score role has waited for the keys before it made P
        smem.probs_ready.consumer_wait(state.rope)
        if cutlass.const_expr(smem.valid_ready is not None):
            if smem.has_keys(state.rope.stage):
                self.add_values(smem, state, begun, keys, side)
                begun = Boolean(True)
            else:
                if cutlass.const_expr(smem.right_turn is not None):
                    self.give_turn(smem, state, side)
                for stage in self.stages(smem, state):
                    smem.kv_free.consumer_release_in_cluster(stage, self.cluster)
        else:
            self.add_values(smem, state, begun, keys, side)
            begun = Boolean(True)
        if cutlass.const_expr(smem.rope_free is not None):
            smem.rope_free.consumer_release_in_cluster(state.rope, self.cluster)
        return begun

    def stages(self, smem: LatentSm90Smem, state: LatentSm90TileState) -> list[PipelineState]:
        """Return the stages of a side's chunks of a tile."""
        if smem.stages.output_stages == 1:
            return [state.kv]
        to_next = smem.stages.columns.index(STAGE_COLUMNS)
        barriers = smem.kv_ready
        return [state.kv, barriers.advance_in_tile(state.kv, 0) if to_next == 1 else barriers.advance_by(state.kv, to_next)]

    @cute.jit
    def add_values(self, smem: LatentSm90Smem, state: LatentSm90TileState, begun: Boolean, keys: KeyTile, side: Int32):
        """Add P V of a tile whose keys and probabilities have come to O, or O = P V. Signal kv_free."""
        stages = self.stages(smem, state)
        self.rescale(state.rope.stage, begun)
        if cutlass.const_expr(self.unseen is not None):
            self.clear_unseen(smem, stages, keys, side)
        if cutlass.const_expr(smem.right_turn is not None):
            self.take_turn(smem, state, side)
        warpgroup.fence()
        for chunk in cutlass.range_constexpr(len(stages)):
            self.multiply_steps(self.mma, chunk, TILE_KEYS // K_STEP, state.rope.stage, stages[chunk].stage, begun)
        if cutlass.const_expr(smem.right_turn is not None):
            self.give_turn(smem, state, side)
        for chunk in cutlass.range_constexpr(len(stages)):
            warpgroup.wait_group(len(stages) - 1 - chunk)
            smem.kv_free.consumer_release_in_cluster(stages[chunk], self.cluster)

    @cute.jit
    def take_turn(self, smem: LatentSm90Smem, state: LatentSm90TileState, side: Int32):
        """Wait until the left output group has issued its products of a tile, in the right one. Wait right_turn."""
        if side == 1:
            smem.right_turn.consumer_wait(state.rope)

    @cute.jit
    def give_turn(self, smem: LatentSm90Smem, state: LatentSm90TileState, side: Int32):
        """Let the right output group multiply a tile. Signal right_turn."""
        if side == 0:
            smem.right_turn.producer_commit(state.rope)

    @cute.jit
    def clear_unseen(self, smem: LatentSm90Smem, stages: list[PipelineState], keys: KeyTile, side: Int32):
        """Zero the rows of V of keys that no query token sees: P is 0 there, but 0 times a NaN of an unused row is NaN."""
        if self.unseen.hides_values(keys):
            for stage in stages:
                clear_rows(smem.sKv, stage.stage, keys.remaining, self.thread, more=self.unseen.unseen_keys(keys))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=OUTPUT_BARRIER + side, number_of_threads=WARPGROUP)


@dataclass(frozen=True)
class LatentSm90OutputRole:
    """One of two warpgroups. partition: the products of one thread, from shared memory and thread. dtype: of out."""

    partition: Callable[[Any, Int32], LatentSm90Accumulators]
    dtype: type[cutlass.Numeric]

    def release_rows(self, smem: Any, done: Int32) -> None:
        """Release factors and places of the rows of a work tile."""
        smem.stats_free.consumer_release(done)

    def first_column(self, side: Int32, columns: int) -> Int32:
        """Return the first column of a group of so many."""
        return side * columns

    @cute.jit
    def run(self, operands: LatentOperands, smem: Any, thread: Int32, side: Int32):
        """Wait probs_ready, right_turn, stats_ready. Signal kv_free, rope_free, right_turn, stats_free. Write out or out_accum."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        state, done = smem.first_tile(side), Int32(0)
        gemm = self.partition(smem, thread)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            begun = Boolean(False)
            for t in cutlass.range(tile_range.tiles, unroll=1):
                begun = gemm.add_tile(smem, state, begun, tile_range.tile(t), side)
                state = smem.next_tile(state)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            smem.stats_ready.consumer_wait(done)
            factors = [smem.sInverse[fragment_row(thread, row_half)] for row_half in range(ROWS_PER_THREAD)]
            if cutlass.const_expr(smem.sTarget is not None):
                targets = [smem.sTarget[fragment_row(thread, row_half)] for row_half in range(ROWS_PER_THREAD)]
            self.release_rows(smem, done)
            weights = gemm.row_factors(factors, begun)
            if cutlass.const_expr(smem.sTarget is None):
                stored = operands.row_range(req)
                targets = [output_target(operands, stored, work_tile, query_row(thread, half), smem.d_v) for half in range(ROWS_PER_THREAD)]
            gemm.clear_weightless(weights)
            columns = smem.d_v // OUTPUT_GROUPS
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                first = self.first_column(side, columns)
                self.store_row(gemm, row_half, weights[row_half], targets[row_half], (first, columns), work_tile.always_direct)
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def store_row(
        self, gemm: LatentSm90Accumulators, row_half: int, weight: Float32, target: Int64, columns: tuple[Int32, int], always_direct: bool
    ):
        """Store a row of O, if it exists. target: output_target. columns: of the group, first and number."""
        column, pairs = columns[0] + gemm.lane_column(), columns[1] // 8
        if cutlass.const_expr(always_direct):
            if target != 0:
                self.store_out(gemm, row_half, weight, target, column, pairs)
        else:
            if target & IS_SPLIT != 0:
                store_accum(gemm, row_half, weight, target - IS_SPLIT, column, pairs)
            elif target != 0:
                self.store_out(gemm, row_half, weight, target, column, pairs)

    def store_out(self, gemm: LatentSm90Accumulators, row_half: int, weight: Float32, row: Int64, column: Int32, pairs: int) -> None:
        """Store registers straight to out: the quad writes 16 contiguous bytes of a row."""
        target = cute.make_ptr(self.dtype, row, cute.AddressSpace.gmem, assumed_align=self.dtype.width // 8) + column
        for pair in range(pairs):
            low, high = gemm.pair(pair, row_half, weight)
            store_word(target + gemm.pair_column(pair), pack_pair(low, high, self.dtype))


def store_accum(gemm: LatentSm90Accumulators, row_half: int, weight: Float32, row: Int64, column: Int32, pairs: int) -> None:
    """Store a fp32 row of the split accumulators, 32 contiguous bytes per quad."""
    target = aligned(cute.make_ptr(Float32, row, cute.AddressSpace.gmem, assumed_align=8) + column, 8)
    for pair in range(pairs):
        rPair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        rPair[0], rPair[1] = gemm.pair(pair, row_half, weight)
        cute.autovec_copy(rPair, cute.make_tensor(target + gemm.pair_column(pair), cute.make_layout(2)))
