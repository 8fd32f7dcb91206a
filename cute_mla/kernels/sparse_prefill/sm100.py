"""Sparse MLA prefill on Blackwell: each query token attends to its own rows of an unpaged 16-bit latent.

For every query token and head r, over the rows j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]     max_logits_r = max_j scale * s_rj

A pair of CTAs holds the heads of a token, 64 each, and walks every grid-th token, 64 indices (one tile) at a time. Each CTA
gathers its half of the columns of every key, by cp.async: a key is fetched once, as key and as value, for all heads. Roles
and pipelines: ../sm100/gather.py and dense_decode/sm100.py; what differs here:

  kv_free[5]       mma -> gather, output   1, and in the even CTA one more, when the bits have been read
  query_ready      output -> mma           8: Q of a token is in tensor memory, once the last S of the token before is there
  scores_ready[2]  mma -> score, output    1: the output role waits for a token's last S
  output_ready[2]  output -> mma           8: O is scaled; of a token's first tile, O of the token before has been read
  seen_ready[5]    gather -> score, output, and by way of kv_ready mma: a bit per key of the stage

A tile of which no index names a row is passed on by all roles: no copies, no products, no softmax, no rescale. Its barriers
complete as ever, so that use number n of every pipeline remains tile n.

Between two tokens: the first S of the next token is issued before the last P V of this one. Its Q has waited in registers of the output
role, and replaces this token's Q once the last S is there. In variants that load Q by words of fewer than 16 bytes, and where either
token has no tiles, Q is loaded later and S follows P V.

Up to 64 heads: a CTA works alone on each query token. It gathers all columns of every key, and walks every grid-th token, 64 indices
(one tile) at a time. Products, and the trick that lets Q fit: ../sm100/heads64.py.

Roles: as ../sm100/gather.py, mma in every CTA. Pipelines (producer -> consumer; arrivals per phase):
  left_ready[3]    gather -> mma           4: columns 0..255 of a tile's keys
  kv_ready[3]      gather -> mma           4: the other columns
  left_free[3]     mma -> gather, output   2: P V has read columns 0..255, so this half of O is complete; the bits have been read
  kv_free[3]       mma -> gather, output   1: P V has read the others, and P
  seen_ready[3]    gather -> score, output, and by way of left_ready mma   4: a bit per key of the stage
  query_ready      output -> mma           4: Q of a token is in tensor memory, once the last S of the token before is there
  scores_ready     mma -> score, output    1: S of a tile
  scores_free      score -> mma            4
  alpha_ready[2]   score -> output         4: rescale factors
  probs_ready[2]   score -> mma            4: P, over the RoPE columns of its tile
  output_ready[2]  output -> mma           4: O is scaled; of a token's first tile, O of the token before has been read
  stats_ready, stats_free   score -> output, and back   4: what the softmax of a token has come to

A tile of which no index names a row is passed on, as above.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.sparse_prefill import SparsePrefillConfig
from ..attention.cta import Arrivals
from ..definition import KernelDefinition
from ..sm100.config import EVEN_CTA, SIXTEEN_BIT_PARTS
from ..sm100.gather import LatentGatherRoleSm100, latent_columns, rope_columns
from ..sm100.heads64 import HEADS64, Heads64Gemm, heads64_arrivals
from ..sm100.kernel import LatentKernelSm100, LatentRegistersSm100
from ..sm100.score import LatentQueriesSm100, SeenMaskSm100
from .abi import SparsePrefillAbi
from .operands import SparsePrefillOperands
from .sm100_config import SparsePrefillSmemSm100, alone_smem, pair_smem
from .sm100_gather import SkippingTile, SparsePrefillHalvesRoleSm100, SparsePrefillTokenKeys
from .sm100_mma import PairProducts, SparsePrefillMmaRoleSm100, TokenProducts
from .sm100_output import SparsePrefillOutputRoleSm100, TokenQueries
from .sm100_score import Heads64Rows, PairRows, SparsePrefillScoreRoleSm100

ONE_CTA = 1  # unless told that there is a CTA a multiprocessor, ptxas ignores setmaxnreg on Blackwell (C7508)
# more for output, which holds a row of Q
REGISTERS = LatentRegistersSm100(None, 240, 96, 48)


class SparsePrefillSm100(LatentKernelSm100):
    """One variant of the kernel of a pair of CTAs."""

    registers = REGISTERS
    smem_type = SparsePrefillSmemSm100
    mma_role = SparsePrefillMmaRoleSm100(PairProducts())

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(SparsePrefillAbi(config, ONE_CTA), arch, SIXTEEN_BIT_PARTS, pair_smem(), has_rope=config.d_qk > D_LATENT)

    @staticmethod
    def kv_releases() -> Int32:
        """Return the arrivals that free a stage: a commit, and in the even CTA the mma role, which has read the bits.

        Its commits, which arrive in both, order nothing but products.
        """
        return cutlass.select_(cute.arch.block_idx_in_cluster() == EVEN_CTA, Int32(2), Int32(1))

    def score_role(self) -> SparsePrefillScoreRoleSm100:
        """Return the score role."""
        return SparsePrefillScoreRoleSm100(self.dtype, SeenMaskSm100(), create_rows=PairRows.create)

    def output_role(self) -> SparsePrefillOutputRoleSm100:
        """Return the output role."""
        return SparsePrefillOutputRoleSm100(self.dtype, TokenQueries(LatentQueriesSm100(self.geometry, self.has_rope)))

    def producer_role(self, smem: SparsePrefillSmemSm100) -> LatentGatherRoleSm100:
        """Return the gather role."""
        return LatentGatherRoleSm100(self.columns, SparsePrefillTokenKeys())

    def columns(self, rank: Int32) -> SkippingTile:
        """Return the mover of half of the latent columns, and of the RoPE columns after them."""
        runs = (latent_columns(rank), rope_columns(D_LATENT * ELEMENT_BYTES, rank))
        return SkippingTile(runs if self.has_rope else runs[:1])


class SparsePrefillHeads64Sm100(LatentKernelSm100):
    """One variant of the kernel of a CTA that works alone."""

    registers = REGISTERS
    named_barriers = ()
    smem_type = SparsePrefillSmemSm100
    mma_role = SparsePrefillMmaRoleSm100(TokenProducts())
    gemm = Heads64Gemm

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(SparsePrefillAbi(config, ONE_CTA), arch, HEADS64, alone_smem(), has_rope=config.d_qk > D_LATENT)

    @cute.jit
    def run_mma(self, operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, tmem: Int32, warp: Int32):
        """Run the mma role in its warp."""
        if warp == self.mma_warp:
            self.mma_role.run(operands, smem, self.gemm(self.dtype, self.has_rope, smem, tmem))

    def score_role(self) -> SparsePrefillScoreRoleSm100:
        """Return the score role."""
        return SparsePrefillScoreRoleSm100(self.dtype, SeenMaskSm100(), create_rows=Heads64Rows.create)

    def output_role(self) -> SparsePrefillOutputRoleSm100:
        """Return the output role."""
        return SparsePrefillOutputRoleSm100(self.dtype, TokenQueries(LatentQueriesSm100(self.geometry, self.has_rope)))

    def producer_role(self, smem: SparsePrefillSmemSm100) -> SparsePrefillHalvesRoleSm100:
        """Return the gather role."""
        return SparsePrefillHalvesRoleSm100(self.has_rope)

    def arrivals(self, smem: Any) -> tuple[Arrivals, ...]:
        """Return the arrivals of every barrier. left_free: also when the bits have been read."""
        return heads64_arrivals(smem, left_releases=2)


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = SparsePrefillHeads64Sm100 if config.cluster == 1 else SparsePrefillSm100
    return kernel(config, arch).built()
