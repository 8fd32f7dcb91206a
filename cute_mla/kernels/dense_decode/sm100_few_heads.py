"""Dense MLA decode on Blackwell with keys on M: up to 64 query rows of e4m3 over an e4m3 cache, up to 16 of bf16 over a bf16 cache.

The formulas of sm100_fp8.py and sm100.py. A CTA works alone on each piece of a request, and walks tiles of 64 keys:

    S^T [64 keys x rows] = K Q^T        O^T [512 columns x rows] += V^T P^T        rows: 16, 32 or 64 on N

Roles (384 threads, 512 with 64 rows):
  score   warps 0..3, with 64 rows two groups of four that have 32 rows each: softmax over the lanes, P to shared memory
  output  the next four: rescale of O^T, epilogue, lse
  load    a warp: TMA of all columns of a tile's keys
  query   a warp: Q to shared memory, a work tile ahead where there is room
  scores, values   a warp each: products S^T; products O^T and sums of e4m3 P

A stage has 512 bytes of latent columns of 64 keys: all of e4m3 keys, with their RoPE columns, or half of those of 16 bits. RoPE columns of
16 bits have a ring of 3 tiles, and so have P and rescale factors where the table says [5, 3].

Pipelines (producer -> consumer; arrivals per phase):
  kv_ready[5]      load -> scores          1 and the bytes
  kv_free[5]       values, with 16 bits scores, too -> load, output   1 or 2: products with the stage are done
  query_ready[2]   query -> scores         1: Q of a work tile; with 64 rows there is one
  query_free[2]    scores -> query         1: the last S^T of a work tile is done
  scores_ready[2]  scores -> score         1: S^T of a tile
  scores_free[2]   score -> scores         4, of each group
  alpha_ready[5, 3]   score -> output      1, of each group: rescale factors
  probs_ready[5, 3]   score -> values      4, of each group: P, over the RoPE columns of its tile
  output_ready[5, 3]  output -> values        4: O^T is scaled; of a work tile's first tile, O^T of the one before has been read
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
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..definition import KernelDefinition
from ..primitives.copies import load_box, prefetch_line
from ..primitives.rows import load_or_one
from ..sm100.config import BOX_BYTES, ROW_BYTES
from ..sm100.few_heads_cta import PART_BOXES, STAGES, FewHeadsGeometrySm100, FewHeadsSm100Kernel, FewHeadsSmemSm100
from ..sm100.few_heads_output import FewHeadsOutputRoleSm100
from ..sm100.few_heads_products import FewHeadsQueryRoleSm100, FewHeadsScoresRoleSm100, FewHeadsValuesRoleSm100
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
            smem.kv_free.producer_acquire(tiles * smem.geometry.parts + i)

    @cute.jit
    def load_tile(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, box: LaneBox, tile: Int32):
        """Load the tile-th tile, with zeros where the request has no page."""
        geometry, columns = smem.geometry, ROW_BYTES // smem.geometry.element_bytes
        for part in cutlass.range_constexpr(geometry.parts):
            number = tile * geometry.parts + part
            ready = smem.kv_ready.barrier(number)
            has_rope = part == 0
            smem.kv_free.producer_acquire(number)
            if cute.arch.lane_idx() == 0:
                nbytes = PART_BOXES * BOX_BYTES + (geometry.rope_box_bytes if has_rope else 0)
                cute.arch.mbarrier_arrive_and_expect_tx(ready, nbytes)
            cute.arch.sync_warp()
            if box.in_tile:
                stage, where = smem.part(tile, part), (operands.kv_head(), box.row, box.page)
                for i in cutlass.range_constexpr(PART_BOXES):
                    column = (part * PART_BOXES + i) * columns
                    load_box(stage + (i * BOX_BYTES + box.offset * ROW_BYTES), operands.args.kv_map, (column, *where), ready)
                if cutlass.const_expr(has_rope):
                    rope_map = operands.args.kv_map if cutlass.const_expr(geometry.rope_bytes == ROW_BYTES) else operands.args.rope_map
                    load_box(smem.rope(tile) + box.offset * geometry.rope_bytes, rope_map, (D_LATENT, *where), ready)


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
        super().__init__(abi, arch, FewHeadsGeometrySm100(config.few_rows, abi.query_dtype.width // 8))
        self.operand_dtype, self.types = abi.query_dtype, config.operands

    def tensor_maps(self, operands: DenseDecodeOperands) -> tuple:
        """Return the maps of the cache."""
        return (operands.args.kv_map, operands.args.rope_map) if self.types == FP8 else (operands.args.kv_map,)

    def score(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, tmem: Int32) -> None:
        """Run the score role."""
        row_scale = DenseDecodeRowScale(self.types)
        FewHeadsScoreRoleSm100(self.operand_dtype).run(operands.with_descales(row_scale), smem, tmem)

    def output(self, operands: DenseDecodeOperands, smem: FewHeadsSmemSm100, tmem: Int32) -> None:
        """Run the output role."""
        row_scale = DenseDecodeRowScale(self.types, load_or_one(operands.args.descale_k) if self.types == FP8 else None)
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
    return DenseDecodeFewHeadsSm100(config, arch).complete()
