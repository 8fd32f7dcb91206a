"""Dense MLA decode on Blackwell for up to 64 query rows, with e4m3 queries and an e4m3 cache, keys on M.

The formula of sm100_fp8.py. A CTA works alone on each piece of a request, and walks tiles of 64 keys:

    S^T [64 keys x rows] = K Q^T        O^T [512 columns x rows] += V^T P^T        rows: 16, 32 or 64 on N

Roles (384 threads, 512 with 64 rows):
  score   warps 0..3, with 64 rows two groups of four that have 32 rows each: softmax over the lanes, P to shared memory
  output  the next four: rescale of O^T, epilogue, lse
  load    a warp: TMA of all columns of a tile's keys
  query   a warp: Q to shared memory, a work tile ahead where there is room
  scores, values   a warp each: products S^T; products O^T and sums of P

Pipelines (producer -> consumer; arrivals per phase):
  kv_ready[5]      load -> scores          1 and the bytes
  kv_free[5]       values -> load, output  1: O^T of the tile is done
  query_ready[2]   query -> scores         1: Q of a work tile; with 64 rows there is one
  query_free[2]    scores -> query         1: the last S^T of a work tile is done
  scores_ready[2]  scores -> score         1: S^T of a tile
  scores_free[2]   score -> scores         4, of each group
  alpha_ready[5]   score -> output         1, of each group: rescale factors
  probs_ready[5]   score -> values         4, of each group: P, over the RoPE columns of its tile
  output_ready[5]  output -> values        4: O^T is scaled; of a work tile's first tile, O^T of the one before has been read
  stats_ready, stats_free   score -> output, and back   4 of each group, 4: what the softmax of a work tile has come to

The trick: S^T and O^T take K as operand A, whose 64 or 128 rows fill the tensor cores whatever the number of query rows, and O^T reads
the same bytes of K transposed. So products take half of the clocks in which HBM brings a tile, and each SM has pieces of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import cutlass
from cutlass import Int32, Uint32, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8, DenseDecodeConfig
from ...spec.mla import D_LATENT, D_ROPE
from ...spec.split_plan import TILE_KEYS
from ..definition import KernelDefinition
from ..primitives.copies import load_box, prefetch_line
from ..primitives.rows import load_or_one
from ..sm100.config import BOX_BYTES, ROW_BYTES
from ..sm100.few_heads_cta import BOXES, ROPE_OFFSET, STAGE_BYTES, STAGES, FewHeadsGeometrySm100, FewHeadsSm100Kernel, FewHeadsSmemSm100
from ..sm100.few_heads_output import FewHeadsOutputRoleSm100
from ..sm100.few_heads_products import PRODUCTS, FewHeadsQueryRoleSm100, FewHeadsScoresRoleSm100, FewHeadsValuesRoleSm100
from ..sm100.few_heads_score import FewHeadsScoreRoleSm100
from .abi import DenseDecodeAbi
from .operands import DenseDecodeOperands, DenseDecodeRowScale, LaneBox
from .page_walk import for_each_tile_in_groups


@dataclass(frozen=True)
class FewHeadsLoadRole:
    """One warp."""

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100):
        """Wait kv_free. Signal kv_ready."""
        tiles = for_each_tile_in_groups(operands, partial(self.load_tile, operands, smem))
        cute.arch.griddepcontrol_launch_dependents()
        # no commit may reach a CTA that is gone
        for i in cutlass.range(STAGES, unroll=1):
            smem.kv_free.producer_acquire(tiles + i)

    @cute.jit
    def load_tile(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, box: LaneBox, tile: Int32):
        """Load the tile-th tile, with zeros where the request has no page."""
        ready = smem.kv_ready.barrier(tile)
        smem.kv_free.producer_acquire(tile)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, STAGE_BYTES)
        cute.arch.sync_warp()
        if box.in_tile:
            stage, where = smem.stage(tile), (operands.kv_head(), box.row, box.page)
            for i in cutlass.range_constexpr(BOXES):
                load_box(stage + (i * BOX_BYTES + box.offset * ROW_BYTES), operands.args.kv_map, (i * ROW_BYTES, *where), ready)
            load_box(stage + (ROPE_OFFSET + box.offset * D_ROPE), operands.args.rope_map, (D_LATENT, *where), ready)


@cute.jit
def prefetch_pages(operands: DenseDecodeOperands):
    """Ask L2 for the entries of the block table that the load role begins with. One warp."""
    req, begin_tile = operands.schedule.first_work_tile()
    lane = cute.arch.lane_idx()
    key = begin_tile * TILE_KEYS + lane * (cute.arch.WARP_SIZE * operands.box_keys() - 1)
    if (lane < 2) & (req <= operands.schedule.last_request()) & (Uint32(key) < Uint32(operands.args.max_keys)):
        entry, _ = operands.page_entry(key)
        prefetch_line(operands.table_row(req) + entry)


class DenseDecodeFewHeadsSm100(FewHeadsSm100Kernel):
    """One variant of the kernel."""

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        abi = DenseDecodeAbi(config)
        super().__init__(abi, arch, FewHeadsGeometrySm100(config.few_rows))
        self.operand_dtype = abi.query_dtype

    def tensor_maps(self, operands: DenseDecodeOperands) -> tuple:
        """Return the maps of the cache."""
        return operands.args.kv_map, operands.args.rope_map

    def score(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, tmem: Int32) -> None:
        """Run the score role."""
        FewHeadsScoreRoleSm100(self.operand_dtype).run(operands.with_descales(DenseDecodeRowScale(FP8)), smem, tmem)

    def output(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, tmem: Int32) -> None:
        """Run the output role."""
        row_scale = DenseDecodeRowScale(FP8, load_or_one(operands.args.descale_k))
        FewHeadsOutputRoleSm100(self.dtype, row_scale).run(operands, smem, tmem)

    def load(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, tmem: Int32) -> None:
        """Run the load role."""
        FewHeadsLoadRole().run(operands, smem)

    def query(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, tmem: Int32) -> None:
        """Run the query role."""
        FewHeadsQueryRoleSm100().run(operands, smem)

    def scores(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, tmem: Int32) -> None:
        """Run the role that multiplies K Q^T."""
        FewHeadsScoresRoleSm100(self.operand_dtype).run(operands, smem, tmem)

    def values(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, tmem: Int32) -> None:
        """Run the role that multiplies V^T P^T, which has time to ask for the first pages."""
        prefetch_pages(operands)
        FewHeadsValuesRoleSm100(self.operand_dtype).run(operands, smem, tmem)


def build_few_heads(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return DenseDecodeFewHeadsSm100(config, arch).complete(PRODUCTS)
