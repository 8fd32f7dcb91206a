"""The score role of sparse_prefill_dq on Hopper: S = Q K^T, P, dP = dO V^T, dS, and dQ of the RoPE columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..dense_prefill.sm90_gemm import gather_runs, store_row_words
from ..primitives.arithmetic import pack_pair
from ..primitives.copies import BOX_ROW_BYTES, store_groups, writer_address
from ..primitives.wgmma import K_STEP, REGISTERS_PER_STEP, ROWS_PER_THREAD, TILE_ROWS, flat, half, tiled_mma
from ..sm90.cta import STEPS_PER_BOX, LatentSm90TileState
from ..sm90.score import ALL_VALID, STEPS_PER_STAGE, mask_absent, query_row
from .abi import STATISTIC_DELTA, STATISTIC_LSE, DqOperands
from .score_rows import WARP_ROWS, store_score_rows
from .sm90_config import DqSm90Smem

EARLY_STAGES = 2  # of a tile, whose dP is issued between the products of S
KEY_GROUPS = TILE_KEYS // K_STEP  # whose P is made between steps of dP: a warp that has some steps in flight waits at the next one
DPROBS_STEPS = (8, 12, 16)  # of dP's later stages that are issued before P of each group of keys, all in all

DprobsStep = tuple[int, Int32, int]  # of 16 columns: where its stage begins in dO, the stage, the step in it


@dataclass(frozen=True)
class DqSm90ScoreProducts:
    """S and dP (64 rows x 64 keys), and dQ of the RoPE columns (64 x 64), of one thread. None where keys have no RoPE columns."""

    thread: Int32
    smem: DqSm90Smem
    overwrite: cute.TiledMma
    add: cute.TiledMma
    add_keys: cute.TiledMma  # B transposed: keys are the depth
    tQ: cute.Tensor
    tD: cute.Tensor
    tK: cute.Tensor
    tRope: Any
    tS: cute.Tensor  # dS as A of dQ
    tRopeKeys: Any
    scores: cute.Tensor
    dprobs: cute.Tensor
    rope: Any
    box: Int32  # address of dS
    writer: Int32  # this lane's row of its warp's matrix stores there

    @staticmethod
    def create(dtype: type[cutlass.Numeric], smem: DqSm90Smem, thread: Int32) -> DqSm90ScoreProducts:
        """Partition the tiles for one thread of the score warpgroup."""
        overwrite, add = (tiled_mma(dtype, TILE_KEYS, warpgroup.OperandSource.SMEM, OperandMajorMode.K) for _ in range(2))
        add_keys = tiled_mma(dtype, BOX_COLUMNS, warpgroup.OperandSource.SMEM, OperandMajorMode.MN)
        overwrite.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        add_keys.set(warpgroup.Field.ACCUMULATE, True)
        own, of_keys = add.get_slice(thread), add_keys.get_slice(thread)
        scores, dprobs = (cute.make_rmem_tensor(own.partition_shape_C((TILE_ROWS, TILE_KEYS)), Float32) for _ in range(2))
        tRope, tRopeKeys, rope = None, None, None
        if smem.stages.has_rope:
            shape = (BOX_COLUMNS, TILE_KEYS, cute.size(smem.sRope, mode=[2]))
            transposed = cute.make_layout(shape, stride=(TILE_KEYS, 1, TILE_KEYS * BOX_COLUMNS))
            tRope = own.make_fragment_B(own.partition_B(smem.sRope))
            tRopeKeys = of_keys.make_fragment_B(of_keys.partition_B(cute.composition(smem.sRope, transposed)))
            rope = cute.make_rmem_tensor(of_keys.partition_shape_C((TILE_ROWS, BOX_COLUMNS)), Float32)
        writer = writer_address(thread // 32 * (WARP_ROWS * BOX_ROW_BYTES), thread % 32, BOX_ROW_BYTES)
        return DqSm90ScoreProducts(
            thread=thread,
            smem=smem,
            overwrite=overwrite,
            add=add,
            add_keys=add_keys,
            tQ=own.make_fragment_A(own.partition_A(smem.sQ)),
            tD=own.make_fragment_A(own.partition_A(smem.sD)),
            tK=own.make_fragment_B(own.partition_B(smem.sKv)),
            tRope=tRope,
            tS=of_keys.make_fragment_A(of_keys.partition_A(smem.sS)),
            tRopeKeys=tRopeKeys,
            scores=scores,
            dprobs=dprobs,
            rope=rope,
            box=smem.sS.iterator.toint(),
            writer=smem.sS.iterator.toint() + writer,
        )

    def start(self, state: LatentSm90TileState) -> list[DprobsStep]:
        """Issue S of a tile and dP of its first stages, as a group of WGMMAs. Wait kv_ready, rope_ready. Return what is left of dP.

        So there is work for the tensor cores while keys come, and while P is made. Columns of S ascend as in the forward pass.
        """
        smem, stages, kv = self.smem, self.smem.stages, state.kv
        left = []
        warpgroup.fence()
        for part in range(stages.count):
            if part == stages.before_rope:
                smem.rope_ready.consumer_wait(state.rope)
            smem.kv_ready.consumer_wait(kv)
            column, steps = stages.columns[part], range(STEPS_PER_STAGE)
            self._multiply(self.scores, self.tQ, column, self.tK, kv.stage, steps, first=part == 0)
            if part < EARLY_STAGES:
                self._multiply(self.dprobs, self.tD, column, self.tK, kv.stage, steps, first=part == 0)
            else:
                left += [(column, kv.stage, step) for step in steps]
            kv = smem.kv_ready.advance_in_tile(kv, part)
        if stages.has_rope:
            self._multiply(self.scores, self.tQ, D_LATENT, self.tRope, state.rope.stage, range(STEPS_PER_BOX), first=False)
        warpgroup.commit_group()
        return left

    def add_dprobs(self, steps: list[DprobsStep]) -> None:
        """Issue some steps of dP, as a group of WGMMAs."""
        for column, stage, step in steps:
            self._multiply(self.dprobs, self.tD, column, self.tK, stage, range(step, step + 1), first=False)
        warpgroup.commit_group()

    def _multiply(
        self, total: cute.Tensor, tA: cute.Tensor, column: int, tB: cute.Tensor, stage: Int32, steps: range, *, first: bool
    ) -> None:
        """Add the products of some columns of a stage to S or dP. column: of A, where the stage begins. first: overwrite."""
        for i in steps:
            box, step = divmod(column // K_STEP + i, STEPS_PER_BOX)
            mma = self.overwrite if first and i == 0 else self.add
            cute.gemm(mma, total, tA[None, None, step, box], tB[None, None, i, stage], total)

    def add_rope(self, stage: Int32) -> None:
        """Add dS K to dQ of the RoPE columns, as a group of WGMMAs."""
        warpgroup.fence()
        for step in range(KEY_GROUPS):
            cute.gemm(self.add_keys, self.rope, self.tS[None, None, step, 0], self.tRopeKeys[None, None, step, stage], self.rope)
        warpgroup.commit_group()

    def store(self, group: int, values: list[Float32]) -> None:
        """Store P or dS of 16 keys, rounded, to the box. group: of keys. values: the thread's, in the order of accumulators."""
        dtype = self.smem.sS.element_type
        words = [pack_pair(low, high, dtype) for low, high in zip(values[::2], values[1::2], strict=True)]
        store_groups(self.writer, 0, group, words)


@dataclass(frozen=True)
class QueriesUse:
    """Use of Q and dO by a tile. number: of the token. ends: whether the tile is the token's last one."""

    number: Int32
    ends: Boolean


@dataclass(frozen=True)
class DqSm90ScoreRole:
    """One warpgroup."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm90Smem, thread: Int32):
        """Wait valid_ready, kv_ready, rope_ready, queries_landed, dscores_free, right_turn. Signal probs_ready, rope_free, queries_free.

        Write P, dS, and the RoPE columns of dq.
        """
        schedule = operands.schedule
        token, first = schedule.first_work_tile()
        tile, done = Int32(0), Int32(0)
        products = DqSm90ScoreProducts.create(self.dtype, smem, thread)
        while token <= schedule.last_request():
            tiles = schedule.tile_range(token, first).tiles
            if cutlass.const_expr(smem.stages.has_rope):
                products.rope.fill(0.0)
            if tiles > 0:
                statistics = [
                    [self.statistic(operands, which, token, query_row(thread, row_half)) for row_half in range(ROWS_PER_THREAD)]
                    for which in (STATISTIC_LSE, STATISTIC_DELTA)
                ]
                smem.queries_landed.consumer_wait(done)
                for t in cutlass.range(tiles, unroll=1):
                    state = smem.tile(tile + t)
                    self.score_tile(operands, smem, products, statistics, (token, t * TILE_KEYS), state, QueriesUse(done, t + 1 == tiles))
                warpgroup.wait_group(0)
                smem.rope_free.consumer_release(tile + tiles - 1)
                done = done + 1
            if cutlass.const_expr(smem.stages.has_rope):
                store_dq(operands, token, products.rope, Int32(D_LATENT), thread)
            tile = tile + tiles
            token = schedule.work_tile(token, first).next_req

    @cute.jit
    def statistic(self, operands: DqOperands, which: int, token: Int32, row: Int32) -> Float32:
        """Return lse' or delta' of a query row; of one that does not exist, those of a row without gradient."""
        value = Float32.inf if which == STATISTIC_LSE else Float32(0)
        value = Float32(value)
        if row < operands.rows():
            value = operands.statistic_of(which, token, row).load()
        return value

    @cute.jit
    def score_tile(
        self,
        operands: DqOperands,
        smem: DqSm90Smem,
        products: DqSm90ScoreProducts,
        statistics: list,
        where: tuple[Int32, Int32],
        state: LatentSm90TileState,
        queries: QueriesUse,
    ):
        """Compute P and dS of a tile. statistics: lse' and delta' of the thread's rows. where: token, and position in its list.

        Products of the RoPE columns are complete, and the stage free, when S of the next tile is.
        """
        smem.valid_ready.consumer_wait(state.rope)
        if smem.has_keys(state.rope.stage):
            left = products.start(state)
            products.add_dprobs(left[: DPROBS_STEPS[0]])
            smem.dscores_free.producer_acquire(state.number)
            present = smem.valid_words(state.rope.stage)
            warpgroup.wait_group(1)
            self.mask(products, present)
            for group in cutlass.range_constexpr(KEY_GROUPS):
                self.make_probs(operands, products, statistics[STATISTIC_LSE], group)
                if cutlass.const_expr(group + 1 < len(DPROBS_STEPS)):
                    products.add_dprobs(left[DPROBS_STEPS[group] : DPROBS_STEPS[group + 1]])
                if cutlass.const_expr(group == 0):
                    self.release_before(smem, where, state)
            store_score_rows(products.box, products.thread, operands.args.probs, operands, where)
            warpgroup.wait_group(0)
            self.release_queries(smem, queries)
            for group in cutlass.range_constexpr(KEY_GROUPS):
                self.make_dscores(products, statistics[STATISTIC_DELTA], group)
            cute.arch.fence_proxy("async.shared", space="cta")
            smem.probs_ready.producer_commit(state.rope)
            store_score_rows(products.box, products.thread, operands.args.dscores, operands, where)
            if cutlass.const_expr(smem.stages.has_rope):
                # behind the left output group, for whose stages the copy role waits, and which has waited for all rows of dS
                smem.right_turn.consumer_wait(state.rope)
                products.add_rope(state.rope.stage)
        else:
            warpgroup.wait_group(0)
            self.release_before(smem, where, state)
            self.release_queries(smem, queries)
            smem.rope_ready.consumer_wait(state.rope)
            smem.dscores_free.producer_acquire(state.number)
            smem.probs_ready.producer_commit(state.rope)

    @cute.jit
    def release_queries(self, smem: DqSm90Smem, queries: QueriesUse):
        """Release Q and dO behind the last products of a token that read them. Signal queries_free."""
        if queries.ends:
            smem.queries_free.consumer_release(queries.number)

    @cute.jit
    def release_before(self, smem: DqSm90Smem, where: tuple[Int32, Int32], state: LatentSm90TileState):
        """Release the RoPE stage of the tile before, of the same token. Signal rope_free."""
        if where[1] > 0:
            smem.rope_free.consumer_release(state.number - 1)

    @cute.jit
    def mask(self, products: DqSm90ScoreProducts, present: tuple[Int32, Int32]):
        """Set the scores of absent keys to -inf. present: a bit a key."""
        low, high = present
        if (low & high) != ALL_VALID:
            mask_absent(products.scores, products.thread, {0: low, 1: high})

    def make_probs(self, operands: DqOperands, products: DqSm90ScoreProducts, lse: list, group: int) -> None:
        """Replace S of 16 keys by P, and store it."""
        rS, own = flat(products.scores), group_registers(group)
        for i in own:
            rS[i] = cute.math.exp2(cute.math.fma(rS[i], operands.scale_log2, -lse[half(i)]), fastmath=True)
        products.store(group, [rS[i] * operands.args.inverse_scale for i in own])

    def make_dscores(self, products: DqSm90ScoreProducts, delta: list, group: int) -> None:
        """Store dS of 16 keys."""
        rS, rD = flat(products.scores), flat(products.dprobs)
        products.store(group, [rS[i] * (rD[i] - delta[half(i)]) for i in group_registers(group)])


def group_registers(group: int) -> range:
    """Return the accumulators of 16 keys."""
    return range(group * REGISTERS_PER_STEP, (group + 1) * REGISTERS_PER_STEP)


@cute.jit
def store_dq(operands: DqOperands, token: Int32, total: cute.Tensor, first_column: Int32, thread: Int32):
    """Store some columns of the rows of dq that exist, scaled and rounded. A quad stores runs of 64 bytes."""
    rG, scale, dtype = flat(total), operands.args.sm_scale, operands.args.dq.dtype
    for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
        row = query_row(thread, row_half)
        pairs = range(2 * row_half, cute.size(rG), 4)
        words = gather_runs([pack_pair(rG[i] * scale, rG[i + 1] * scale, dtype) for i in pairs], thread)
        if row < operands.rows():
            store_row_words(operands.dq_row(token, row) + Int64(first_column), words, thread, True)
