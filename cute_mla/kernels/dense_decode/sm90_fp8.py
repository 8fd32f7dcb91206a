"""Dense MLA decode on Hopper with e4m3 queries and an e4m3 cache, multiplied as they are.

The formula and the walk of sm90.py, with q = descale_q q8, k = descale_k k8, and P rounded to e4m3:

    s_rj = descale_q descale_k <q8_r, k8_j>     p_rj = e4m3(2^(scale * s_rj - reference_r))
    out_r = descale_k sum_j p_rj k8_j[:512] / sum_j p_rj

Roles (512 threads):
  load       warp 0: TMA of the key tiles, page by page
  transpose  warps 1, 2, 3, by turns: 128 columns of V of a tile, from shared memory to shared memory
  score      warpgroup 1: S = Q K^T, softmax, P to shared memory, lse
  output     warpgroups 2, 3: O[:, 0:256] and O[:, 256:512] += P V in registers, rescale, epilogue

Shared memory: three key tiles, each four boxes of 64 keys x 128 columns and one of 64 RoPE columns and zeros; two tiles of V^T,
four stages of 128 columns and 8 rows of ones x 64 keys each; two tiles of P. All of Q is in the registers of the score warpgroup.

Pipelines (producer -> consumer; arrivals per phase, c = CTAs of the cluster):
  kv_ready[12]     load -> score, transpose   1 and the bytes of one box
  rope_ready[3]    load -> score              1 and the bytes of one box
  keys_free[3]     score, transpose -> load   8 c: four warps have multiplied a tile, each of four boxes is transposed
  values_ready[8]  transpose -> output        1: 128 columns of V^T (and the warp that writes that stage next)
  values_free[8]   output -> transpose        4: the warps of the side that reads them
  probs_ready[2]   score -> output            4: P and alpha are written
  probs_free[2]    output -> score            8
  stats_ready      score -> output            4: factors and places of rows of O are written, once per work tile
  stats_free       output -> score            8

The trick: e4m3 products contract along rows only, so V needs a transpose, which shared memory cannot give. A matrix load of byte
pairs, two byte permutations and a matrix store do it, if the keys of P and V^T may lie in the order that falls out, which is
the one that the scores have in registers, and the columns of O in another, which gives each thread four neighbouring ones.
sm90/byte_transpose.py has the orders, README.md the clocks. Eight rows of ones behind the last 128 of a side's V^T make the row sums of P
as it was rounded, with the tensor cores, and O is divided by those: what rounding takes from one key it does not take from the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.dense_decode import FP8, DenseDecodeConfig
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import AttentionKernel
from ..attention.softmax import TileSoftmax
from ..definition import KernelDefinition
from ..primitives.copies import load_box, multicast_box, prefetch_map, smem_pointer
from ..primitives.smem import fields_of
from ..sm90.byte_transpose import ONES, transpose_box
from ..sm90.output import OutputRole
from ..sm90.score import ScoreRole
from ..sm90.warpgroups import (
    OUTPUT_BARRIER,
    OUTPUT_GROUPS,
    THREADS,
    WARPGROUP,
    WARPS_PER_GROUP,
    group_of,
    set_registers,
    sync_start,
)
from .abi import DenseDecodeAbi
from .operands import DescaledRows, LaneBox, Operands
from .page_walk import for_each_tile
from .sm90_fp8_config import (
    BOX_BYTES,
    BOX_COLUMNS,
    CHUNKS,
    LATENT_BOXES,
    LOAD_REGISTERS,
    ONES_ROWS,
    OUTPUT_REGISTERS,
    QGMMA_PER_TILE,
    SCORE_REGISTERS,
    SMEM,
    STAGES,
    VALUE_BYTES,
    VALUE_STAGES,
    Pipes,
    Tiles,
)
from .sm90_fp8_gemm import E4m3Output, E4m3Scores
from .sm90_mask import EndMask

FIRST_TRANSPOSER = 1  # warp
TRANSPOSERS = 3  # a chunk each, by turns
ROLES = (
    Role("load", 0, 1),
    Role("transpose", FIRST_TRANSPOSER, TRANSPOSERS),
    Role("score", WARPS_PER_GROUP, WARPS_PER_GROUP),
    Role("output_left", 2 * WARPS_PER_GROUP, WARPS_PER_GROUP),
    Role("output_right", 3 * WARPS_PER_GROUP, WARPS_PER_GROUP),
)


class DenseDecodeSm90Fp8(AttentionKernel):
    """One variant of the kernel of e4m3 queries and an e4m3 cache."""

    threads = THREADS

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        super().__init__(DenseDecodeAbi(config), arch)
        self.cluster = config.cluster

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory = SMEM.allocate()
        tiles, pipes = Tiles(**fields_of(Tiles, memory)), Pipes.create(memory)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                initialise(pipes, self.cluster)
                prefetch_map(operands.args.kv_map)
        elif warp == 1:
            operands.schedule.prefetch()
        sync_start(self.cluster)
        # the plan, the lengths, the scales, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(LOAD_REGISTERS)
            if warp == 0:
                LoadRole(self.cluster).run(operands, tiles, pipes)
            else:
                TransposeRole(self.cluster).run(operands, tiles, pipes, warp - FIRST_TRANSPOSER)
        elif group == 1:
            set_registers(SCORE_REGISTERS)
            scores = partial(E4m3Scores.create, self.cluster)
            softmax = partial(TileSoftmax.create, keeps_maximum=True)
            ScoreRole(scores, EndMask(), DescaledRows(FP8), softmax).run(operands, tiles, pipes, thread)
        else:
            set_registers(OUTPUT_REGISTERS)
            write_ones(tiles, pipes, thread, group - 2)
            OutputRole(0, E4m3Output.create, self.dtype).run(operands, tiles, pipes, thread, group - 2)


def initialise(pipes: Pipes, cluster: int) -> None:
    """Set the arrivals of every barrier: warps of the arriving role, times the CTAs that share a stage."""
    pipes.kv_ready.initialise(LATENT_BOXES, 1)
    pipes.rope_ready.initialise(1)
    pipes.keys_free.initialise((WARPS_PER_GROUP + LATENT_BOXES) * cluster)
    pipes.values_ready.initialise(LATENT_BOXES, 1)
    pipes.values_free.initialise(LATENT_BOXES, WARPS_PER_GROUP)
    pipes.probs_ready.initialise(WARPS_PER_GROUP)
    pipes.probs_free.initialise(OUTPUT_GROUPS * WARPS_PER_GROUP)
    pipes.stats_ready.initialise(WARPS_PER_GROUP)
    pipes.stats_free.initialise(OUTPUT_GROUPS * WARPS_PER_GROUP)
    cute.arch.mbarrier_init_fence()


class LoadRole:
    """One warp: TMA of the key tiles. cluster: CTAs that share them."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Wait keys_free. Signal kv_ready, rope_ready."""
        tiles_done = for_each_tile(operands, partial(self.load_tile, operands, tiles, pipes))
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.cluster > 1):
            for i in cutlass.range(STAGES, unroll=1):
                pipes.keys_free.producer_acquire(tiles_done + i)

    @cute.jit
    def load_tile(self, operands: Operands, tiles: Tiles, pipes: Pipes, box: LaneBox, tile: Int32):
        """Load the tile-th tile of this CTA: all of it, with zeros where the request has no page."""
        where = (operands.kv_head(), box.row, box.page)
        offset = box.offset * BOX_COLUMNS
        pipes.keys_free.producer_acquire(tile)
        for i in cutlass.range_constexpr(LATENT_BOXES):
            target = tiles.sKv.iterator + (pipes.kv_ready.stage(i, tile) * BOX_BYTES + offset)
            self.load_boxes(operands.args.kv_map, target, (i * BOX_COLUMNS, *where), pipes.kv_ready.box(i).barrier(tile), box, i % 2)
        target = tiles.sRope.iterator + (pipes.rope_ready.stage(tile) * BOX_BYTES + offset)
        self.load_boxes(operands.args.kv_map, target, (D_LATENT, *where), pipes.rope_ready.barrier(tile), box, tile % 2)

    @cute.jit
    def load_boxes(self, kv_map: Any, target: cute.Pointer, where: tuple[Any, ...], ready: cute.Pointer, box: LaneBox, rank: int | Int32):
        """Load a box of columns; of a pair, the CTA of this rank fetches it for both."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, BOX_BYTES)
        cute.arch.sync_warp()
        if box.in_tile:
            if cutlass.const_expr(self.cluster == 1):
                load_box(target, kv_map, where, ready)
            elif cute.arch.block_idx_in_cluster() == rank:
                multicast_box(target, kv_map, where, ready)


class TransposeRole:
    """Three warps, by turns: 128 columns of V of a tile, from shared memory to shared memory. cluster: CTAs that share the keys."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes, rank: Int32):
        """Wait kv_ready, values_ready, values_free. Signal values_ready, keys_free. One warp; rank: which of the transposing warps."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile = Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            for t in cutlass.range(tile_range.tiles, unroll=1):
                # chunks are counted through all tiles; a tile's first one is number 4 tile, which is tile modulo 3
                first = (rank + (TRANSPOSERS - 1) * (tile + t)) % TRANSPOSERS
                for chunk in cutlass.range(first, LATENT_BOXES, TRANSPOSERS, unroll=1):
                    self.transpose_chunk(tiles, pipes, tile + t, chunk, tile_range.keys - t * TILE_KEYS)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def transpose_chunk(self, tiles: Tiles, pipes: Pipes, tile: Int32, chunk: Int32, left: Int32):
        """Transpose 128 columns of V of a tile. Keys past the end become zeros: P is 0 there, but 0 times NaN is NaN."""
        pipes.kv_ready.box(chunk).consumer_wait(tile)
        # another warp wrote the stage's last tile: until it has, the stage may look as free as it was for that one
        pipes.values_ready.box(chunk).producer_acquire(tile)
        pipes.values_free.box(chunk).producer_acquire(tile)
        source = tiles.sKv.iterator.toint() + pipes.kv_ready.stage(chunk, tile) * BOX_BYTES
        target = tiles.sVt.iterator.toint() + pipes.values_ready.stage(chunk, tile) * VALUE_BYTES
        if left < TILE_KEYS:
            transpose_box(source, target, left, True)
        else:
            transpose_box(source, target, left, False)
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.values_ready.box(chunk).producer_commit(tile)
        if cutlass.const_expr(self.cluster > 1):
            # a box of the peer's: its load role has found the stage free, so this arrival cannot count for the tile before
            pipes.kv_ready.box(chunk ^ 1).consumer_wait(tile)
        pipes.keys_free.consumer_release_in_cluster(tile, self.cluster)


@cute.jit
def write_ones(tiles: Tiles, pipes: Pipes, thread: Int32, side: Int32):
    """Write the rows of ones of a side's stages of V^T, once."""
    stages = CHUNKS * VALUE_STAGES
    words = ONES_ROWS * TILE_KEYS // 4
    ones = cute.make_rmem_tensor(cute.make_layout(stages * words // WARPGROUP), Int32)
    ones.fill(ONES)
    threads = WARPGROUP // stages
    stage = pipes.values_ready.stage(side * CHUNKS, Int32(0)) + thread // threads
    target = tiles.sVt.iterator.toint() + stage * VALUE_BYTES + (BOX_BYTES + thread % threads * (4 * cute.size(ones)))
    cute.autovec_copy(ones, cute.make_tensor(cute.recast_ptr(smem_pointer(target), dtype=Int32), ones.layout))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=OUTPUT_BARRIER + side, number_of_threads=WARPGROUP)


def fp8_definition(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant of e4m3 operands, ready to compile."""
    return DenseDecodeSm90Fp8(config, arch).definition(
        smem_bytes=SMEM.nbytes,
        barriers=SMEM.barriers(),
        named_barriers=(NamedBarrier("output_left", OUTPUT_BARRIER), NamedBarrier("output_right", OUTPUT_BARRIER + 1)),
        roles=ROLES,
        expected={"QGMMA": QGMMA_PER_TILE},
    )
