"""A CTA of up to 64 heads that works alone on Blackwell: geometry, shared memory and products.

A pair of CTAs multiplies 128 rows at a time, of which 64 heads fill half. Here a CTA multiplies 64 rows and holds all columns of every key,
in two halves: each is filled, handed over, multiplied and released by itself.

The trick: S is split over the columns, as between the CTAs of a pair, but both halves lie in the lanes of one warp.
  S    A of 64 rows and D of 64 rows take 16 of each warp's 32 lanes (PTX ISA, layout F), at half of the tensor core's rate. Q of the
       columns 0..255 (and 0..31 of RoPE) and its scores have the lanes 0..15, the other half 16..31. So Q takes 144 columns of tensor
       memory, not 288, which would not fit beside O; and a thread loads the same rows of both halves and adds them in registers.
  P V  tcgen05.mma.ws: D of 64 rows takes all lanes (layout E) at the whole rate. Lanes 0..63 have the first 128 of 256 columns of O,
       lanes 64..127 the others.

Order of products: S of tile n + 1, then P V of tile n.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint8, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.cta import Arrivals
from ..primitives import tcgen05
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, Field, SmemLayout
from .config import (
    BOX_BYTES,
    CHUNK_COLUMNS,
    GROUP_WARPS,
    HALF_LANES,
    OUTPUT_COLUMN,
    PAIR,
    QUERY_COLUMN,
    ROW_BYTES,
    SCORE_COLUMN,
    SIXTEEN_BIT,
    STEP_BYTES,
    STEP_COLUMNS,
    STEPS_PER_BOX,
    LatentSmemSm100,
)
from .mma import LatentMmaRoleSm100, LatentOperandsSm100, await_probs

HEADS64 = replace(SIXTEEN_BIT, kv_stages=3, paired=False)
HALVES = PAIR  # of the columns of a tile
HALF_BOXES = HEADS64.latent_boxes  # of latent columns
HALF_COLUMNS = D_LATENT // HALVES
LOWER_LANES = HALF_LANES << 16  # of a warp, in an address of tensor memory: where Q and S of the second half lie


def heads64_smem(arrays: tuple[Field, ...], added: tuple[Field, ...] = ()) -> SmemLayout:
    """Return the layout of shared memory. arrays, added: fields of a kernel's own. There are no fields to exchange scores."""
    seen_ready, seen_bits = HEADS64.seen_fields()
    return SmemLayout((
        Array("sKv", Uint8, HEADS64.kv_stages * HEADS64.stage_bytes, SWIZZLE_PERIOD),
        Array("sAlpha", Float32, HEADS64.parities * TILE_ROWS),
        *arrays,
        *(Barriers(name, HEADS64.kv_stages) for name in ("left_ready", "left_free", "kv_ready", "kv_free")),
        seen_ready,
        *(Barriers(name, 1) for name in ("query_ready", "scores_ready", "scores_free", "stats_ready", "stats_free")),
        *(Barriers(name, HEADS64.parities) for name in ("alpha_ready", "probs_ready", "output_ready")),
        seen_bits,
        Array("tmem_cell", Int32, 1),
        *added,
    ))  # fmt: skip


def heads64_arrivals(smem: Any, left_releases: int = 1) -> tuple[Arrivals, ...]:
    """Return the arrivals of every barrier: warps of the arriving role, or one commit. left_releases: those of left_free."""
    by_warps = (
        smem.left_ready, smem.kv_ready, smem.seen_ready, smem.query_ready, smem.scores_free, smem.alpha_ready, smem.probs_ready,
        smem.output_ready, smem.stats_ready, smem.stats_free,
    )  # fmt: skip
    return (GROUP_WARPS, by_warps), (left_releases, (smem.left_free,)), (1, (smem.kv_free, smem.scores_ready))


class Heads64Products:
    """Products of the tiles of a CTA that works alone, half of the columns after the other."""

    def filled(self, smem: LatentSmemSm100, tile: Int32) -> Boolean:
        """Return whether a tile is multiplied. After left_ready."""
        return Boolean(True)

    @cute.jit
    def multiply_scores(self, smem: LatentSmemSm100, gemm: Heads64Gemm, tile: Int32):
        """Issue S of one tile. Return whether it has keys."""
        keys = gemm.keys(tile)
        smem.left_ready.consumer_wait(tile)
        filled = self.filled(smem, tile)
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
    def multiply_output(self, smem: LatentSmemSm100, gemm: Heads64Gemm, tile: Int32, begun: Boolean, filled: Boolean):
        """Issue P V of one tile, if it has keys. Release a half of the columns when its values have been read."""
        probs, values = gemm.probs_and_values(tile)
        await_probs(smem, tile)
        with cute.arch.elect_one():
            for half in cutlass.range_constexpr(HALVES):
                if filled:
                    gemm.output(probs, values, half, begun)
                self.release(half, smem, tile)

    def release(self, half: int, smem: LatentSmemSm100, tile: Int32) -> None:
        """Signal left_free or kv_free when the products issued so far are done."""
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


class Heads64MmaRoleSm100(LatentMmaRoleSm100):
    """One warp of a CTA that works alone."""

    products = Heads64Products()

    def multiply_scores(self, smem: LatentSmemSm100, gemm: Any, tile: Int32, first: int, end: int) -> None:
        """Issue S of one tile, which has one part."""
        self.products.multiply_scores(smem, gemm, tile)

    def multiply_output(self, smem: LatentSmemSm100, gemm: Any, tile: Int32, accumulate: Boolean) -> None:
        """Issue P V of one tile."""
        self.products.multiply_output(smem, gemm, tile, accumulate, Boolean(True))
