"""The mma role of sparse prefill on Blackwell: S = Q K^T and O += P V, but of tiles without keys.

sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..primitives import tcgen05
from ..primitives.arithmetic import smaller
from ..sm100.config import (
    BOX_BYTES,
    CHUNK_COLUMNS,
    OUTPUT_COLUMN,
    QUERY_COLUMN,
    ROW_BYTES,
    SCORE_COLUMN,
    STEP_BYTES,
    STEP_COLUMNS,
    STEPS_PER_BOX,
)
from ..sm100.mma import LatentGemmSm100, LatentOperandsSm100, await_probs, await_score_role
from .operands import SparsePrefillOperands
from .sm100_config import HALF_BOXES, HALF_COLUMNS, HALVES, HEADS64, LOWER_LANES, SparsePrefillSmemSm100


@dataclass(frozen=True)
class SparsePrefillMmaRoleSm100:
    """One warp. products: PairProducts or Heads64Products."""

    products: Any

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, gemm: Any):
        """Wait kv_ready, query_ready, scores_free, probs_ready, output_ready. Signal scores_ready, kv_free.

        The first tile with keys begins O anew. The first S of a token is issued before the last P V of the one before. It is not if
        either has no tiles: Q then comes when that P V has been read out.
        """
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        tile, queries, issued, filled = Int32(0), Int32(0), Int32(0), Boolean(False)
        tiles = self.tiles_of(operands, req, begin_tile)
        while req <= schedule.last_request():
            work_tile = schedule.work_tile(req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
            next_tiles = self.tiles_of(operands, req, begin_tile)
            ahead = smaller(smaller(tiles, next_tiles), Int32(1))
            begun = Boolean(False)
            for t in cutlass.range(issued, smaller(tiles, Int32(1)) + tiles, unroll=1):
                next_filled = Boolean(False)
                if t < tiles + ahead:
                    if t == 0 or t == tiles:
                        smem.query_ready.consumer_wait(queries)
                        queries = queries + 1
                    next_filled = self.products.multiply_scores(smem, gemm, tile + t)
                if t > 0:
                    self.products.multiply_output(smem, gemm, tile + t - 1, begun, filled)
                    begun = begun | filled
                filled = next_filled
            tile, tiles, issued = tile + tiles, next_tiles, ahead
        await_score_role(smem, tile)

    @cute.jit
    def tiles_of(self, operands: SparsePrefillOperands, req: Int32, begin_tile: Int32):
        """Return the tiles of a token, 0 after the last one."""
        last = operands.schedule.last_request()
        return cutlass.select_(req <= last, operands.schedule.tile_range(smaller(req, last), begin_tile).tiles, Int32(0))


class PairProducts:
    """Products of the tiles of a pair."""

    @cute.jit
    def multiply_scores(self, smem: SparsePrefillSmemSm100, gemm: LatentGemmSm100, tile: Int32):
        """Issue S of one tile. Return whether it has keys."""
        keys = gemm.keys(tile)
        smem.kv_ready.consumer_wait(tile)
        filled = smem.has_keys(tile)
        smem.kv_free.consumer_release(tile)  # the bits have been read
        for part in cutlass.range_constexpr(smem.geometry.score_parts):
            use = tile * smem.geometry.score_parts + part
            smem.scores_free.producer_acquire(use)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                if filled:
                    gemm.scores(keys, part)
                tcgen05.commit(smem.scores_ready.barrier(use))
        return filled

    @cute.jit
    def multiply_output(self, smem: SparsePrefillSmemSm100, gemm: LatentGemmSm100, tile: Int32, begun: Boolean, filled: Boolean):
        """Issue P V of one tile, if it has keys."""
        probs, values = gemm.probs_and_values(tile)
        await_probs(smem, tile)
        with cute.arch.elect_one():
            if filled:
                gemm.output(probs, values, begun)
            tcgen05.commit(smem.kv_free.barrier(tile))


class Heads64Products:
    """Products of the tiles of a CTA that works alone, half of the columns after the other."""

    @cute.jit
    def multiply_scores(self, smem: SparsePrefillSmemSm100, gemm: Heads64Gemm, tile: Int32):
        """Issue S of one tile. Return whether it has keys."""
        keys = gemm.keys(tile)
        smem.left_ready.consumer_wait(tile)
        filled = smem.has_keys(tile)
        smem.left_free.consumer_release(tile)  # the bits have been read
        smem.scores_free.producer_acquire(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.latent_scores(keys, 0)
        smem.kv_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.latent_scores(keys, 1)
                if cutlass.const_expr(gemm.has_rope):
                    gemm.rope_scores(keys, 1)
                    gemm.rope_scores(keys, 0)
            tcgen05.commit_alone(smem.scores_ready.barrier(tile))
        return filled

    @cute.jit
    def multiply_output(self, smem: SparsePrefillSmemSm100, gemm: Heads64Gemm, tile: Int32, begun: Boolean, filled: Boolean):
        """Issue P V of one tile, if it has keys. Release a half of the columns when its values have been read."""
        probs, values = gemm.probs_and_values(tile)
        await_probs(smem, tile)
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(HALVES):
                if filled:
                    gemm.output(probs, values, half, begun)
                tcgen05.commit_alone((smem.left_free if half == 0 else smem.kv_free).barrier(tile))


class Heads64Gemm(LatentOperandsSm100):
    """Products of a CTA that works alone."""

    def latent_scores(self, keys: Any, half: int) -> None:
        """Issue S of half of the latent columns: 64 rows, of which a warp has 16 in its lanes 0..15 (first half) or 16..31."""
        for step in range(HEADS64.latent_steps):
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            offset = (half * HALF_BOXES + box) * BOX_BYTES + step_in_box * STEP_BYTES
            self._score_step(keys, half, step, offset)

    def rope_scores(self, keys: Any, half: int) -> None:
        """Add S of half of the RoPE columns to that of the latent columns."""
        for step in range(HEADS64.rope_steps):
            offset = HEADS64.rope_box * BOX_BYTES + (half * HEADS64.rope_steps + step) * STEP_BYTES
            self._score_step(keys, half, HEADS64.latent_steps + step, offset)

    def _score_step(self, keys: Any, half: int, step: int, offset: int) -> None:
        lanes = self.tmem + half * LOWER_LANES
        tcgen05.multiply(
            lanes + SCORE_COLUMN,
            tcgen05.a_in_tmem(lanes + (QUERY_COLUMN + step * STEP_COLUMNS)),
            keys.advance_start_address(offset),
            tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=TILE_KEYS),
            accumulate=step > 0,
            group=tcgen05.OWN_GROUP,
        )

    def output(self, probs: Any, values: Any, half: int, accumulate: Boolean) -> None:
        """Issue O += P V, or O = P V, for half of the value columns: 128 in the lanes 0..63, and the next 128 in 64..127."""
        product = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=HALF_COLUMNS, transpose_b=True)
        for step in range(HEADS64.key_steps):
            tcgen05.multiply_stationary(
                self.tmem + (OUTPUT_COLUMN + half * CHUNK_COLUMNS),
                probs.advance_start_address(step * STEP_BYTES),
                values.advance_start_address(half * HALF_BOXES * BOX_BYTES + step * HEADS64.step_keys * ROW_BYTES),
                product,
                accumulate=accumulate if step == 0 else True,
            )
