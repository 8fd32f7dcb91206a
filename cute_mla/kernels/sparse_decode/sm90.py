"""Sparse MLA decode on Hopper.

The dense kernel (dense_decode/sm90.py) with another role in front: four warps gather the 64 slots that the indices of a tile
name, from a cache of any format, and write them as 16-bit columns to the slots of the rings. The roles score and output are
the dense kernel's, and so are tiles, barriers and the trick.

Roles (512 threads):
  gather   warpgroup 0: indices, addresses, loads, e4m3 x scale in fp32, rounded once; which keys are there
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse; the sink
  output   warpgroups 2, 3

A CTA holds up to 64 heads of one query token. Pipelines: as in dense_decode, with an arrival on kv_ready and rope_ready instead of
bytes: of the one warp of the gather role whose turn it is, when all four have stored and fenced. RoPE columns, which nobody converts,
go by cp.async. In fp8_584 a key has no columns but its values: the RoPE ring then holds P and validity alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Int32, Uint8, cute

from ...manifest import NamedBarrier
from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.sparse_decode import SparseDecodeConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.tiles import BOX_COLUMNS
from ..definition import KernelDefinition
from ..primitives.pipeline import Place, arrive, barrier_table
from ..primitives.registers import kept
from ..sm90.config import (
    ALL_REGISTERS,
    BOX_BYTES,
    OUTPUT_BARRIER,
    OUTPUT_GROUPS,
    SLOT_BYTES,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    VALID_BYTES,
    WARPGROUP,
    WARPS_PER_GROUP,
    Geometry,
    Pipes,
    Tiles,
)
from ..sm90.gather_split import HALF_BYTES, KEYS_PER_WARP, halves_of_cta, hand_over, peer_shift
from ..sm90.roles import named_barriers, role_table
from ..sm90.row_conversion import Lane, kept_lane, steps_ahead
from ..sm90.sparse import SparseRolesSm90
from .entry import SparseDecode
from .operands import Operands
from .sm90_gather import Buffer, Indices, Keys, copy_rope, find_keys, load_step, position_in_tile, step_scales, store_step, tile_steps

GATHER_BARRIER = OUTPUT_BARRIER + OUTPUT_GROUPS  # and the following: one for each slot of a tile and one for its RoPE columns
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
        ready_arrivals=1,
        valid_slots=rope_slots,
    )


@dataclass(frozen=True)
class Span:
    """The tiles of a piece."""

    req: Int32
    begin_tile: Int32
    tiles: Int32


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
        tile, kv, rope = Int32(0), pipes.kv_free.place(Int32(0)), pipes.rope_free.place(Int32(0))
        shift = peer_shift(pipes.kv_ready.base) if self.config.cluster > 1 else Int32(0)
        while req <= schedule.last_request():
            extent = schedule.extent(req, begin_tile)
            # asked here, so that nothing but the answer is kept through the tiles
            piece = schedule.piece(req, begin_tile)
            if extent.tiles > 0:
                kv, rope = self.gather_tiles(operands, tiles, pipes, Span(req, begin_tile, extent.tiles), kv, rope, shift)
            tile = tile + extent.tiles
            req, begin_tile = piece.next_req, piece.next_tile
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.config.cluster > 1) and thread < 32:
            self.await_peer(pipes, tile)

    @cute.jit
    def gather_tiles(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, span: Span, kv: Place, rope: Place, shift: Int32
    ) -> tuple[Place, Place]:
        """The tiles of one piece. Indices are asked for a tile ahead of the addresses, bytes a few steps ahead of their use.
        Returns the places of the rings behind them."""
        steps, ahead, per_slot = self.steps, self.ahead, len(self.steps) // SLOTS_PER_TILE
        # What is not converted would all be asked for before any is stored: a slot's loads wait for its last store.
        together = 1 if self.format.group else per_slot
        thread = cute.arch.thread_idx()[0]  # of the first warpgroup
        lane, halves = kept_lane(thread), halves_of_cta(self.config.cluster)
        # of a pair a thread has one key of the slots, and registers for the address of its first byte
        bytes_before, reader = (0, lane) if self.config.cluster == 1 else (lane.source, replace(lane, source=Int32(0)))
        # of a pair, the half of it that this CTA converts
        first_slot = kept(tiles.sKv.iterator.toint() + halves[0] * HALF_BYTES)
        buffers = [Buffer.create(max(step.words for step in steps[i::ahead])) for i in range(ahead)]
        indices = Indices.of(operands, span.req, (span.begin_tile + span.tiles) * TILE_KEYS)
        position = span.begin_tile * TILE_KEYS + position_in_tile(thread)
        keys = find_keys(operands, self.format, indices.look_up(position), indices.in_extra(position), halves, thread)
        row0, row1, valid, scales0, scales1 = *keys.rows, keys.valid, *keys.own_scales
        index = indices.look_up(position + TILE_KEYS)
        near = row0 + bytes_before
        for s in cutlass.range_constexpr(ahead):
            load_step(self.format, steps[s], buffers[s], (row0, row1)[steps[s].key], (near, row1)[steps[s].key], reader)
        left = span.tiles
        while left > 0:
            left = left - 1
            present = Keys((row0, row1), (scales0, scales1), valid)
            position = position + TILE_KEYS
            self.begin_rope(tiles, pipes, rope, present, lane, thread)
            for s in cutlass.range_constexpr(len(steps)):
                if cutlass.const_expr(s % per_slot == 0):
                    pipes.kv_free.await_free_at(kv)
                else:
                    cute.arch.sync_warp()  # keeps ptxas from converting more steps at a time than there are registers for
                target = first_slot + kv.slot * SLOT_BYTES
                scales = step_scales(self.format, steps[s], buffers[s % ahead], present, halves[steps[s].key], thread)
                store_step(steps[s], buffers[s % ahead], scales, target, lane, steps[s].key * HALF_BYTES, self.dtype)
                if cutlass.const_expr((s + 1) % per_slot == 0):
                    self.finish_slot(pipes, kv, steps[s].slot, target, shift)
                    kv = pipes.kv_free.after(kv)
                if cutlass.const_expr(s + ahead == len(steps) - 1 + together):
                    # whatever is loaded from here on belongs to the next tile
                    keys = find_keys(operands, self.format, index, indices.in_extra(position), halves, thread)
                    row0, row1, valid, scales0, scales1 = *keys.rows, keys.valid, *keys.own_scales
                    near = row0 + bytes_before
                    index = indices.look_up(position + TILE_KEYS)
                if cutlass.const_expr((s + 1) % together == 0):
                    for done in cutlass.range_constexpr(s + 1 - together, s + 1):
                        step = steps[(done + ahead) % len(steps)]
                        load_step(self.format, step, buffers[done % ahead], (row0, row1)[step.key], (near, row1)[step.key], reader)
            self.finish_rope(pipes, rope)
            rope = pipes.rope_free.after(rope)
        return kv, rope

    @cute.jit
    def begin_rope(self, tiles: Tiles, pipes: Pipes, place: Place, keys: Keys, lane: Lane, thread: Int32):
        """Waits for the RoPE slot, starts the copies of its columns, and writes beside it which keys are there: two bytes a warp."""
        pipes.rope_free.await_free_at(place)
        if cutlass.const_expr(self.geometry.has_rope):
            own = tiles.sRope.iterator.toint() + place.slot * BOX_BYTES + halves_of_cta(self.config.cluster)[0] * HALF_BYTES
            copy_rope(self.format, keys.rows, (own, own ^ HALF_BYTES), lane)
            cute.arch.cp_async_commit_group()
        if thread % 32 == 0:
            target = tiles.sValid + (place.slot * VALID_BYTES + thread // 32)
            target.store(Uint8(keys.valid & 0xFF))
            (target + WARPS_PER_GROUP).store(Uint8((keys.valid >> KEYS_PER_WARP) & 0xFF))

    @cute.jit
    def finish_rope(self, pipes: Pipes, place: Place):
        """Hands over the RoPE columns, which have had all the tile to land."""
        if cutlass.const_expr(self.geometry.has_rope):
            cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        if self.is_last(SLOTS_PER_TILE):
            arrive(pipes.rope_ready.base + place.slot)

    @cute.jit
    def finish_slot(self, pipes: Pipes, place: Place, slot: cutlass.Constexpr[int], target: Int32, shift: Int32):
        """Hands over a slot of a tile, of a pair its half, which begins at `target`."""
        cute.arch.fence_proxy("async.shared", space="cta")
        ready = pipes.kv_ready.base + place.slot
        if self.is_last(slot):
            if cutlass.const_expr(self.config.cluster == 1):
                arrive(ready)
            else:
                hand_over(ready, target, SLOT_COLUMNS // BOX_COLUMNS, shift)

    @cute.jit
    def is_last(self, slot: cutlass.Constexpr[int]) -> Boolean:
        """Whether this warp hands over a slot of a tile: one does, and waits until all have stored and fenced. The others go on.

        The slots' turns go round the warps, so that no warp is at a slot of the next tile before the one whose turn it is has been
        there: each has waited for all in between."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mine = warp == slot % WARPS_PER_GROUP
        if mine:
            cute.arch.barrier(barrier_id=GATHER_BARRIER + slot, number_of_threads=WARPGROUP)
        else:
            cute.arch.barrier_arrive(barrier_id=GATHER_BARRIER + slot, number_of_threads=WARPGROUP)
        return mine


def gather_barriers(geometry: Geometry) -> tuple[NamedBarrier, ...]:
    """Those of the gather role: one for each slot of a tile, and one for its RoPE columns."""
    names = [f"slot_{slot}" for slot in range(SLOTS_PER_TILE)] + ["rope" if geometry.has_rope else "valid"]
    return tuple(NamedBarrier(name, GATHER_BARRIER + i) for i, name in enumerate(names))


def build(config: SparseDecodeConfig, arch: Arch) -> KernelDefinition:
    """The variant, ready to compile."""
    kernel = SparseDecodeSm90(config, arch)
    geometry = kernel.geometry
    return kernel.source(
        smem_bytes=geometry.smem_bytes,
        barriers=barrier_table(geometry.barrier_offset, geometry.barriers),
        named_barriers=named_barriers() + gather_barriers(geometry),
        roles=role_table("gather"),
        expected={"HGMMA": geometry.wgmma_per_tile},
    )
