"""Sparse prefill on Hopper.

For every query token and head r, over the rows j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A group of CTAs along x holds the heads of a query token, 64 each, and takes the tokens z, z + grid z and so on, 64 indices (one
tile) at a time.

Roles (512 threads):
  copy     warps 0, 1: cp.async of rows to the slots
  courier  warp 2: hands over slots that have landed, of a pair to the peer as well
  scout    warp 3: indices, checks, which keys are there; Q of the next token to L2
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse, the greatest logit; the sink
  output   warpgroups 2, 3

Score and output are the decode kernels': dense_decode/sm90.py describes tiles, their pipelines and the trick. In front of them
are (producer -> consumer; arrivals per phase):
  valid_ready[3]   scout -> copy, courier, score   1: rows of a tile, and a bit per key
  kv_landed[10]    copy -> courier                 64: the threads' copies, as they complete (11 slots where d_qk is 512)
  rope_landed[3]   copy -> courier                 64
  kv_ready[10]     courier -> score, output        1; of a pair, and the bytes of the peer's half
  rope_ready[3]    courier -> score                1

A tile without any key is passed by: of it there are only the handshakes. Nothing joins tokens: all roles walk from one to the
next on their own, and the scout looks ahead over the end of a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.arch import Arch
from ...spec.mla import D_LATENT, D_QK
from ...spec.sparse_prefill import SparsePrefillConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.tiles import BOX_COLUMNS, ELEMENT_BYTES
from ..definition import KernelDefinition
from ..primitives.pipeline import arrive, barrier_table
from ..sm90.config import (
    BOX_BYTES,
    SLOT_BYTES,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    Geometry,
    TilePlace,
    Tiles,
)
from ..sm90.gather_split import HALF_BYTES, HALF_KEYS, HALVES, halves_of_cta, hand_over, peer_shift
from ..sm90.roles import named_barriers, role_table
from ..sm90.row_copy import COPY_WARPS, COURIER_WARP, GATHER_ROLES, CopyLane, CopyPipes, TileRows, arrive_landed
from ..sm90.sparse import SparseRolesSm90
from .entry import SparsePrefill
from .operands import IndexList, Operands
from .sm90_walk import first_tile, for_each_tile, next_tile

ROPE_SLOTS = 3
VALID_SLOTS = ROPE_SLOTS  # a tile's bits take the place of those of the tile whose RoPE slot it gets


def geometry_of(d_qk: int) -> Geometry:
    """Copies need no registers for bytes, so that Q gets them; what it leaves of shared memory are slots."""
    return Geometry(
        d_qk=d_qk,
        q_tiles_in_registers=5,
        kv_slots={D_QK: 10, D_LATENT: 11}[d_qk],
        rope_slots=ROPE_SLOTS,
        first_registers=40,
        score_registers=152,
        ready_arrivals=1,
        valid_slots=VALID_SLOTS,
        alternating=True,
    )


class SparsePrefillSm90(SparseRolesSm90, SparsePrefill):
    """One variant of the kernel."""

    keeps_maximum = True
    skips_tiles = True

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.geometry = geometry_of(config.d_qk)

    def carve_smem(self, smem: Any) -> tuple[Tiles, CopyPipes]:
        """Places tiles and barriers."""
        tiles, shared = super().carve_smem(smem)
        return tiles, CopyPipes.carve(smem, self.geometry, shared)

    def initialise(self, pipes: Any) -> None:
        """Sets the arrivals of every barrier."""
        pipes.initialise_rings()
        super().initialise(pipes)

    def await_validity(self, pipes: CopyPipes, place: TilePlace) -> None:
        """Blocks until the scout has told of a tile."""
        pipes.valid_ready.wait_ready_at(place.rope)

    @cute.jit
    def gather(self, operands: Operands, tiles: Tiles, pipes: CopyPipes, thread: Int32):
        """Shares the warpgroup out."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp < COPY_WARPS:
            lane = CopyLane.of(thread, halves_of_cta(self.config.cluster))
            for_each_tile(operands.schedule, partial(self.copy_tile, operands, tiles, pipes, lane))
            cute.arch.griddepcontrol_launch_dependents()
        elif warp == COURIER_WARP:
            tiles_done = for_each_tile(operands.schedule, partial(self.deliver_tile, tiles, pipes))
            if cutlass.const_expr(self.config.cluster > 1):
                self.await_peer(pipes, tiles_done)
        else:
            self.scout(operands, tiles, pipes)

    @cute.jit
    def scout(self, operands: Operands, tiles: Tiles, pipes: CopyPipes):
        """Waits rope_free. Signals valid_ready. Indices are asked for a tile ahead."""
        cursor = first_tile(operands)
        entries = cursor.entries()
        tile = Int32(0)
        while cursor.token <= operands.schedule.last_request():
            # The tile VALID_SLOTS before has been worked off. To wait for an older one would be to be overtaken: this slot's next
            # phase must not end before the scout has announced the tile.
            pipes.rope_free.wait_free(tile)
            self.announce(tiles, pipes, cursor.indices, entries, tile)
            cursor = next_tile(operands, cursor, self.config.d_qk)
            entries = cursor.entries()
            tile = tile + 1

    @cute.jit
    def announce(self, tiles: Tiles, pipes: CopyPipes, indices: IndexList, entries: tuple[Int32, Int32], tile: Int32):
        """Tells which rows a tile has, from the indices of this lane's keys."""
        low, high = (indices.checked(entry) for entry in entries)
        slot, lane = pipes.valid_ready.slot(tile), cute.arch.lane_idx()
        rows = pipes.sRows + (slot * TILE_KEYS + lane)
        rows.store(low)
        (rows + HALF_KEYS).store(high)
        bits = [cute.arch.vote_ballot_sync(row >= 0) for row in (low, high)]
        if lane == 0:
            (pipes.sBases + slot).store(indices.base)
            words = cute.recast_ptr(tiles.sValid, dtype=Int32) + slot * HALVES
            words.store(bits[0])
            (words + 1).store(bits[1])
        arrive(pipes.valid_ready.barrier(tile))

    @cute.jit
    def copy_tile(self, operands: Operands, tiles: Tiles, pipes: CopyPipes, lane: CopyLane, tile: Int32):
        """Waits valid_ready, kv_free, rope_free. Signals kv_landed, rope_landed."""
        present = self.told_of_keys(tiles, pipes, tile)
        rows = TileRows.of(pipes, tile, operands.latent.row_stride)
        for step in cutlass.range_constexpr(SLOTS_PER_TILE):
            use = tile * SLOTS_PER_TILE + step
            pipes.kv_free.wait_free(use)
            if present:
                # of a pair, the other half comes from the peer
                source, halves = self.geometry.first_column(step) * ELEMENT_BYTES, HALVES // self.config.cluster
                rows.copy(lane, self.kv_slot(tiles, pipes, use), source, SLOT_COLUMNS // BOX_COLUMNS, halves)
            arrive_landed(pipes.kv_landed.barrier(use))
        pipes.rope_free.wait_free(tile)
        if cutlass.const_expr(self.geometry.has_rope) and present:
            target = tiles.sRope.iterator.toint() + pipes.rope_ready.slot(tile) * BOX_BYTES
            rows.copy(lane, target, D_LATENT * ELEMENT_BYTES, 1)
        arrive_landed(pipes.rope_landed.barrier(tile))

    def told_of_keys(self, tiles: Tiles, pipes: CopyPipes, tile: Int32) -> Boolean:
        """Whether a tile has any key. Waits valid_ready."""
        pipes.valid_ready.wait_ready(tile)
        return self.has_keys(tiles, pipes.valid_ready.slot(tile))

    @cute.jit
    def deliver_tile(self, tiles: Tiles, pipes: CopyPipes, tile: Int32):
        """Waits kv_landed, rope_landed. Signals kv_ready, rope_ready."""
        present = self.told_of_keys(tiles, pipes, tile) if self.config.cluster > 1 else True
        for step in cutlass.range_constexpr(SLOTS_PER_TILE):
            use = tile * SLOTS_PER_TILE + step
            pipes.kv_landed.wait_ready(use)
            cute.arch.fence_proxy("async.shared", space="cta")
            if cutlass.const_expr(self.config.cluster == 1):
                arrive(pipes.kv_ready.barrier(use))
            elif present:
                own = self.kv_slot(tiles, pipes, use) + halves_of_cta(self.config.cluster)[0] * HALF_BYTES
                hand_over(pipes.kv_ready.barrier(use), own, SLOT_COLUMNS // BOX_COLUMNS, peer_shift(pipes.kv_ready.base))
            else:
                arrive(pipes.kv_ready.barrier(use))
        pipes.rope_landed.wait_ready(tile)
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(pipes.rope_ready.barrier(tile))

    def kv_slot(self, tiles: Tiles, pipes: CopyPipes, use: Int32) -> Int32:
        """The shared memory address of the slot of a use."""
        return tiles.sKv.iterator.toint() + pipes.kv_ready.slot(use) * SLOT_BYTES


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """The variant, ready to compile."""
    kernel = SparsePrefillSm90(config, arch)
    geometry = kernel.geometry
    return kernel.source(
        smem_bytes=geometry.smem_bytes + CopyPipes.smem_bytes(geometry),
        barriers=barrier_table(geometry.barrier_offset, geometry.barriers + CopyPipes.rings(geometry)),
        named_barriers=named_barriers(),
        roles=GATHER_ROLES + role_table("gather")[1:],
        expected={"HGMMA": geometry.wgmma_per_tile},
    )
