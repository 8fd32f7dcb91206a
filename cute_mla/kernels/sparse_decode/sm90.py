"""Sparse MLA decode on Hopper.

The dense kernel (dense_decode/sm90.py) with another role in front: four warps gather the 64 slots that the indices of a tile
name, from a cache of any format, and write them as 16-bit columns to the slots of the rings. The roles score and output are
the dense kernel's, and so are tiles, barriers and the trick.

Roles (512 threads):
  gather   warpgroup 0: indices, addresses, loads, e4m3 x scale in fp32, rounded once; which keys are there
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse; the sink
  output   warpgroups 2, 3

A CTA holds up to 64 heads of one query token. Pipelines: as in dense_decode, with 4 arrivals on kv_ready and rope_ready, one a
warp, instead of bytes. In fp8_584 a key has no columns but its values: the RoPE ring then holds P and validity alone.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint8, cute

from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.sparse_decode import SparseDecodeConfig
from ...spec.split_plan import TILE_KEYS
from ..parts.barriers import arrive, barrier_table
from ..parts.sm90_converted import ROPE_SLOT, Lane, steps_ahead
from ..parts.sm90_geometry import (
    ALL_REGISTERS,
    BOX_BYTES,
    OUTPUT_GROUPS,
    SLOT_BYTES,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    VALID_BYTES,
    WARPS_PER_GROUP,
    Geometry,
    Pipes,
    Tiles,
)
from ..parts.sm90_roles import named_barriers, role_table
from ..parts.sm90_shares import HALF_BYTES, KEYS_PER_WARP, WARP_BYTES, halves_of_cta, hand_over
from ..parts.sm90_sparse import SparseRolesSm90
from ..parts.tiles import BOX_COLUMNS
from ..source import KernelSource
from .entry import SparseDecode
from .operands import NO_SLOT, IndexList, Operands, look_up
from .sm90_gather import Buffer, Keys, find_keys, load_step, position_in_tile, step_scales, store_step, tile_steps

SHARED_REGISTERS = ALL_REGISTERS - OUTPUT_GROUPS * Geometry.output_registers  # by gather and score


def geometry_of(cache_format: CacheFormat) -> Geometry:
    """Few column tiles of Q in registers leave the gather role enough of them for its loads in flight, and the others leave
    room for nine slots."""
    q_tiles_in_smem, rope_slots = 7, 3
    in_registers = cache_format.d_qk // BOX_COLUMNS - q_tiles_in_smem
    first_registers = {1: 96, 2: 88}[in_registers]
    return Geometry(
        d_qk=cache_format.d_qk,
        q_tiles_in_registers=in_registers,
        kv_slots=9,
        rope_slots=rope_slots,
        first_registers=first_registers,
        score_registers=SHARED_REGISTERS - first_registers,
        ready_arrivals=WARPS_PER_GROUP,
        valid_slots=rope_slots,
    )


class SparseDecodeSm90(SparseRolesSm90, SparseDecode):
    """One variant of the kernel."""

    def __init__(self, config: SparseDecodeConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.geometry = geometry_of(config.format)
        self.steps = tile_steps(config.format, config.cluster)
        self.ahead = steps_ahead(self.steps)

    # ---- gather -----------------------------------------------------------------------------------------------------

    @cute.jit
    def gather(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32):
        """Waits kv_free, rope_free. Signals kv_ready, rope_ready."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_piece()
        tile = Int32(0)
        while req <= schedule.last_request():
            extent = schedule.extent(req, begin_tile)
            end = tile + extent.tiles
            if extent.tiles > 0:
                self.gather_tiles(operands, tiles, pipes, req, begin_tile, tile, end, thread)
            tile = end
            piece = schedule.piece(req, begin_tile)
            req, begin_tile = piece.next_req, piece.next_tile
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.config.cluster > 1):
            self.await_peer(pipes, tile)

    @cute.jit
    def gather_tiles(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, req: Int32, begin_tile: Int32, tile: Int32, end: Int32, thread: Int32
    ):
        """The tiles of one piece, in this CTA those from `tile` to `end`. Indices are asked for a tile ahead of the addresses,
        bytes a few steps ahead of their use."""
        steps, ahead = self.steps, self.ahead
        lane, halves = Lane.of(thread), halves_of_cta(self.config.cluster)
        buffers = [Buffer.create(max(step.words for step in steps[i::ahead])) for i in range(ahead)]
        indices = IndexList.of(operands, req)
        position = begin_tile * TILE_KEYS + position_in_tile(thread)
        keys = find_keys(operands, self.format, look_up(indices, position), indices.in_extra(position), halves, thread)
        row0, row1, valid, scales0, scales1 = *keys.rows, keys.valid, *keys.own_scales
        index = self.look_up_ahead(indices, position + TILE_KEYS, tile + 1 < end)
        for s in cutlass.range_constexpr(ahead):
            load_step(self.format, steps[s], buffers[s], (row0, row1)[steps[s].key], lane)
        for use in cutlass.range(tile, end, unroll=1):
            present = Keys((row0, row1), (scales0, scales1), valid)
            position = position + TILE_KEYS
            for s in cutlass.range_constexpr(len(steps)):
                self.finish_step(tiles, pipes, s, buffers[s % ahead], present, use, lane, thread)
                if cutlass.const_expr(s + ahead == len(steps)):
                    # whatever is loaded from here on belongs to the next tile
                    keys = find_keys(operands, self.format, index, indices.in_extra(position), halves, thread)
                    row0, row1, valid, scales0, scales1 = *keys.rows, keys.valid, *keys.own_scales
                    index = self.look_up_ahead(indices, position + TILE_KEYS, use + 2 < end)
                step = steps[(s + ahead) % len(steps)]
                load_step(self.format, step, buffers[s % ahead], (row0, row1)[step.key], lane)

    @cute.jit
    def look_up_ahead(self, indices: IndexList, position: Int32, wanted: cutlass.Boolean) -> Int32:
        """The index at a position, if its tile belongs to this piece."""
        index = Int32(NO_SLOT)
        if wanted:
            index = look_up(indices, position)
        return index

    @cute.jit
    def finish_step(
        self, tiles: Tiles, pipes: Pipes, s: cutlass.Constexpr[int], buffer: Buffer, keys: Keys, tile: Int32, lane: Lane, thread: Int32
    ):
        """Stores the bytes of a step that have come. The first step of a slot waits for it, the last one hands it over."""
        step = self.steps[s]
        first = s == 0 or self.steps[s - 1].slot != step.slot
        last = s + 1 == len(self.steps) or self.steps[s + 1].slot != step.slot
        half = halves_of_cta(self.config.cluster)[step.key]
        scales = step_scales(self.format, step, buffer, keys, half, thread)
        if cutlass.const_expr(step.slot == ROPE_SLOT):
            ring, use, boxes = pipes.rope_ready, tile, 1
            if cutlass.const_expr(first):
                self.begin_rope(tiles, pipes, tile, keys.valid, thread)
            slot = tiles.sRope.iterator.toint() + ring.slot(use) * BOX_BYTES
        else:
            ring, use, boxes = pipes.kv_ready, tile * SLOTS_PER_TILE + step.slot, SLOT_COLUMNS // BOX_COLUMNS
            if cutlass.const_expr(first):
                pipes.kv_free.wait_free(use)
            slot = tiles.sKv.iterator.toint() + ring.slot(use) * SLOT_BYTES
        target = slot + half * HALF_BYTES
        store_step(step, buffer, scales, target, lane, self.dtype)
        if cutlass.const_expr(last):
            cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(self.config.cluster == 1 or step.slot == ROPE_SLOT):
                arrive(ring.barrier(use))
            else:
                hand_over(ring.barrier(use), target, boxes, WARP_BYTES, thread)
        if cutlass.const_expr(s + 1 == len(self.steps) and not self.geometry.has_rope):
            self.begin_rope(tiles, pipes, tile, keys.valid, thread)
            arrive(pipes.rope_ready.barrier(tile))

    @cute.jit
    def begin_rope(self, tiles: Tiles, pipes: Pipes, tile: Int32, valid: Int32, thread: Int32):
        """Waits for the RoPE slot, and writes beside it which keys are there: two bytes a warp."""
        pipes.rope_free.wait_free(tile)
        if thread % 32 == 0:
            target = tiles.sValid + (pipes.rope_ready.slot(tile) * VALID_BYTES + thread // 32)
            target.store(Uint8(valid & 0xFF))
            (target + WARPS_PER_GROUP).store(Uint8((valid >> KEYS_PER_WARP) & 0xFF))


def build(config: SparseDecodeConfig, arch: Arch) -> KernelSource:
    """The variant, ready to compile."""
    kernel = SparseDecodeSm90(config, arch)
    geometry = kernel.geometry
    return kernel.source(
        smem_bytes=geometry.smem_bytes,
        barriers=barrier_table(geometry.barrier_offset, geometry.barriers),
        named_barriers=named_barriers(),
        roles=role_table("gather"),
        expected={"HGMMA": geometry.wgmma_per_tile},
    )
