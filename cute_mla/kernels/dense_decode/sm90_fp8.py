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
sm90_fp8_transpose.py has the orders, README.md the clocks. Eight rows of ones behind the last 128 of a side's V^T make the row sums of P
as it was rounded, with the tensor cores, and O is divided by those: what rounding takes from one key it does not take from the sum.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...manifest import NamedBarrier, Role
from ...spec.dense_decode import FP8
from ...spec.mla import D_LATENT
from ..attention.softmax import TileSoftmax
from ..primitives.copies import load_box, multicast_box, prefetch_map
from ..sm90.cta import OUTPUT_BARRIER, LatentSm90Parts, warpgroup_roles
from ..sm90.output import LatentSm90OutputRole
from ..sm90.score import LatentSm90ScoreRole
from .operands import DenseDecodeOperands, DenseDecodeRowScale, LaneBox
from .page_walk import for_each_tile
from .sm90_convert import DenseDecodeSm90EndMask
from .sm90_fp8_gemm import (
    BOX_BYTES,
    BOX_COLUMNS,
    LATENT_BOXES,
    QGMMA_PER_TILE,
    REGISTERS,
    SMEM,
    STAGES,
    DenseDecodeSm90Fp8Output,
    DenseDecodeSm90Fp8Scores,
    DenseDecodeSm90Fp8Smem,
)
from .sm90_fp8_transpose import TRANSPOSERS, DenseDecodeSm90TransposeRole, write_ones

FIRST_TRANSPOSER = 1  # warp


class DenseDecodeSm90Fp8(LatentSm90Parts):
    """One variant of the kernel of e4m3 queries and an e4m3 cache."""

    layout = SMEM
    registers = REGISTERS
    roles = (Role("load", 0, 1), Role("transpose", FIRST_TRANSPOSER, TRANSPOSERS), *warpgroup_roles("load")[1:])
    expected = ("QGMMA", QGMMA_PER_TILE)
    named_barriers = (NamedBarrier("output_left", OUTPUT_BARRIER), NamedBarrier("output_right", OUTPUT_BARRIER + 1))

    def smem(self, memory: dict[str, Any]) -> DenseDecodeSm90Fp8Smem:
        """Return the allocated shared memory as the roles see it."""
        return DenseDecodeSm90Fp8Smem.create(memory)

    def initialise(self, operands: DenseDecodeOperands, smem: DenseDecodeSm90Fp8Smem) -> None:
        """Initialise the barriers, and prefetch the tensor map."""
        smem.initialise(self.cluster)
        prefetch_map(operands.args.kv_map)

    @cute.jit
    def produce(self, operands: DenseDecodeOperands, smem: DenseDecodeSm90Fp8Smem, warp: Int32, thread: Int32):
        """Run the roles load and transpose."""
        if warp == 0:
            DenseDecodeSm90Fp8LoadRole(self.cluster).run(operands, smem)
        else:
            DenseDecodeSm90TransposeRole(self.cluster).run(operands, smem, warp - FIRST_TRANSPOSER)

    def score(self, operands: DenseDecodeOperands, smem: DenseDecodeSm90Fp8Smem, thread: Int32) -> None:
        """Run the score role."""
        scores = partial(DenseDecodeSm90Fp8Scores.create, self.cluster)
        softmax = partial(TileSoftmax.create, keeps_maximum=True)
        LatentSm90ScoreRole(scores, DenseDecodeSm90EndMask(), DenseDecodeRowScale(FP8), softmax).run(operands, smem, thread)

    def output(self, operands: DenseDecodeOperands, smem: DenseDecodeSm90Fp8Smem, thread: Int32, side: Int32) -> None:
        """Write the rows of ones, and run the output role."""
        write_ones(smem, thread, side)
        LatentSm90OutputRole(DenseDecodeSm90Fp8Output.create, self.dtype).run(operands, smem, thread, side)


class DenseDecodeSm90Fp8LoadRole:
    """One warp: TMA of the key tiles. cluster: CTAs that share them."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: DenseDecodeSm90Fp8Smem):
        """Wait keys_free. Signal kv_ready, rope_ready."""
        tiles_done = for_each_tile(operands, partial(self.load_tile, operands, smem))
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.cluster > 1):
            for i in cutlass.range(STAGES, unroll=1):
                smem.keys_free.producer_acquire(tiles_done + i)

    @cute.jit
    def load_tile(self, operands: DenseDecodeOperands, smem: DenseDecodeSm90Fp8Smem, box: LaneBox, tile: Int32):
        """Load the tile-th tile of this CTA: all of it, with zeros where the request has no page."""
        where = (operands.kv_head(), box.row, box.page)
        offset = box.offset * BOX_COLUMNS
        smem.keys_free.producer_acquire(tile)
        for i in cutlass.range_constexpr(LATENT_BOXES):
            target = smem.sKv.iterator + (smem.kv_ready.stage(i, tile) * BOX_BYTES + offset)
            self.load_boxes(operands.args.kv_map, target, (i * BOX_COLUMNS, *where), smem.kv_ready.box(i).barrier(tile), box, i % 2)
        target = smem.sRope.iterator + (smem.rope_ready.stage(tile) * BOX_BYTES + offset)
        self.load_boxes(operands.args.kv_map, target, (D_LATENT, *where), smem.rope_ready.barrier(tile), box, tile % 2)

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
