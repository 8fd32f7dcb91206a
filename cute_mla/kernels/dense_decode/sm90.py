"""Dense MLA decode on Hopper. Here the kernel of a 16-bit cache; sm90_convert.py and sm90_fp8.py have what an e4m3 one changes.

For every request and every query row r = (query token i, head) of one KV head, over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A CTA holds 64 query rows and walks the pieces of one part of the plan, 64 keys (one tile) at a time.

Roles (512 threads):
  load     warpgroup 0, one warp: TMA of the key tiles, page by page
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse
  output   warpgroups 2, 3: O[:, 0:256] and O[:, 256:512] += P V in registers, rescale, epilogue

Shared memory: a ring of 10 slots of 64 keys x 128 latent columns (a tile takes four), a ring of 3 slots of 64 keys x 64
RoPE columns, and the last 256 columns of Q. V is the same memory as K, read transposed.

Pipelines (producer -> consumer; arrivals per phase, c = CTAs of the cluster):
  kv_ready[10]    load -> score           1 and the bytes of two boxes
  kv_free[10]     output -> load          4 c: the warps of the side that reads the slot
  rope_ready[3]   load -> score           1 and the bytes of one box
  probs_ready[3]  score -> output         4: P and alpha are written
  stats_ready     score -> output         4: 1 / row sum is written, once per piece
  stats_free      output -> score         8

A RoPE slot has no barrier of its own that tells when it is free, and the output role does not wait for keys: kv_free of a tile's
four slots says that P of the tile three before has been read, and probs_ready that the score role has waited for the keys.

The trick: the RoPE columns of K are dead once S is known, so P (64 x 64, the same bytes) is written over them. With five of
the nine column tiles of Q in the registers of a warpgroup that accumulates nothing else, that leaves shared memory for 2.5
key tiles, and the roles exchange nothing but P: while the tensor cores multiply P V of one tile, the score warpgroup
computes the softmax of the next. README.md has the clocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8, FP8_CACHE, LATENT, DenseDecodeConfig
from ...spec.mla import D_LATENT, D_QK
from ...spec.split_plan import TILE_KEYS
from ..attention.tiles import BOX_COLUMNS
from ..definition import KernelDefinition
from ..primitives.pipeline import Place
from ..primitives.tma import load_box, multicast_box, prefetch_map
from ..sm90.config import (
    OUTPUT_BARRIER,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    THREADS,
    WARPGROUP,
    Geometry,
    Pipes,
    Tiles,
)
from ..sm90.gemm import OutputGemm, clear_rows
from ..sm90.roles import group_of, set_registers
from .operands import LaneBox, Operands
from .page_walk import load_pieces
from .sm90_convert import ConvertingSm90
from .sm90_fp8 import NativeSm90
from .sm90_rows import DenseRowsSm90

GEOMETRY = Geometry(
    d_qk=D_QK,
    q_tiles_in_registers=5,
    kv_slots=10,
    rope_slots=3,
    first_registers=32,
    score_registers=160,
    ready_arrivals=1,
    valid_slots=0,
    frees_rope=False,
)


class DenseDecodeSm90(DenseRowsSm90):
    """One variant of the kernel."""

    threads = THREADS
    geometry = GEOMETRY
    first_role = "load"

    @cute.jit
    def run(self, operands: Operands):
        tiles, pipes = self.carve_smem(cutlass.memory.SmemAllocator())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.initialise(pipes)
                prefetch_map(operands.kv_map)
        self.sync_start()
        # the plan, the lengths, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(GEOMETRY.first_registers)
            if warp == 0:
                self.load(operands, tiles, pipes)
        elif group == 1:
            set_registers(GEOMETRY.score_registers)
            self.score(operands, tiles, pipes, thread)
        else:
            set_registers(GEOMETRY.output_registers)
            self.output(operands, tiles, pipes, thread, group - 2)

    # ---- load -------------------------------------------------------------------------------------------------------

    @cute.jit
    def load(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits kv_free. Signals kv_ready, rope_ready."""
        tiles_done = load_pieces(operands, partial(self.load_tile, operands, tiles, pipes))
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.config.cluster > 1):
            self.await_peer(pipes, tiles_done)

    @cute.jit
    def load_tile(self, operands: Operands, tiles: Tiles, pipes: Pipes, box: LaneBox, tile: Int32):
        """Loads the tile-th tile of this CTA."""
        lane = cute.arch.lane_idx()
        where = (operands.kv_head(), box.row, box.page)
        offset = box.offset * BOX_COLUMNS  # a box of fewer keys is a run of rows of the 64-key box
        kv = pipes.kv_ready.place(tile * SLOTS_PER_TILE)
        for i in cutlass.range_constexpr(SLOTS_PER_TILE):
            ready = pipes.kv_ready.at(kv)
            pipes.kv_free.await_free_at(kv)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(ready, 2 * box.tile_bytes)
            cute.arch.sync_warp()
            if box.active:
                target = tiles.sKv.iterator + (kv.slot * (TILE_KEYS * SLOT_COLUMNS) + offset)
                self.load_slot(operands.kv_map, target, i * SLOT_COLUMNS, where, ready)
            # two slots side by side, then divided anew: no registers are left to carry a place over more
            kv = pipes.kv_ready.further(kv, 0) if i % 2 == 0 else pipes.kv_ready.place(tile * SLOTS_PER_TILE + (i + 1))

        # P of the tile that had the RoPE slot was read before the last of these slots came free
        ready = pipes.rope_ready.barrier(tile)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, box.tile_bytes)
        cute.arch.sync_warp()
        if box.active:
            target = tiles.sRope.iterator + (pipes.rope_ready.slot(tile) * (TILE_KEYS * BOX_COLUMNS) + offset)
            if cutlass.const_expr(self.config.cluster == 1):
                load_box(target, operands.kv_map, (D_LATENT, *where), ready)
            elif cute.arch.block_idx_in_cluster() == tile % 2:
                multicast_box(target, operands.kv_map, (D_LATENT, *where), ready)

    def load_slot(self, kv_map: Any, target: cute.Pointer, column: int, where: tuple[Int32, ...], ready: cute.Pointer) -> None:
        """Two boxes of columns; of a pair, each CTA fetches one for both."""
        box = TILE_KEYS * BOX_COLUMNS
        if self.config.cluster == 1:
            load_box(target, kv_map, (column, *where), ready)
            load_box(target + box, kv_map, (column + BOX_COLUMNS, *where), ready)
        else:
            rank = cute.arch.block_idx_in_cluster()
            multicast_box(target + rank * box, kv_map, (column + rank * BOX_COLUMNS, *where), ready)

    # ---- what no row sees -------------------------------------------------------------------------------------------

    @cute.jit
    def clear_unused(self, tiles: Tiles, gemm: OutputGemm, slots: list[Place], left: Int32, side: Int32):
        """P is 0 past the end, but 0 times a NaN of an unused row is NaN."""
        if left < TILE_KEYS:
            for slot in slots:
                clear_rows(tiles.sKv, slot.slot, left, gemm.thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=OUTPUT_BARRIER + side, number_of_threads=WARPGROUP)


KERNELS: dict[str, type[DenseRowsSm90]] = {LATENT: DenseDecodeSm90, FP8_CACHE: ConvertingSm90, FP8: NativeSm90}


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """The variant, ready to compile."""
    return KERNELS[config.operands](config, arch).variant()
