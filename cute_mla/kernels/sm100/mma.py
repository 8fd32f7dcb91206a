"""The mma role of the SM100 kernels over a latent: S = Q K^T and O += P V of a pair of CTAs, issued by the even one.

dense_decode/sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ..attention.scheduler import LatentOperands
from ..primitives import tcgen05
from ..primitives.tcgen05 import Keep
from .config import (
    BOX_BYTES,
    CHUNK_COLUMNS,
    OUTPUT_COLUMN,
    PAIR,
    PAIR_ROWS,
    QUERY_COLUMN,
    ROW_BYTES,
    STEP_BYTES,
    STEP_COLUMNS,
    STEPS_PER_BOX,
    LatentSmemSm100,
)


@dataclass(frozen=True)
class LatentOperandsSm100:
    """K, and P with V, of the tiles in shared memory. One thread multiplies.

    dtype: of Q, K, V and P. has_rope: whether keys have columns that are not values.
    """

    dtype: type[cutlass.Numeric]
    has_rope: bool
    smem: LatentSmemSm100
    tmem: Int32

    def keys(self, tile: Int32) -> Any:
        """Return K of a tile as operand."""
        return tcgen05.k_major(self.smem.stage(self.smem.kv_ready.stage(tile)))

    def probs_and_values(self, tile: Int32) -> tuple[Any, Any]:
        """Return P and V of a tile as operands."""
        base = self.smem.stage(self.smem.kv_ready.stage(tile))
        return tcgen05.k_major(base + self.smem.geometry.rope_box * BOX_BYTES), tcgen05.mn_major(base, BOX_BYTES)


class LatentGemmSm100(LatentOperandsSm100):
    """Products of a pair, whose operands lie at the same addresses in both CTAs."""

    def scores(self, keys: Any, part: int, stage: int | Int32 = 0) -> None:
        """Issue a part of S = Q K^T over the columns that each CTA holds. stage: of its use of tensor memory, where a part has several.

        The lanes 0..63 and 64..127 get the two partial sums, since the even CTA's keys meet the Q in the lower lanes and the odd
        CTA's keys the Q in the upper ones.
        """
        geometry = self.smem.geometry
        shape = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * geometry.part_keys)
        column = geometry.score_column(part, stage) - (stage * geometry.groups_apart if geometry.groups_apart > 0 else 0)
        for step in range(geometry.latent_steps + (geometry.rope_steps if self.has_rope else 0)):
            tcgen05.multiply(
                self.tmem + column,
                tcgen05.a_in_tmem(self.tmem + (QUERY_COLUMN + step * STEP_COLUMNS)),
                self.key_step(keys, part, step),
                shape,
                accumulate=step > 0,
            )

    def key_step(self, keys: Any, part: int, step: int) -> Any:
        """Return the columns of a part of K that one product contracts. The box after the latent ones has the RoPE columns."""
        box, step_in_box = divmod(step, STEPS_PER_BOX)
        return keys.advance_start_address(part * self.smem.geometry.part_keys * ROW_BYTES + box * BOX_BYTES + step_in_box * STEP_BYTES)

    def output(self, probs: Any, values: Any, accumulate: Boolean) -> None:
        """Issue O += P V, or O = P V, for the 256 value columns of each CTA."""
        geometry = self.smem.geometry
        wide = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * CHUNK_COLUMNS, transpose_b=True)
        chunks = geometry.output_chunks
        chunk_bytes = geometry.latent_boxes // chunks * BOX_BYTES
        for step in range(geometry.key_steps):
            row = step * geometry.step_keys * ROW_BYTES
            products = [(OUTPUT_COLUMN + chunk * CHUNK_COLUMNS, row + chunk * chunk_bytes) for chunk in range(chunks)]
            for i, (column, offset) in enumerate(products):
                # all multiply the same keys of P, which the tensor core may keep: that much less for the port of smem
                keep = Keep.FILL if i == 0 else Keep.LASTUSE if i == len(products) - 1 else Keep.USE
                tcgen05.multiply(
                    self.tmem + column,
                    probs.advance_start_address(step * STEP_BYTES),
                    values.advance_start_address(offset),
                    wide,
                    accumulate=accumulate if step == 0 else True,
                    keep_a=keep,
                )


class LatentMmaRoleSm100:
    """One warp of the even CTA."""

    @cute.jit
    def run(self, operands: LatentOperands, smem: LatentSmemSm100, gemm: LatentGemmSm100):
        """Wait kv_ready, query_ready, scores_free, probs_ready, output_ready. Signal scores_ready, kv_free.

        S of a tile is issued before P V of the tile before it, so that the tensor cores work during every softmax.
        """
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        tile, queries = Int32(0), Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            if tile_range.tiles > 0:
                self.await_queries(smem, queries)
                queries = queries + 1
                self.multiply_tiles(smem, gemm, tile_range.tiles, tile)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile(req, begin_tile)
            schedule.release(begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        self.leave(smem, tile)

    def await_queries(self, smem: LatentSmemSm100, number: Int32) -> None:
        """Wait for the Q of a work tile."""
        smem.query_ready.consumer_wait(number)

    def leave(self, smem: LatentSmemSm100, tiles: Int32) -> None:
        """Wait for the last signals to this warp. tiles: of all work tiles."""
        await_score_role(smem, tiles)

    @cute.jit
    def multiply_tiles(self, smem: LatentSmemSm100, gemm: LatentGemmSm100, tiles: Int32, tile: Int32):
        """Multiply a work tile that begins with the tile-th tile.

        parts_ahead: the first parts of S of a tile are issued before P V of the tile two before, since their place is free by then.
        """
        ahead, early = smem.geometry.ahead, smem.geometry.parts_ahead
        for t in cutlass.range(-1 if early > 0 else 0, tiles + ahead, unroll=1):
            if t >= 0 and t < tiles:
                self.multiply_scores(smem, gemm, tile + t, early, smem.geometry.score_parts)
            if cutlass.const_expr(early > 0):  # noqa: SIM102  # of the DSL, which traces both operands of "and"
                if t + 1 < tiles:
                    self.multiply_scores(smem, gemm, tile + t + 1, 0, early)
            if t > ahead - 1:
                self.multiply_output(smem, gemm, tile + t - ahead, t > ahead)

    def multiply_scores(self, smem: LatentSmemSm100, gemm: LatentGemmSm100, tile: Int32, first: int, end: int) -> None:
        """Issue the parts first .. end - 1 of S of one tile."""
        keys = gemm.keys(tile)
        if first == 0:
            smem.kv_ready.consumer_wait(tile)
        for part in range(first, end):
            use = tile * smem.geometry.score_parts + part
            smem.scores_free.producer_acquire(use)
            tcgen05.fence_after_wait()
            stage = smem.scores_ready.stage(use)
            with cute.arch.elect_one():
                gemm.scores(keys, part, stage)
                tcgen05.commit(smem.scores_ready.barrier(use))

    def multiply_output(self, smem: LatentSmemSm100, gemm: LatentGemmSm100, tile: Int32, accumulate: Boolean) -> None:
        """Issue P V of one tile."""
        probs, values = gemm.probs_and_values(tile)
        await_probs(smem, tile)
        with cute.arch.elect_one():
            gemm.output(probs, values, accumulate)
            tcgen05.commit(smem.kv_free.barrier(tile))


def await_probs(smem: LatentSmemSm100, tile: Int32) -> None:
    """Wait until P V of a tile may begin: P is there, and O is scaled or has been read."""
    smem.probs_ready.consumer_wait(tile)
    smem.output_ready.consumer_wait(tile)
    tcgen05.fence_after_wait()


@cute.jit
def await_score_role(smem: LatentSmemSm100, tiles: Int32):
    """Wait for the last arrivals of the score role, which must not reach a CTA that is gone. tiles: their number."""
    parts = smem.geometry.score_parts
    for i in cutlass.range_constexpr(smem.geometry.scores):
        smem.scores_free.producer_acquire(tiles * parts + i)
