"""Dense MLA decode on Hopper.

This file is the kernel of a 16-bit cache; sm90_convert.py and sm90_fp8.py are the kernels of an e4m3 one.

For every request and every query row r = (query token i, head) of one KV head, over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A CTA holds 64 query rows and walks the work tiles of one partition, 64 keys (one tile) at a time.

Roles (512 threads):
  load     warpgroup 0, one warp: TMA of the key tiles, page by page
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse
  output   warpgroups 2, 3: O[:, 0:256] and O[:, 256:512] += P V in registers, rescale, epilogue

Shared memory: 10 stages of 64 keys x 128 latent columns (a tile takes four), 3 stages of 64 keys x 64
RoPE columns, and the last 256 columns of Q. V is the same memory as K, read transposed.

Pipelines (producer -> consumer; arrivals per phase, c = CTAs of the cluster):
  kv_ready[10]    load -> score           1 and the bytes of two boxes
  kv_free[10]     output -> load          4 c: the warps of the side that reads the stage
  rope_ready[3]   load -> score           1 and the bytes of one box
  probs_ready[3]  score -> output         4: P and alpha are written
  right_turn[3]   output -> output        4: the left output group has issued its products of a tile, the right one may
  stats_ready     score -> output         4: 1 / row sum and places of rows are written, once per work tile
  stats_free      output -> score         8

The RoPE columns of a tile come behind its second stage. A RoPE stage has no barrier of its own that tells when it is free, and the
output role does not wait for keys: kv_free of the stages loaded before says that P of the tile three before has been read, and
probs_ready that the score role has waited for the keys.

The trick: the RoPE columns of K are dead once S is known, so P (64 x 64, the same bytes) is written over them. With five of
the nine column tiles of Q in the registers of a warpgroup that accumulates nothing else, that leaves shared memory for 2.5
key tiles, and the roles exchange nothing but P: while the tensor cores multiply P V of one tile, the score warpgroup
computes the softmax of the next. Two stages of a tile take the place of stages of the tile two before, while that is multiplied: the
left output group goes first, so that its two stages come free early, and the last two stages of a tile are its refill. README.md has
the clocks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8, FP8_CACHE, LATENT, DenseDecodeConfig
from ...spec.mla import D_LATENT, LATENT_DIMS
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import AttentionKernel
from ..attention.scheduler import BOX_COLUMNS
from ..definition import KernelDefinition
from ..primitives.copies import load_box, multicast_box, prefetch_box, prefetch_map
from ..sm90.arrivals import await_peer, initialise
from ..sm90.config import BOX_BYTES, OUTPUT_REGISTERS, STAGE_BYTES, STAGE_COLUMNS, Geometry, Pipes, Tiles
from ..sm90.output import LatentOutput, OutputRole
from ..sm90.score import LatentScores, ScoreRole
from ..sm90.warpgroups import THREADS, WARPGROUP, group_of, named_barriers, role_table, set_registers, sync_start
from .abi import DenseDecodeAbi
from .operands import DescaledRows, LaneBox, Operands
from .page_walk import for_each_tile, for_each_tile_in_groups
from .sm90_convert import fp8_cache_definition
from .sm90_fp8 import fp8_definition
from .sm90_mask import KeyMask

# By columns of a key: column tiles of Q in registers, stages of keys and of RoPE columns or P, stages before the RoPE columns. What Q
# leaves of shared memory are stages.
TILINGS = {576: (5, 10, 3, 2), 512: (5, 11, 3, 2), 320: (4, 10, 6, 1)}
# By columns of a key and CTAs of a cluster: stages of a tile that L2 is asked for. With 576 columns a CTA alone gains nothing: HBM binds.
PREFETCHED = {(576, 2): (3,), (512, 1): (3,), (512, 2): (3,)}


def geometry_of(d_qk: int, cluster: int) -> Geometry:
    """Return the geometry of keys of so many columns in a cluster of so many CTAs."""
    q_tiles_in_registers, kv_stages, rope_stages, rope_after = TILINGS[d_qk]
    return Geometry(
        d_qk=d_qk,
        q_tiles_in_registers=q_tiles_in_registers,
        kv_stages=kv_stages,
        rope_stages=rope_stages,
        producer_registers=32,
        score_registers=160,
        ready_arrivals=1,
        valid_stages=0,
        rope_after=rope_after,
        frees_rope=False,
        takes_turns=LATENT_DIMS[d_qk].latent == D_LATENT,
        prefetched=PREFETCHED.get((d_qk, cluster), ()),
        d_v=LATENT_DIMS[d_qk].latent,
    )


class DenseDecodeSm90(AttentionKernel):
    """One variant of the kernel of a 16-bit cache."""

    threads = THREADS

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        super().__init__(DenseDecodeAbi(config), arch)
        self.cluster = config.cluster
        self.geometry = geometry_of(config.d_qk, config.cluster)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory, geometry = self.smem.allocate(), self.geometry
        tiles, pipes = Tiles.create(memory), Pipes.create(memory, geometry.tile_stages)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                initialise(pipes, geometry, self.cluster)
                prefetch_map(operands.args.kv_map)
        elif warp == 1:
            operands.schedule.prefetch()
        sync_start(self.cluster)
        # the plan, the lengths, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(geometry.producer_registers)
            if warp == 0:
                LoadRole(geometry, self.cluster).run(operands, tiles, pipes)
        elif group == 1:
            set_registers(geometry.score_registers)
            scores = partial(LatentScores.create, geometry, self.dtype)
            ScoreRole(scores, KeyMask(), DescaledRows(LATENT), d_v=geometry.d_v).run(operands, tiles, pipes, thread)
        else:
            set_registers(OUTPUT_REGISTERS)
            output = partial(LatentOutput.create, geometry, self.dtype, self.cluster, unseen=operands)
            OutputRole(geometry.stage_strides[0], output, self.dtype, geometry.d_v).run(operands, tiles, pipes, thread, group - 2)


class LoadRole:
    """One warp: TMA of the key tiles. cluster: CTAs that share them."""

    def __init__(self, geometry: Geometry, cluster: int) -> None:
        self.geometry = geometry
        self.cluster = cluster

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Wait kv_free. Signal kv_ready, rope_ready."""
        # a look-up takes longer than the copies of a tile of few stages are issued in
        for_each = for_each_tile if self.geometry.d_v == D_LATENT else for_each_tile_in_groups
        tiles_done = for_each(operands, partial(self.load_tile, operands, tiles, pipes))
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.cluster > 1):
            await_peer(pipes, self.geometry, tiles_done)

    @cute.jit
    def load_tile(self, operands: Operands, tiles: Tiles, pipes: Pipes, box: LaneBox, tile: Int32):
        """Load the tile-th tile of this CTA: all of it, with zeros where the request has no page."""
        lane = cute.arch.lane_idx()
        kv_map, where = operands.args.kv_map, (operands.kv_head(), box.row, box.page)
        offset = box.offset * BOX_COLUMNS  # a box of fewer keys is a run of rows of the 64-key box
        if cutlass.const_expr(len(self.geometry.prefetched) > 0):
            self.prefetch_stages(operands, box)
        kv = pipes.kv_ready.state(tile * self.geometry.tile_stages)
        for i in cutlass.range_constexpr(self.geometry.tile_stages):
            if cutlass.const_expr(self.geometry.has_rope and i == self.geometry.rope_after):
                self.load_rope(operands, tiles, pipes, box, tile)
            ready = pipes.kv_ready.barrier(kv)
            pipes.kv_free.producer_acquire(kv)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(ready, STAGE_BYTES)
            cute.arch.sync_warp()
            if box.in_tile:
                target = tiles.sKv.iterator + (kv.stage * (TILE_KEYS * STAGE_COLUMNS) + offset)
                self.load_stage(kv_map, target, self.geometry.first_column(i), where, ready)
            # two stages side by side, then divided anew: no registers are left to carry a state over more
            kv = pipes.kv_ready.advance_in_tile(kv, 0) if i % 2 == 0 else pipes.kv_ready.state(tile * self.geometry.tile_stages + (i + 1))

    @cute.jit
    def load_rope(self, operands: Operands, tiles: Tiles, pipes: Pipes, box: LaneBox, tile: Int32):
        """Load the RoPE columns of a tile, over P of the tile three before, which has been read: its last stages came free before."""
        ready = pipes.rope_ready.barrier(tile)
        kv_map, where = operands.args.kv_map, (operands.kv_head(), box.row, box.page)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, BOX_BYTES)
        cute.arch.sync_warp()
        if box.in_tile:
            target = tiles.sRope.iterator + (pipes.rope_ready.stage(tile) * (TILE_KEYS * BOX_COLUMNS) + box.offset * BOX_COLUMNS)
            if cutlass.const_expr(self.cluster == 1):
                load_box(target, kv_map, (self.geometry.d_v, *where), ready)
            elif cute.arch.block_idx_in_cluster() == tile % 2:
                multicast_box(target, kv_map, (self.geometry.d_v, *where), ready)

    @cute.jit
    def prefetch_stages(self, operands: Operands, box: LaneBox):
        """Ask L2 for what load_stage fetches of the stages that come free last."""
        kv_map, where = operands.args.kv_map, (operands.kv_head(), box.row, box.page)
        if box.in_tile:
            for i in cutlass.range_constexpr(len(self.geometry.prefetched)):
                column = self.geometry.first_column(self.geometry.prefetched[i])
                if cutlass.const_expr(self.cluster == 1):
                    prefetch_box(kv_map, (column, *where))
                    prefetch_box(kv_map, (column + BOX_COLUMNS, *where))
                else:
                    prefetch_box(kv_map, (column + cute.arch.block_idx_in_cluster() * BOX_COLUMNS, *where))

    def load_stage(self, kv_map: Any, target: cute.Pointer, column: int, where: tuple[Int32, ...], ready: cute.Pointer) -> None:
        """Load two boxes of columns; of a pair, each CTA fetches one for both."""
        box = TILE_KEYS * BOX_COLUMNS
        if self.cluster == 1:
            load_box(target, kv_map, (column, *where), ready)
            load_box(target + box, kv_map, (column + BOX_COLUMNS, *where), ready)
        else:
            rank = cute.arch.block_idx_in_cluster()
            multicast_box(target + rank * box, kv_map, (column + rank * BOX_COLUMNS, *where), ready)


def latent_definition(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant of a 16-bit cache, ready to compile."""
    kernel = DenseDecodeSm90(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=named_barriers(),
        roles=role_table("load"),
        expected={"HGMMA": kernel.geometry.wgmma_per_tile},
    )


DEFINITIONS = {LATENT: latent_definition, FP8_CACHE: fp8_cache_definition, FP8: fp8_definition}


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return DEFINITIONS[config.operands](config, arch)
