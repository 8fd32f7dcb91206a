"""The mma role of sparse_prefill_dkv on Blackwell: rows = dS^T Q + P^T dO, to tensor memory part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..dense_prefill.sm100_mma import commit
from ..primitives import tcgen05
from ..sm90.cta import BOX_BYTES
from .sm100_config import K_STEP, PART_COLUMNS, PART_TMEM, STEP_BYTES, DkvSm100Geometry, DkvSm100Smem
from .tiles import END, DkvTile


class DkvSm100Factors(NamedTuple):
    """A product's operands. scores: P or dS, in the first stage. queries: Q or dO, so many boxes of 64 columns of each head tile."""

    scores: Any
    queries: Any
    boxes: int

    @staticmethod
    def create(scores: cute.Tensor, queries: cute.Tensor) -> DkvSm100Factors:
        """Return the operands in shared memory."""
        boxes = cute.size(queries, mode=[1]) // BOX_COLUMNS
        return DkvSm100Factors(tcgen05.mn_major(scores.iterator, BOX_BYTES), tcgen05.mn_major(queries.iterator, BOX_BYTES), boxes)


@dataclass(frozen=True)
class DkvSm100MmaRole:
    """One warp. dtype: of all operands."""

    dtype: type[cutlass.Numeric]
    geometry: DkvSm100Geometry

    @cute.jit
    def run(self, smem: DkvSm100Smem, tmem: Int32):
        """Wait tile_ready, query_ready, part_free. Signal tile_free, part_ready."""
        head_tiles = self.geometry.config.head_tiles
        values = [DkvSm100Factors.create(smem.sS, smem.sQ), DkvSm100Factors.create(smem.sP, smem.sD)]
        use, part, done = Int32(0), Int32(0), Int32(0)
        tile = DkvTile.load(smem, use)
        while tile.first_row != END:
            if tile.begins != 0:
                smem.query_ready.consumer_wait(done)
                done = done + 1
            for head_tile in cutlass.range_constexpr(head_tiles):
                if cutlass.const_expr(head_tile > 0):
                    smem.tile_ready.consumer_wait(use + head_tile)
                smem.tile_free.consumer_release(use + head_tile)
            for first in cutlass.range_constexpr(0, self.geometry.columns, PART_COLUMNS):
                self.multiply(smem, tmem, (use, part), values, first // BOX_COLUMNS)
                part = part + 1
            if cutlass.const_expr(self.geometry.has_rope):  # noqa: SIM102  # one is known when compiling
                if self.geometry.takes_rope(done - 1):
                    self.multiply(smem, tmem, (use, part), [DkvSm100Factors.create(smem.sS, smem.sRope)], 0)
                    part = part + 1
            for head_tile in cutlass.range_constexpr(head_tiles):
                commit(smem.tile_free.barrier(use + head_tile))
            use = use + head_tiles
            tile = DkvTile.load(smem, use)

    def multiply(self, smem: DkvSm100Smem, tmem: Int32, uses: tuple[Int32, Int32], factors: list[DkvSm100Factors], box: int) -> None:
        """Issue a part of a tile's rows, over all heads. Wait part_free, signal part_ready.

        uses: of the tile, of the part. box: the first of the part.
        """
        use, part = uses
        place = tmem + smem.part_ready.stage(part) * PART_TMEM
        stages = [smem.tile_ready.stage(use + head_tile) for head_tile in range(self.geometry.config.head_tiles)]
        smem.part_free.producer_acquire(part)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            for head_tile, stage in enumerate(stages):
                for number, (scores, queries, boxes) in enumerate(factors):
                    a = scores.advance_start_address(stage * BOX_BYTES)
                    columns = min(boxes * BOX_COLUMNS, PART_COLUMNS)
                    shape = tcgen05.instruction(self.dtype, TILE_KEYS, columns, transpose_a=True, transpose_b=True)
                    for step in range(TILE_ROWS // K_STEP):
                        before = (head_tile * boxes + box) * BOX_BYTES + step * STEP_BYTES
                        steps = a.advance_start_address(step * STEP_BYTES), queries.advance_start_address(before)
                        tcgen05.multiply_stationary(place, *steps, shape, head_tile + number + step > 0)
            tcgen05.commit_alone(smem.part_ready.barrier(part))
