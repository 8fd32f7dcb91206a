"""The mma role of sparse prefill on Blackwell with up to 64 heads: S = Q K^T and O += P V of one CTA.

sm100_heads64.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..primitives import tcgen05
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
from ..sm100.indexed_keys import SeenTiles
from ..sm100.mma import MmaRole
from .sm100_heads64_tiles import HALF_BOXES, HALF_COLUMNS, HALVES, HEADS64, LOWER_LANES, ROPE_BOX, HeadsPipes, HeadsTiles


@dataclass(frozen=True)
class HeadsGemm:
    """The operands. One thread multiplies. dtype: of Q, K, V and P. has_rope: whether keys have columns that are not values."""

    dtype: type[cutlass.Numeric]
    has_rope: bool
    tiles: HeadsTiles
    tmem: Int32

    def keys(self, stage: Int32) -> Any:
        """Return K of a tile as operand."""
        return tcgen05.k_major(self.tiles.stage(stage))

    def probs_and_values(self, stage: Int32) -> tuple[Any, Any]:
        """Return P and V of a tile as operands."""
        base = self.tiles.stage(stage)
        return tcgen05.k_major(base + ROPE_BOX * BOX_BYTES), tcgen05.mn_major(base, BOX_BYTES)

    def latent_scores(self, keys: Any, half: int) -> None:
        """Issue S of half of the latent columns: 64 rows, of which a warp has 16 in its lanes 0..15 (first half) or 16..31."""
        for step in range(HEADS64.latent_steps):
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            offset = (half * HALF_BOXES + box) * BOX_BYTES + step_in_box * STEP_BYTES
            self._score_step(keys, half, step, offset)

    def rope_scores(self, keys: Any, half: int) -> None:
        """Add S of half of the RoPE columns to that of the latent columns."""
        for step in range(HEADS64.rope_steps):
            offset = ROPE_BOX * BOX_BYTES + (half * HEADS64.rope_steps + step) * STEP_BYTES
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


@dataclass(frozen=True, kw_only=True)
class HeadsMmaRole(MmaRole):
    """One warp."""

    validity: SeenTiles

    @cute.jit
    def multiply_valid_scores(self, pipes: HeadsPipes, gemm: HeadsGemm, tile: Int32):
        """Issue S of one tile, half of its columns after the other. Return whether it has keys."""
        keys = gemm.keys(pipes.kv_ready.stage(tile))
        pipes.left_ready.consumer_wait(tile)
        filled = self.validity.has_keys(pipes, tile)
        pipes.left_free.consumer_release(tile)  # the bits have been read
        pipes.scores_free.producer_acquire(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.latent_scores(keys, 0)
        pipes.kv_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.latent_scores(keys, 1)
                if cutlass.const_expr(gemm.has_rope):
                    gemm.rope_scores(keys, 1)
                    gemm.rope_scores(keys, 0)
            tcgen05.commit_alone(pipes.scores_ready.barrier(tile))
        return filled

    @cute.jit
    def multiply_valid_output(self, pipes: HeadsPipes, gemm: HeadsGemm, tile: Int32, begun: Boolean, filled: Boolean):
        """Issue P V of one tile, if it has keys. Release a half of the columns when its values have been read."""
        probs, values = gemm.probs_and_values(pipes.kv_ready.stage(tile))
        pipes.probs_ready.consumer_wait(tile)
        pipes.output_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(HALVES):
                if filled:
                    gemm.output(probs, values, half, begun)
                tcgen05.commit_alone((pipes.left_free if half == 0 else pipes.kv_free).barrier(tile))
