"""Dense MLA decode on Blackwell.

This file is the kernel of a 16-bit cache. sm100_fp8.py is that of an e4m3 cache and e4m3 queries; sm100_convert.py has the columns of an
e4m3 cache that are converted.

For every request and every query row r = (query token i, head) of one KV head, over the keys j that the row sees:

    s_rj = <q_r, k_j> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A pair of CTAs holds 128 query rows, 64 each, and walks the work tiles of one partition, 64 keys (one tile) at a time.
Each CTA holds all keys of the tile but half of their columns: latent columns 256 c .. + 255 and RoPE columns 32 c .. + 31
of CTA c, which are also the value columns that it multiplies.

Roles of a CTA (384 threads):
  score   warps 0..3: softmax, P to shared memory, lse
  output  warps 4..7: Q of the next work tile to tensor memory, rescale of O, epilogue
  load    warp 8: TMA of this CTA's columns, page by page
  mma     warp 9, of the even CTA: S = Q K^T and O += P V for both
  scout   warp 10: work tiles ahead of the others (../sm100/scout.py)

Tensor memory: O in 256 columns, Q in 144, S in 96. A lane is a query row; the lanes 0..63 and 64..127 are the same rows.
Shared memory: 5 stages of 64 keys x 256 latent columns and, in a box of its own, the RoPE columns.

Pipelines (producer -> consumer; arrivals per phase). Barriers that the mma role waits for count in the even CTA; what it
commits arrives in both:
  kv_ready[5]      load -> mma             1 and the bytes of four boxes and a half from each CTA
  kv_free[5]       mma -> load, output     1: P V of the tile is done, so O is complete up to it
  query_ready      output -> mma           8: Q of a work tile is in tensor memory; the last S of the one before is done
  scores_ready[3]  mma -> score            1: 32 keys of S, lower and upper half of a tile in turn
  scores_free[3]   score -> mma            8: they are in registers
  alpha_ready[2]   score -> output         2: rescale factors; the two warps that have the upper keys send none
  probs_ready[2]   score -> mma            8: P is written, keys past the end are cleared
  output_ready[2]  output -> mma           8: O is scaled, or read out
  stats_ready      score -> output         4: 1 / row sum, once per work tile
  stats_free       output -> score         4
  work_ready[4], work_free[4], pages_asked: ../sm100/scout.py

With 256 + 64 columns two groups of score warps take tiles in turn (512 threads; ../sm100/alternating.py): 7 stages, S of two tiles, S two
tiles ahead of P V, 3 stages where the table says 2, and 2 for the scores, each of a whole tile.

With 1,024 + 64 columns the CTAs of a cluster divide the columns of 64 rows, and each multiplies for itself: ../sm100/column_pair.py.

The trick: every byte of the cache is fetched once per pair. In a product of 64 rows a CTA, the lower lanes multiply with the
operand of the even CTA and the upper lanes with that of the odd one. With Q in tensor memory the two halves of the lanes can
hold different columns of the same rows, so each CTA contributes its half of the columns of K to every score, and the same
bytes, read transposed, are the half of V that it has to provide. The score role adds the two halves. README.md has the
clocks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.dense_decode import FP8, FP8_CACHE, LATENT, DenseDecodeConfig
from ..attention.cta import Arrivals
from ..definition import KernelDefinition
from ..primitives.smem import SmemLayout
from ..sm100 import column_pair
from ..sm100.alternating import NAMED_BARRIERS, AlternatingRowsSm100
from ..sm100.config import SIXTEEN_BIT, LatentGeometrySm100, LatentSmemSm100
from ..sm100.gather import LatentGatherRoleSm100
from ..sm100.kernel import TWO_GROUPS, LatentKernelSm100, LatentRegistersSm100, set_registers
from ..sm100.output import LatentOutputRoleSm100
from ..sm100.score import LatentQueriesSm100, LatentRowsSm100, LatentScoreRoleSm100
from ..sm100.scout import work_fields
from .abi import DenseDecodeAbi
from .operands import DenseDecodeOperands, DenseDecodeRowScale
from .sm100_convert import PagedKeys, converted_columns
from .sm100_few_heads import build_few_heads
from .sm100_fp8 import DenseDecodeFp8Sm100
from .sm100_load import ColumnPairGemm, ColumnPairLoadRole, DenseDecodeGemmSm100, DenseDecodeLoadRoleSm100
from .sm100_mask import DenseDecodeMaskSm100


class DenseDecodeSm100(LatentKernelSm100):
    """One variant of the kernel of a 16-bit cache."""

    producer = "load"
    producer_warps = 1
    kv_arrivals = 1
    gemm: Any = DenseDecodeGemmSm100
    scouted = True
    load_role = DenseDecodeLoadRoleSm100

    def __init__(self, config: DenseDecodeConfig, arch: Arch) -> None:
        abi = DenseDecodeAbi(config)
        geometry, layout = self.geometry_and_layout(config.dims.latent)
        super().__init__(abi, arch, geometry, layout, has_rope=config.dims.rotary > 0)
        self.queries = LatentQueriesSm100(geometry, self.has_rope)
        self.descales = DenseDecodeRowScale(LATENT)
        self.alternates = geometry.score_groups > 1
        self.registers = TWO_GROUPS if self.alternates else LatentRegistersSm100()
        if self.alternates:
            self.named_barriers = NAMED_BARRIERS

    def geometry_and_layout(self, latent: int) -> tuple[LatentGeometrySm100, SmemLayout]:
        """Return the geometry of so many latent columns, and the layout of shared memory."""
        geometry = LatentGeometrySm100.of(latent)
        return geometry, geometry.smem(*work_fields())

    @cute.jit
    def run_others(self, operands: DenseDecodeOperands, smem: LatentSmemSm100, tmem: Int32, warp: Int32):
        """Give the roles load, mma and scout a warp each."""
        set_registers(self.registers.mma)
        if warp == self.geometry.load_warp:
            self.load_role(self.has_rope, self.queries.row_bytes()).run(operands, smem)
        self.run_scout(operands, warp)
        self.run_mma(operands, smem, tmem, warp)

    def tensor_maps(self, operands: DenseDecodeOperands) -> tuple:
        """Return the maps of the cache."""
        return (operands.args.kv_map, operands.args.rope_map) if self.has_rope else (operands.args.kv_map,)

    def score_role(self) -> LatentScoreRoleSm100:
        """Return the score role: where a softmax takes longer than the products of a tile, two groups of warps take tiles in turn."""
        rows = AlternatingRowsSm100.create if self.alternates else LatentRowsSm100.create
        return LatentScoreRoleSm100(self.dtype, DenseDecodeMaskSm100(clears_unused=True), self.descales, create_rows=rows)


class DenseDecodeColumnPairSm100(DenseDecodeSm100):
    """The kernel of 1,024 latent columns, which two CTAs divide (../sm100/column_pair.py)."""

    clustered = True
    smem_type = column_pair.ColumnPairSmem
    mma_role = column_pair.ColumnPairMmaRole()
    gemm = ColumnPairGemm
    load_role = ColumnPairLoadRole
    named_barriers = ()

    def geometry_and_layout(self, latent: int) -> tuple[LatentGeometrySm100, SmemLayout]:
        """Return geometry and layout of a CTA that has a part of the columns."""
        return column_pair.GEOMETRY, column_pair.GEOMETRY.layout(*work_fields())

    def score_role(self) -> LatentScoreRoleSm100:
        """Return the score role of half of the rows."""
        return replace(super().score_role(), create_rows=column_pair.ColumnPairRows.create)

    def output_role(self) -> LatentOutputRoleSm100:
        """Return the output role, which releases weights in both CTAs."""
        return column_pair.ColumnPairOutputRole(self.dtype, self.queries)

    def arrivals(self, smem: Any) -> tuple[Arrivals, ...]:
        """Return the arrivals of every barrier."""
        return *self.work_arrivals(smem), *column_pair.column_pair_arrivals(smem)


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


def build(config: DenseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    if config.few_heads:
        return build_few_heads(config, arch)
    if config.column_ctas > 1:
        return DenseDecodeColumnPairSm100(config, arch).built()
    kernels = {LATENT: DenseDecodeSm100, FP8_CACHE: DenseDecodeFp8CacheSm100, FP8: DenseDecodeFp8Sm100}
    return kernels[config.operands](config, arch).built()
