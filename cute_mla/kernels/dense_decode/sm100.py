"""Dense MLA decode on Blackwell. sm100_convert.py has the columns of an e4m3 cache that are converted.

For every request and every query row r = (query token i, head) of one KV head, over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A pair of CTAs holds 128 query rows, 64 each, and walks the work tiles of one partition, 64 keys (one tile) at a time.
Each CTA holds all keys of the tile but half of their columns: latent columns 256 c .. + 255 and RoPE columns 32 c .. + 31
of CTA c, which are also the value columns that it multiplies.

Roles of a CTA (384 threads):
  score   warps 0..3: Q to tensor memory, softmax, P to shared memory, lse
  output  warps 4..7: rescale of O, epilogue
  load    warp 8: TMA of this CTA's columns, page by page
  mma     warp 9, of the even CTA: S = Q K^T and O += P V for both

Tensor memory: O in 256 columns, Q in 144, S in 64. A lane is a query row; the lanes 0..63 and 64..127 are the same rows.
Shared memory: 5 stages of 64 keys x 256 latent columns and, in a box of its own, the RoPE columns.

Pipelines (producer -> consumer; arrivals per phase). Barriers that the mma role waits for count in the even CTA; what it
commits arrives in both:
  kv_ready[5]      load -> mma             1 and the bytes of five boxes from each CTA
  kv_free[5]       mma -> load, output     1: P V of the tile is done, so O is complete up to it
  query_ready      score -> mma            8: Q of a work tile is in tensor memory
  scores_ready[2]  mma -> score            1: 32 keys of S, lower and upper half of the tile
  scores_free[2]   score -> mma            8: they are in registers
  alpha_ready[2]   score -> output         2: rescale factors; the two warps that have the upper keys send none
  probs_ready[2]   score -> mma            8: P is written, keys past the end are cleared
  output_ready[2]  output -> mma           8: O is scaled, or read out
  stats_ready      score -> output         4: 1 / row sum, once per work tile
  stats_free       output -> score         4

With e4m3 operands all is the same but for what the half of the bytes brings about: 7 stages of two latent boxes, Q in 72
columns of tensor memory, two groups of score warps that take tiles in turn (512 threads, S of two tiles, S two tiles ahead of
P V; ../sm100/alternating.py), 3 stages where the table says 2, and 2 for the scores, each of a whole tile. P is e4m3, too: its reference
follows every tile, and what O is divided by is the sum of P as it was rounded, which the tensor cores add up as P times ones.

The trick: every byte of the cache is fetched once per pair. In a product of 64 rows a CTA, the lower lanes multiply with the
operand of the even CTA and the upper lanes with that of the odd one. With Q in tensor memory the two halves of the lanes can
hold different columns of the same rows, so each CTA contributes its half of the columns of K to every score, and the same
bytes, read transposed, are the half of V that it has to provide. The score role adds the two halves. README.md has the
clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import cutlass
from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8_CACHE, DenseDecodeConfig
from ..definition import KernelDefinition
from ..primitives.copies import pair_box
from ..sm100.alternating import NAMED_BARRIERS, AlternatingRowsSm100
from ..sm100.config import BOX_BYTES, CTA_ROPE, EVEN_CTA, PAIR, ROW_BYTES, SIXTEEN_BIT, LatentGeometrySm100, LatentSmemSm100
from ..sm100.gather import LatentGatherRoleSm100
from ..sm100.kernel import LatentKernelSm100, LatentRegistersSm100, set_registers
from ..sm100.score import LatentQueriesSm100, LatentRowsSm100, LatentScoreRoleSm100
from .abi import DenseDecodeAbi
from .operands import DenseDecodeOperands, DenseDecodeRowScale, LaneBox
from .page_walk import for_each_tile_in_groups
from .sm100_convert import PagedKeys, converted_columns
from .sm100_mask import DenseDecodeMaskSm100

TWO_GROUPS = LatentRegistersSm100(136, 160, 80, 80)  # of score warps: score and output take registers of the others


class DenseDecodeSm100(LatentKernelSm100):
    """One variant of the kernel whose products take the operands as they are: 16-bit or e4m3."""

    producer = "load"
    producer_warps = 1
    kv_arrivals = 1

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        abi = DenseDecodeAbi(config)
        geometry = LatentGeometrySm100.of(abi.query_dtype, config.dims.latent)
        super().__init__(abi, arch, geometry, geometry.smem(), has_rope=config.dims.rotary > 0)
        self.descales = DenseDecodeRowScale(config.operands)
        self.operand_dtype = abi.query_dtype
        self.alternates = geometry.score_groups > 1
        self.registers = TWO_GROUPS if self.alternates else LatentRegistersSm100()
        if self.alternates:
            self.named_barriers = NAMED_BARRIERS

    @cute.jit
    def run_others(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, tmem: Int32, warp: Int32):
        """Give the roles load and mma a warp each."""
        set_registers(self.registers.mma)
        if warp == self.geometry.load_warp:
            DenseDecodeLoadRoleSm100(self.has_rope).run(operands, smem)
        else:
            self.run_mma(operands, smem, tmem, warp)

    def tensor_maps(self, operands: DenseDecodeOperands) -> tuple:
        """Return the map of the cache."""
        return (operands.args.kv_map,)

    def prepare(self, operands: DenseDecodeOperands) -> DenseDecodeOperands:
        """Return operands with the scales of q and cache."""
        return operands.with_descales(self.descales)

    def score_role(self) -> LatentScoreRoleSm100:
        """Return the score role: where a softmax takes longer than the products of a tile, two groups of warps take tiles in turn."""
        queries = LatentQueriesSm100(self.geometry, self.has_rope)
        rows = AlternatingRowsSm100.create if self.alternates else LatentRowsSm100.create
        return LatentScoreRoleSm100(self.operand_dtype, DenseDecodeMaskSm100(clears_unused=True), self.descales, queries, rows)


class DenseDecodeFp8CacheSm100(LatentKernelSm100):
    """One variant of the kernel of an e4m3 cache and 16-bit queries."""

    producer = "convert"

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        super().__init__(DenseDecodeAbi(config), arch, SIXTEEN_BIT, SIXTEEN_BIT.smem(), has_rope=True)
        self.descales = DenseDecodeRowScale(FP8_CACHE)

    def run_score(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, tmem: Int32) -> None:
        """Run the score role, which alone takes the scale of the cache."""
        role = LatentScoreRoleSm100(
            self.dtype, DenseDecodeMaskSm100(clears_unused=False), self.descales, LatentQueriesSm100(self.geometry, self.has_rope)
        )
        role.run(operands.with_descales(self.descales), smem, tmem)

    def producer_role(self, smem: LatentSmemSm100) -> LatentGatherRoleSm100:
        """Return the convert role."""
        return LatentGatherRoleSm100(partial(converted_columns, self.dtype), PagedKeys())


@dataclass(frozen=True)
class DenseDecodeLoadRoleSm100:
    """One warp: TMA of this CTA's columns, page by page."""

    has_rope: bool

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: LatentSmemSm100):
        """Wait kv_free. Signal kv_ready."""
        tiles_done = for_each_tile_in_groups(operands, partial(self.load_tile, operands, smem))
        cute.arch.griddepcontrol_launch_dependents()
        # no signal may reach a CTA that is gone
        for i in cutlass.range(smem.geometry.kv_stages, unroll=1):
            smem.kv_free.producer_acquire(tiles_done + i)

    @cute.jit
    def load_tile(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, box: LaneBox, tile: Int32):
        """Load this CTA's columns of the tile-th tile: of all keys, with zeros where the request has no page."""
        geometry, rank = smem.geometry, cute.arch.block_idx_in_cluster()
        ready = smem.kv_ready.barrier(tile)
        smem.kv_free.producer_acquire(tile)
        if rank == EVEN_CTA and cute.arch.lane_idx() == 0:
            # without RoPE columns the last box is for P alone
            boxes = geometry.latent_boxes + (1 if self.has_rope else 0)
            cute.arch.mbarrier_arrive_and_expect_tx(ready, PAIR * boxes * BOX_BYTES)
        cute.arch.sync_warp()
        if box.in_tile:
            where = (operands.kv_head(), box.row, box.page)
            target = smem.stage(smem.kv_ready.stage(tile)) + box.offset * ROW_BYTES
            columns = ROW_BYTES // geometry.element_bytes
            for i in cutlass.range_constexpr(geometry.latent_boxes):
                pair_box(target + i * BOX_BYTES, operands.args.kv_map, (rank * geometry.cta_columns + i * columns, *where), ready)
            # a whole box, although half of it or less is used: its other columns are the peer's, or none
            if cutlass.const_expr(self.has_rope):
                rope = geometry.latent + rank * CTA_ROPE
                pair_box(target + geometry.rope_box * BOX_BYTES, operands.args.kv_map, (rope, *where), ready)


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = DenseDecodeFp8CacheSm100 if config.operands == FP8_CACHE else DenseDecodeSm100
    return kernel(config, arch).built()
