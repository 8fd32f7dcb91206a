"""The load role of dense decode on Blackwell: TMA of the columns that a CTA needs of every key, page by page; K as it lies then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.mla import ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..primitives import tcgen05
from ..primitives.copies import load_box, pair_box
from ..sm100.config import BOX_BYTES, CTA_ROPE, PAIR, ROW_BYTES, STEP_BYTES, LatentSmemSm100
from ..sm100.heads64 import HALF_BOXES, HALVES, HEADS64, Heads64Gemm
from ..sm100.mma import LatentGemmSm100
from .operands import DenseDecodeOperands, LaneBox
from .page_walk import for_each_tile_in_groups

ROPE_ROW_BYTES = CTA_ROPE * ELEMENT_BYTES  # of a CTA's RoPE columns


@dataclass(frozen=True)
class DenseDecodeLoadRoleSm100:
    """One warp, of 16-bit keys: half of their columns. row_bytes: of Q, where this warp asks L2 for it, else 0."""

    has_rope: bool
    row_bytes: int

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: LatentSmemSm100):
        """Wait kv_free. Signal kv_ready."""
        tiles_done = for_each_tile_in_groups(operands, partial(self.load_tile, operands, smem), partial(self.begin_run, operands, smem))
        cute.arch.griddepcontrol_launch_dependents()
        # no signal may reach a CTA that is gone
        for i in cutlass.range(smem.geometry.kv_stages, unroll=1):
            smem.kv_free.producer_acquire(tiles_done + i)

    @cute.jit
    def begin_run(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, req: Int32, tile: Int32):
        """Let Q of the first work tile follow; ask L2 for that of a later one, before its keys. Signal pages_asked."""
        if tile == 0:
            smem.pages_asked.producer_commit(tile)
        elif cutlass.const_expr(self.row_bytes > 0):
            operands.prefetch_queries(req, smem.geometry.first_column(), self.row_bytes)

    @cute.jit
    def load_tile(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, box: LaneBox, tile: Int32):
        """Load what this CTA needs of the tile-th tile, with zeros where the request has no page."""
        ready = smem.kv_ready.barrier(tile)
        smem.kv_free.producer_acquire(tile)
        if self.expects(smem) and cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, PAIR * self.loaded_bytes(smem))
        cute.arch.sync_warp()
        if box.in_tile:
            self.load_keys(operands, smem, box, smem.stage(smem.kv_ready.stage(tile)), ready)

    def expects(self, smem: LatentSmemSm100) -> Boolean:
        """Return whether this warp says how many bytes come: for both CTAs, and all their load warps."""
        return smem.geometry.multiplies()

    def loaded_bytes(self, smem: LatentSmemSm100) -> int:
        """Return the bytes of a tile and CTA."""
        return smem.geometry.latent_boxes * BOX_BYTES + (TILE_KEYS * ROPE_ROW_BYTES if self.has_rope else 0)

    @cute.jit
    def load_keys(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, box: LaneBox, stage: cute.Pointer, ready: cute.Pointer):
        """Load the columns of a lane's box of keys to a stage."""
        geometry, rank = smem.geometry, cute.arch.block_idx_in_cluster()
        where = (operands.kv_head(), box.row, box.page)
        target = stage + box.offset * ROW_BYTES
        columns = ROW_BYTES // ELEMENT_BYTES
        for i in cutlass.range_constexpr(geometry.latent_boxes):
            pair_box(target + i * BOX_BYTES, operands.args.kv_map, (rank * geometry.cta_columns + i * columns, *where), ready)
        if cutlass.const_expr(self.has_rope):
            rope = stage + (geometry.rope_box * BOX_BYTES + box.offset * ROPE_ROW_BYTES)
            pair_box(rope, operands.args.rope_map, (geometry.row_latent + rank * CTA_ROPE, *where), ready)


@dataclass(frozen=True)
class ColumnPairLoadRole(DenseDecodeLoadRoleSm100):
    """One warp of a CTA that has all latent columns of its own, in two halves, of every key (../sm100/column_pair.py)."""

    @cute.jit
    def load_tile(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, box: LaneBox, tile: Int32):
        """Wait left_free, kv_free. Signal left_ready, kv_ready. Load a tile, with zeros where the request has no page."""
        stage = smem.stage(smem.kv_ready.stage(tile)) + box.offset * ROW_BYTES
        where = (operands.kv_head(), box.row, box.page)
        first, columns = smem.geometry.first_column(), ROW_BYTES // ELEMENT_BYTES
        for half in cutlass.range_constexpr(HALVES):
            ready = (smem.left_ready if half == 0 else smem.kv_ready).barrier(tile)
            (smem.left_free if half == 0 else smem.kv_free).producer_acquire(tile)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(ready, HALF_BOXES * BOX_BYTES + half * TILE_KEYS * ROPE_ROW_BYTES)
            cute.arch.sync_warp()
            if box.in_tile:
                for i in cutlass.range_constexpr(half * HALF_BOXES, (half + 1) * HALF_BOXES):
                    load_box(stage + i * BOX_BYTES, operands.args.kv_map, (first + i * columns, *where), ready)
                if cutlass.const_expr(half == HALVES - 1):
                    rope = stage + (smem.geometry.rope_box * BOX_BYTES - box.offset * (ROW_BYTES - ROPE_ROW_BYTES))
                    load_box(rope, operands.args.rope_map, (first + smem.geometry.rope_begin(), *where), ready)


class ColumnPairGemm(Heads64Gemm):
    """Products of such a CTA, with RoPE columns of keys in rows of half of the width."""

    def keys(self, tile: Int32) -> tuple[Any, Any]:
        """Return latent and RoPE columns of K of a tile as operands."""
        stage = self.smem.stage(self.smem.kv_ready.stage(tile))
        return tcgen05.k_major(stage), tcgen05.k_major(stage + self.smem.geometry.rope_box * BOX_BYTES, ROPE_ROW_BYTES)

    def latent_scores(self, keys: tuple[Any, Any], half: int) -> None:
        """Issue S of half of the latent columns."""
        super().latent_scores(keys[0], half)

    def rope_scores(self, keys: tuple[Any, Any], half: int) -> None:
        """Add S of half of the RoPE columns, which is one step."""
        self._score_step(keys[1], half, HEADS64.latent_steps, half * STEP_BYTES)


class DenseDecodeGemmSm100(LatentGemmSm100):
    """Products of a pair, with RoPE columns of keys in rows of half of the width."""

    def keys(self, tile: Int32) -> tuple[Any, Any]:
        """Return latent and RoPE columns of K of a tile as operands."""
        stage = self.smem.stage(self.smem.kv_ready.stage(tile))
        return tcgen05.k_major(stage), tcgen05.k_major(stage + self.smem.geometry.rope_box * BOX_BYTES, ROPE_ROW_BYTES)

    def key_step(self, keys: tuple[Any, Any], part: int, step: int) -> Any:
        """Return the columns of a part of K that one product contracts."""
        latent, rope = keys
        rope_step = step - self.smem.geometry.latent_steps
        if rope_step < 0:
            return super().key_step(latent, part, step)
        return rope.advance_start_address(part * self.smem.geometry.part_keys * ROPE_ROW_BYTES + rope_step * STEP_BYTES)
