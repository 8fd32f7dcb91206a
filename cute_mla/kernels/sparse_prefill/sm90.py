"""Sparse prefill on Hopper.

For every query token and head r, over the rows j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A group of CTAs along x holds the heads of a query token, 64 each, and takes the tokens z, z + grid z and so on, 64 indices (one
tile) at a time.

Roles (512 threads):
  gather   warpgroup 0: indices, addresses, cp.async of rows to the slots; which keys are there; Q of the next token to L2
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse, the greatest logit; the sink
  output   warpgroups 2, 3

Score and output are the decode kernels' (dense_decode/sm90.py describes tiles, pipelines and the trick). What differs:
  kv_ready, rope_ready   4 arrivals, one a warp, as soon as its copies have come; of a pair, bytes from the peer as well
  valid_ready[3]         gather -> score   1: a bit per key, before any key comes. A tile without keys is passed by: of it
                         there are only the handshakes
Nothing joins tokens: gather walks all tiles of all tokens and is ahead of the others by what the rings hold.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.arch import Arch
from ...spec.mla import D_LATENT
from ...spec.sparse_prefill import SparsePrefillConfig
from ..parts.barriers import arrive, barrier_table
from ..parts.sm90_copied import CopyLane
from ..parts.sm90_geometry import (
    BOX_BYTES,
    SLOT_BYTES,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    WARPS_PER_GROUP,
    Geometry,
    Pipes,
    Tiles,
)
from ..parts.sm90_roles import named_barriers, role_table
from ..parts.sm90_shares import HALF_BYTES, HALVES, halves_of_cta, hand_over
from ..parts.sm90_sparse import SparseRolesSm90
from ..parts.tiles import BOX_COLUMNS, ELEMENT_BYTES
from ..source import KernelSource
from .entry import SparsePrefill
from .operands import Operands
from .sm90_walk import Found, find_keys, first_tile, next_tile

ROPE_STEP = SLOTS_PER_TILE  # of a tile: its slots come first
STEPS = ROPE_STEP + 1
LAG = 2  # steps whose copies run on while the next one is started


def geometry_of(d_qk: int) -> Geometry:
    """The gather role needs no registers for bytes, so that Q gets them, and shared memory holds ten slots."""
    return Geometry(
        d_qk=d_qk,
        q_tiles_in_registers=4,
        kv_slots=10,
        rope_slots=3,
        first_registers=48,
        score_registers=144,
        ready_arrivals=WARPS_PER_GROUP,
        validity=True,
        skips_tiles=True,
    )


class SparsePrefillSm90(SparseRolesSm90, SparsePrefill):
    """One variant of the kernel."""

    keeps_maximum = True

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.geometry = geometry_of(config.d_qk)

    @cute.jit
    def gather(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32):
        """Waits kv_free, rope_free. Signals valid_ready, kv_ready, rope_ready. Rows are looked up a tile ahead, indices two."""
        lane = CopyLane.of(thread, halves_of_cta(self.config.cluster))
        d_qk, last = self.config.d_qk, operands.schedule.last_request()
        cursor = first_tile(operands)
        more = cursor.token <= last
        found = find_keys(cursor.indices, cursor.entries(), lane, thread)
        cursor = next_tile(operands, cursor, d_qk, thread)
        entries = cursor.entries()
        tile, pending = Int32(0), Boolean(False)
        while more:
            self.gather_tile(tiles, pipes, found, lane, tile, pending, thread)
            pending = found.any
            tile = tile + 1
            more = cursor.token <= last
            found = find_keys(cursor.indices, entries, lane, thread)
            cursor = next_tile(operands, cursor, d_qk, thread)
            entries = cursor.entries()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cp_async_wait_group(0)
        if tile > 0:
            for step in cutlass.range_constexpr(STEPS - LAG, STEPS):
                self.publish(tiles, pipes, step, tile - 1, pending, thread)
        if cutlass.const_expr(self.config.cluster > 1):
            self.await_peer(pipes, tile)

    @cute.jit
    def gather_tile(
        self, tiles: Tiles, pipes: Pipes, found: Found, lane: CopyLane, tile: Int32, pending: Boolean, thread: Int32
    ):
        """Starts the copies of the tile-th tile, and publishes what was started LAG steps before. pending: whether there are
        copies of the tile before among that."""
        pipes.rope_free.wait_free(tile)
        self.announce(tiles, pipes, found, tile, thread)
        for step in cutlass.range_constexpr(STEPS):
            if cutlass.const_expr(step != ROPE_STEP):
                pipes.kv_free.wait_free(tile * SLOTS_PER_TILE + step)
            if found.any:
                self.copy_step(tiles, pipes, found, lane, step, tile)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(LAG)
            if cutlass.const_expr(step >= LAG):
                self.publish(tiles, pipes, step - LAG, tile, found.any, thread)
            else:
                if tile > 0:
                    self.publish(tiles, pipes, step - LAG + STEPS, tile - 1, pending, thread)

    @cute.jit
    def announce(self, tiles: Tiles, pipes: Pipes, found: Found, tile: Int32, thread: Int32):
        """Tells which keys of a tile are there."""
        if thread == 0:
            words = cute.recast_ptr(tiles.sValid, dtype=Int32) + pipes.rope_ready.slot(tile) * HALVES
            words.store(found.low)
            (words + 1).store(found.high)
            cute.arch.mbarrier_arrive(pipes.validity.barrier(tile))

    def copy_step(self, tiles: Tiles, pipes: Pipes, found: Found, lane: CopyLane, step: int, tile: Int32) -> None:
        """Starts the copies of one slot, of a pair those of the CTA's own half; in the end those of the RoPE columns, if there
        are any."""
        if step != ROPE_STEP:
            source = step * SLOT_COLUMNS * ELEMENT_BYTES
            found.keys.copy(lane, self.slot(tiles, pipes, step, tile), source, SLOT_COLUMNS // BOX_COLUMNS, HALVES // self.config.cluster)
        elif self.geometry.has_rope:
            target = tiles.sRope.iterator.toint() + pipes.rope_ready.slot(tile) * BOX_BYTES
            found.keys.copy(lane, target, D_LATENT * ELEMENT_BYTES, 1, HALVES)

    def slot(self, tiles: Tiles, pipes: Pipes, step: int, tile: Int32) -> Int32:
        """The shared memory address of one of a tile's slots."""
        return tiles.sKv.iterator.toint() + pipes.kv_ready.slot(tile * SLOTS_PER_TILE + step) * SLOT_BYTES

    @cute.jit
    def publish(
        self, tiles: Tiles, pipes: Pipes, step: cutlass.Constexpr[int], tile: Int32, copied: Boolean, thread: Int32
    ):
        """Hands over what this warp's copies of a step, which are complete, have brought."""
        cute.arch.fence_proxy("async.shared", space="cta")
        if cutlass.const_expr(step == ROPE_STEP):
            arrive(pipes.rope_ready.barrier(tile))
        else:
            ready = pipes.kv_ready.barrier(tile * SLOTS_PER_TILE + step)
            if cutlass.const_expr(self.config.cluster == 1):
                arrive(ready)
            elif copied:
                own = halves_of_cta(self.config.cluster)[0] * HALF_BYTES
                hand_over(ready, self.slot(tiles, pipes, step, tile) + own, SLOT_COLUMNS // BOX_COLUMNS, thread)
            else:
                arrive(ready)


def build(config: SparsePrefillConfig, arch: Arch) -> KernelSource:
    """The variant, ready to compile."""
    kernel = SparsePrefillSm90(config, arch)
    geometry = kernel.geometry
    return kernel.source(
        smem_bytes=geometry.smem_bytes,
        barriers=barrier_table(geometry.barrier_offset, geometry.barriers),
        named_barriers=named_barriers(),
        roles=role_table("gather"),
        expected={"HGMMA": geometry.wgmma_per_tile},
    )
