"""The score role of sparse_prefill_dq on Hopper: S = Q K^T, P, dP = dO V^T, dS, and dQ of the RoPE columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..dense_prefill.sm90_gemm import gather_runs, store_row_words
from ..primitives.arithmetic import pack_pair
from ..primitives.copies import BOX_ROW_BYTES, writer_address
from ..primitives.wgmma import K_STEP, ROWS_PER_THREAD, TILE_ROWS, flat, half, packed, tiled_mma
from ..sm90.cta import ROPE, SCORE_BARRIER, STEPS_PER_BOX, WARPGROUP, LatentSm90TileState
from ..sm90.score import ALL_VALID, STEPS_PER_STAGE, mask_absent, query_row, store_box
from .abi import STATISTIC_DELTA, STATISTIC_LSE, DqOperands
from .score_rows import WARP_ROWS, store_score_rows
from .sm90_config import DqSm90Smem


EARLY_STAGES = 2  # of a tile, whose dP is issued between the products of S


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
    rounded: cute.Tensor  # 16-bit P, then dS
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
            rounded=cute.make_rmem_tensor_like(scores, dtype),
            box=smem.sS.iterator.toint(),
            writer=smem.sS.iterator.toint() + writer,
        )

    def start(self, state: LatentSm90TileState) -> None:
        """Issue S of a tile and dP of its first stages, as a group of WGMMAs, then the rest of dP. Wait kv_ready, rope_ready.

        So there is work for the tensor cores while keys come, and the exponentials run under the rest.
        """
        smem, stages, kv = self.smem, self.smem.stages, state.kv
        late = []
        for part in stages.parts:
            if part == ROPE:
                smem.rope_ready.consumer_wait(state.rope)
                if stages.has_rope:
                    self._multiply(self.scores, self.tQ, D_LATENT, self.tRope, state.rope.stage, STEPS_PER_BOX, first=False)
            else:
                smem.kv_ready.consumer_wait(kv)
                self._multiply(self.scores, self.tQ, stages.columns[part], self.tK, kv.stage, STEPS_PER_STAGE, first=part == 0)
                if part < EARLY_STAGES:
                    self._multiply_dprobs(part, kv.stage)
                else:
                    late.append((part, kv.stage))
                kv = smem.kv_ready.advance_in_tile(kv, part)
        warpgroup.commit_group()
        for part, stage in late:
            self._multiply_dprobs(part, stage)
        warpgroup.commit_group()

    def _multiply_dprobs(self, part: int, stage: Int32) -> None:
        """Add the products of a stage to dP."""
        self._multiply(self.dprobs, self.tD, self.smem.stages.columns[part], self.tK, stage, STEPS_PER_STAGE, first=part == 0)

    def _multiply(
        self, total: cute.Tensor, tA: cute.Tensor, column: int, tB: cute.Tensor, stage: Int32, steps: int, *, first: bool
    ) -> None:
        """Add the products of some columns of a stage to S or dP. column: of A. first: overwrite."""
        warpgroup.fence()
        for i in range(steps):
            box, step = divmod(column // K_STEP + i, STEPS_PER_BOX)
            mma = self.overwrite if first and i == 0 else self.add
            cute.gemm(mma, total, tA[None, None, step, box], tB[None, None, i, stage], total)

    def add_rope(self, stage: Int32) -> None:
        """Add dS K to dQ of the RoPE columns, and wait until it is complete."""
        warpgroup.fence()
        for step in range(TILE_KEYS // K_STEP):
            cute.gemm(self.add_keys, self.rope, self.tS[None, None, step, 0], self.tRopeKeys[None, None, step, stage], self.rope)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    def round(self, values: cute.Tensor, factor: Float32 | None = None) -> None:
        """Round P or dS, times a factor."""
        words, exact = packed(self.rounded), flat(values)
        for i in range(cute.size(words)):
            low, high = exact[2 * i], exact[2 * i + 1]
            if factor is not None:
                low, high = low * factor, high * factor
            words[i] = pack_pair(low, high, self.rounded.element_type)


@dataclass(frozen=True)
class DqSm90ScoreRole:
    """One warpgroup."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm90Smem, thread: Int32):
        """Wait valid_ready, kv_ready, rope_ready, queries_landed, dscores_free. Signal probs_ready, rope_free, queries_free.

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
                    self.score_tile(operands, smem, products, statistics, (token, t * TILE_KEYS), smem.tile(tile + t))
                smem.queries_free.consumer_release(done)
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
    ):
        """Compute P and dS of a tile. statistics: lse' and delta' of the thread's rows. where: token, and position in its list."""
        smem.valid_ready.consumer_wait(state.rope)
        if smem.has_keys(state.rope.stage):
            products.start(state)
            warpgroup.wait_group(1)
            self.make_probs(operands, smem, products, statistics[STATISTIC_LSE], state)
            products.round(products.scores, operands.args.inverse_scale)
            smem.dscores_free.producer_acquire(state.number)
            store_box(products.writer, products.rounded)
            store_score_rows(products.box, products.thread, operands.args.probs, operands, where)
            warpgroup.wait_group(0)
            rS, rD, delta = flat(products.scores), flat(products.dprobs), statistics[STATISTIC_DELTA]
            for i in cutlass.range_constexpr(cute.size(rS)):
                rD[i] = rS[i] * (rD[i] - delta[half(i)])
            products.round(products.dprobs)
            store_box(products.writer, products.rounded)
            cute.arch.fence_proxy("async.shared", space="cta")
            smem.probs_ready.producer_commit(state.rope)
            if cutlass.const_expr(smem.stages.has_rope):
                cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)  # all rows of dS are there
                products.add_rope(state.rope.stage)
            smem.rope_free.consumer_release(state.rope)
            store_score_rows(products.box, products.thread, operands.args.dscores, operands, where)
        else:
            smem.rope_ready.consumer_wait(state.rope)
            smem.dscores_free.producer_acquire(state.number)
            smem.probs_ready.producer_commit(state.rope)
            smem.rope_free.consumer_release(state.rope)

    @cute.jit
    def make_probs(self, operands: DqOperands, smem: DqSm90Smem, products: DqSm90ScoreProducts, lse: list, state: LatentSm90TileState):
        """Replace S by P, 0 for absent keys."""
        low, high = smem.valid_words(state.rope.stage)
        if (low & high) != ALL_VALID:
            mask_absent(products.scores, products.thread, {0: low, 1: high})
        rS = flat(products.scores)
        for i in cutlass.range_constexpr(cute.size(rS)):
            rS[i] = cute.math.exp2(cute.math.fma(rS[i], operands.scale_log2, -lse[half(i)]), fastmath=True)


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
