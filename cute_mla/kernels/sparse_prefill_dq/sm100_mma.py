"""The mma role of sparse_prefill_dq on Blackwell: S = Q K^T, dP = dO V^T and dQ += dS K, but of tiles without keys."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_ROPE
from ...spec.split_plan import TILE_KEYS
from ..primitives import tcgen05
from ..primitives.arithmetic import larger, smaller
from ..sm100.config import (
    BOX_BYTES,
    PAIR,
    PAIR_ROWS,
    QUERY_COLUMN,
    ROW_BYTES,
    SCORE_COLUMN,
    STEP_BYTES,
    STEP_COLUMNS,
    STEPS_PER_BOX,
)
from ..sm100.heads64 import HALVES, LOWER_LANES, Heads64Gemm
from ..sm100.mma import LatentGemmSm100
from .abi import DqOperands
from .sm100_config import (
    DOUT_BOXES,
    DPROBS_COLUMN,
    DPROBS_PARTS,
    PAIR_SCORE_COLUMN,
    PART_KEYS,
    ROPE_COLUMN,
    ROPE_ROW_BYTES,
    VALUE_BOX_BYTES,
    DqSm100Smem,
)


class DqSm100Gemm(Heads64Gemm):
    """Products of a CTA that works alone. S and dQ of the latent columns: those of S and P V of the forward."""

    smem: DqSm100Smem

    def dprobs(self, keys: Any) -> None:
        """Issue dP: 64 rows, of which a warp has 16 in its lanes 16..31."""
        product = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=TILE_KEYS)
        dout = tcgen05.k_major(self.smem.sD)
        for step in range(DOUT_BOXES * STEPS_PER_BOX):
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            offset = box * BOX_BYTES + step_in_box * STEP_BYTES
            tcgen05.multiply(
                self.tmem + (LOWER_LANES + SCORE_COLUMN),
                dout.advance_start_address(offset),
                keys.advance_start_address(offset),
                product,
                accumulate=step > 0,
                group=tcgen05.OWN_GROUP,
            )

    def rope_dq(self, dscores: Any, keys: Any, accumulate: Boolean) -> None:
        """Issue dQ of the RoPE columns: 32 in the lanes 0..63, and the other 32 in 64..127."""
        geometry = self.smem.geometry
        product = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=D_ROPE, transpose_b=True)
        for step in range(geometry.key_steps):
            tcgen05.multiply_stationary(
                self.tmem + ROPE_COLUMN,
                dscores.advance_start_address(step * STEP_BYTES),
                keys.advance_start_address(geometry.rope_box * BOX_BYTES + step * geometry.step_keys * ROW_BYTES),
                product,
                accumulate=accumulate if step == 0 else True,
            )


class DqSm100PairGemm(LatentGemmSm100):
    """Products of a pair, whose operands lie at the same addresses in both CTAs. S and dQ of the latent columns: those of the forward."""

    smem: DqSm100Smem

    def keys(self, tile: Int32) -> tuple[Any, Any]:
        """Return K of a tile as operands: latent columns, and RoPE columns, whose rows have 64 bytes."""
        base = self.smem.stage(self.smem.kv_ready.stage(tile))
        return tcgen05.k_major(base), tcgen05.k_major(base + self.smem.geometry.rope_box * BOX_BYTES, ROPE_ROW_BYTES)

    def scores(self, keys: tuple[Any, Any], part: int, stage: int | Int32 = 0) -> None:
        """Issue a part of S, over the columns that each CTA holds."""
        geometry = self.smem.geometry
        first, count = PART_KEYS[part]
        shape = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * count)
        for step in range(geometry.latent_steps + (geometry.rope_steps if self.has_rope else 0)):
            tcgen05.multiply(
                self.tmem + (PAIR_SCORE_COLUMN + first),
                tcgen05.a_in_tmem(self.tmem + (QUERY_COLUMN + step * STEP_COLUMNS)),
                self.key_step(keys, first, step),
                shape,
                accumulate=step > 0,
            )

    def key_step(self, keys: tuple[Any, Any], first: int, step: int) -> Any:
        """Return the columns of K that one product contracts. first: key of the product."""
        latent, rope = keys
        steps = self.smem.geometry.latent_steps
        if step >= steps:
            return rope.advance_start_address(first * ROPE_ROW_BYTES + (step - steps) * STEP_BYTES)
        box, step_in_box = divmod(step, STEPS_PER_BOX)
        return latent.advance_start_address(first * ROW_BYTES + box * BOX_BYTES + step_in_box * STEP_BYTES)

    def dprobs(self, part: int) -> None:
        """Issue dP over a part of the latent columns: of each CTA's keys, in the lanes 0..63 those of the even one."""
        product = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=TILE_KEYS)
        dout, values = tcgen05.k_major(self.smem.sD), tcgen05.k_major(self.smem.sV)
        steps = DOUT_BOXES * STEPS_PER_BOX // DPROBS_PARTS
        for step in range(part * steps, (part + 1) * steps):
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            tcgen05.multiply(
                self.tmem + DPROBS_COLUMN,
                dout.advance_start_address(box * BOX_BYTES + step_in_box * STEP_BYTES),
                values.advance_start_address(box * VALUE_BOX_BYTES + step_in_box * STEP_BYTES),
                product,
                accumulate=step > 0,
            )

    def dq(self, tile: Int32, accumulate: Boolean) -> None:
        """Issue dQ of the columns of both CTAs, in the lanes 0..63 those of the even one."""
        geometry, dscores = self.smem.geometry, tcgen05.k_major(self.smem.sS)
        base = self.smem.stage(self.smem.kv_ready.stage(tile))
        self.output(dscores, tcgen05.mn_major(base, BOX_BYTES), accumulate)
        if not self.has_rope:
            return
        rope_box = geometry.rope_box * BOX_BYTES
        keys = tcgen05.mn_major(base + rope_box, TILE_KEYS * ROPE_ROW_BYTES, ROPE_ROW_BYTES)
        product = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=D_ROPE, transpose_b=True)
        for step in range(geometry.key_steps):
            tcgen05.multiply(
                self.tmem + ROPE_COLUMN,
                dscores.advance_start_address(step * STEP_BYTES),
                keys.advance_start_address(step * geometry.step_keys * ROPE_ROW_BYTES),
                product,
                accumulate=accumulate if step == 0 else True,
            )


class DqSm100MmaRole:
    """One warp."""

    @cute.jit
    def run(self, operands: DqOperands, smem: DqSm100Smem, gemm: DqSm100Gemm):
        """Wait left_ready, kv_ready, query_ready, dout_ready, scores_free, dprobs_free, dscores_ready, dq_free.

        Signal left_free, kv_free, query_free, dout_free, scores_ready, dprobs_ready, dq_ready.

        S of a tile, dQ of the tile before, dP of the tile: so from token to token without a break. dQ of a token's last tile does not wait
        for a token without tiles.
        """
        schedule = operands.schedule
        token, first = schedule.first_work_tile()
        last = schedule.last_request()
        # tile: of all tokens. number: tokens with tiles. waiting: which tile of its token the one is whose dQ is still to come, or -1
        tile, number, waiting = Int32(0), Int32(0), Int32(-1)
        begun, filled, more = Boolean(False), Boolean(False), token <= last
        while more:
            more = token <= last  # after the last token comes one without tiles
            tiles = cutlass.select_(more, schedule.tile_range(smaller(token, last), first).tiles, Int32(0))
            for t in cutlass.range(larger(tiles, Int32(1)), unroll=1):
                next_filled = Boolean(False)
                if t < tiles:
                    next_filled = self.multiply_scores(smem, gemm, tile + t, number, t == 0, t == tiles - 1)
                if waiting >= 0:
                    owner = cutlass.select_(t == 0, number - 1, number)
                    begun = self.multiply_dq(smem, gemm, tile + t - 1, owner, waiting == 0, begun, filled)
                    if t == 0:
                        self.finish(smem, owner)
                waiting = Int32(-1)
                if t < tiles:
                    self.multiply_dprobs(smem, gemm, tile + t, number, t == 0, t == tiles - 1, next_filled)
                    waiting = Int32(t)
                filled = next_filled
            tile = tile + tiles
            number = number + cutlass.select_(tiles > 0, Int32(1), Int32(0))
            token = schedule.work_tile(smaller(token, last), first).next_req

    @cute.jit
    def multiply_scores(self, smem: DqSm100Smem, gemm: DqSm100Gemm, tile: Int32, number: Int32, opens: Boolean, closes: Boolean):
        """Issue S of one tile. Return whether it has keys. opens, closes: whether it is the first, the last of its token.

        S of the tile before has been read: its dP has been issued. The second half of S takes the lanes of that dP.
        """
        keys = gemm.keys(tile)
        smem.left_ready.consumer_wait(tile)
        filled = smem.has_keys(tile)
        smem.left_free.consumer_release(tile)  # the bits have been read
        if opens:
            smem.query_ready.consumer_wait(number)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.latent_scores(keys, 0)
        smem.kv_ready.consumer_wait(tile)
        smem.dprobs_free.producer_acquire(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.latent_scores(keys, 1)
                if cutlass.const_expr(gemm.has_rope):
                    gemm.rope_scores(keys, 1)
                    gemm.rope_scores(keys, 0)
            tcgen05.commit_alone(smem.scores_ready.barrier(tile))
            if closes:
                tcgen05.commit_alone(smem.query_free.barrier(number))
        return filled

    @cute.jit
    def multiply_dprobs(
        self, smem: DqSm100Smem, gemm: DqSm100Gemm, tile: Int32, number: Int32, opens: Boolean, closes: Boolean, filled: Boolean
    ):  # fmt: skip
        """Issue dP of one tile, if it has keys, when its S has been read. opens, closes: as in multiply_scores."""
        if opens:
            smem.dout_ready.consumer_wait(number)
        smem.scores_free.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.dprobs(gemm.keys(tile))
            tcgen05.commit_alone(smem.dprobs_ready.barrier(tile))
            if closes:
                tcgen05.commit_alone(smem.dout_free.barrier(number))

    @cute.jit
    def multiply_dq(
        self, smem: DqSm100Smem, gemm: DqSm100Gemm, tile: Int32, number: Int32, opens: Boolean, begun: Boolean, filled: Boolean
    ):  # fmt: skip
        """Issue dQ of one tile, if it has keys. Release a half of the columns when it has been read. Return whether dQ is begun then."""
        _, keys = gemm.probs_and_values(tile)
        dscores = tcgen05.k_major(smem.sS)
        if opens:
            smem.dq_free.producer_acquire(number)
            begun = Boolean(False)
        smem.dscores_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(HALVES):
                if filled:
                    gemm.output(dscores, keys, half, begun)
                    if cutlass.const_expr(gemm.has_rope and half == HALVES - 1):
                        gemm.rope_dq(dscores, keys, begun)
                tcgen05.commit_alone((smem.left_free if half == 0 else smem.kv_free).barrier(tile))
        return begun | filled

    def finish(self, smem: DqSm100Smem, number: Int32) -> None:
        """Hand dQ of a token over."""
        with cute.arch.elect_one():
            tcgen05.commit_alone(smem.dq_ready.barrier(number))


class DqSm100PairMmaRole(DqSm100MmaRole):
    """One warp of the even CTA. Commits arrive in both. dP takes the columns of the second part of S."""

    @cute.jit
    def multiply_scores(self, smem: DqSm100Smem, gemm: DqSm100PairGemm, tile: Int32, number: Int32, opens: Boolean, closes: Boolean):
        """Issue S of one tile. Return whether it has keys. opens, closes: whether it is the first, the last of its token.

        S of the tile before has been read: its dP has been issued.
        """
        keys = gemm.keys(tile)
        smem.kv_ready.consumer_wait(tile)
        filled = smem.has_keys(tile)
        smem.kv_free.consumer_release(tile)  # the bits have been read
        if opens:
            smem.query_ready.consumer_wait(number)
        parts = smem.geometry.score_parts
        for part in cutlass.range_constexpr(parts):
            if cutlass.const_expr(part > 0):
                smem.dprobs_free.producer_acquire(tile)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                if filled:
                    gemm.scores(keys, part)
                tcgen05.commit(smem.scores_ready.barrier(tile * parts + part))
        if closes:
            with cute.arch.elect_one():
                tcgen05.commit(smem.query_free.barrier(number))
        return filled

    @cute.jit
    def multiply_dprobs(
        self, smem: DqSm100Smem, gemm: DqSm100PairGemm, tile: Int32, number: Int32, opens: Boolean, closes: Boolean, filled: Boolean
    ):  # fmt: skip
        """Issue dP of one tile, if it has keys, when its S has been read. opens, closes: as in multiply_scores."""
        smem.value_ready.consumer_wait(tile)
        smem.scores_free.consumer_wait(tile)
        tcgen05.fence_after_wait()
        for part in cutlass.range_constexpr(DPROBS_PARTS):
            if opens:
                smem.dout_ready.consumer_wait(number * DPROBS_PARTS + part)
            with cute.arch.elect_one():
                if filled:
                    gemm.dprobs(part)
                tcgen05.commit(smem.value_free.barrier(tile * DPROBS_PARTS + part))
                if cutlass.const_expr(part == DPROBS_PARTS - 1):
                    tcgen05.commit(smem.dprobs_ready.barrier(tile))
                if closes:
                    tcgen05.commit(smem.dout_free.barrier(number * DPROBS_PARTS + part))

    @cute.jit
    def multiply_dq(
        self, smem: DqSm100Smem, gemm: DqSm100PairGemm, tile: Int32, number: Int32, opens: Boolean, begun: Boolean, filled: Boolean
    ):  # fmt: skip
        """Issue dQ of one tile, if it has keys. Return whether dQ is begun then."""
        if opens:
            smem.dq_free.producer_acquire(number)
            begun = Boolean(False)
        smem.dscores_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.dq(tile, begun)
        return begun | filled

    def finish(self, smem: DqSm100Smem, number: Int32) -> None:
        """Hand dQ of a token over."""
        with cute.arch.elect_one():
            tcgen05.commit(smem.dq_ready.barrier(number))
