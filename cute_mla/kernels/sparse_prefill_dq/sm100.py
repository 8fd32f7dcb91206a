"""dQ of sparse prefill on Blackwell, and the gradients of its scores.

For every query token and head r, over the rows j that the token's indices name and that exist:

    p_rj = exp(scale <q_r, k_j> - lse'_r)    dS_rj = p_rj (<dout_r, k_j[:512]> - delta'_r)    dq_r = scale sum_j dS_rj k_j

Up to 64 heads: a CTA works alone on each query token. It takes the tokens z, z + grid z and so on of a chunk, 64 indices (one tile) at a
time. Where Q, S and dQ lie, and which half of the columns a stage's half has: ../sm100/heads64.py.

Roles (512 threads):
  score    warps 0..3: P and dS: to memory, dS to shared memory
  output   warps 4..7: Q of the next token to tensor memory; dQ of a token to memory
  gather   warps 8..11: cp.async of the keys, 16 keys a warp; a bit per key
  mma      warp 12: S = Q K^T, dP = dO V^T, dQ += dS K
  dout     warp 13: TMA of dO of a token

Pipelines (producer -> consumer; arrivals per phase). left: columns 0..255 of a tile's keys, kv: the others:
  left_ready[2]   gather -> mma            4
  kv_ready[2]     gather -> mma            4
  left_free[2]    mma -> gather            2: dQ has read the columns; the bits have been read
  kv_free[2]      mma -> gather, score     1: dQ has read the others, and dS
  seen_ready[2]   gather -> score, and by way of left_ready mma   4: a bit per key of the stage
  query_ready     output -> mma            4: Q of a token is in tensor memory
  query_free      mma -> output            1: the token's last S is complete
  dout_ready      dout -> mma              1 and the bytes of dO of a token
  dout_free       mma -> dout              1: the token's last dP is complete
  scores_ready    mma -> score             1: S of a tile
  scores_free     score -> mma             4
  dprobs_ready    mma -> score             1: dP of a tile
  dprobs_free     score -> mma             4
  dscores_ready   score -> mma             4: dS of a tile is in shared memory
  dq_ready        mma, score -> output     2: dQ of a token is complete; whether any of its tiles has keys has been written
  dq_free         output -> mma            4

The trick: products go in the order S of a tile, dQ of the tile before, dP of the tile, so that exponentials run under dQ and dS is made
under the next S. dP takes the lanes of the second half of S, while the first half of the next S takes the others: so the tensor cores
wait for no load of scores, and Q fits into tensor memory beside dQ. A tile without any key is passed by. README.md has the clocks.

More than 64 heads: a pair of CTAs holds 64 heads each of a token. Each gathers half of the columns of all keys of a tile, for S and dQ, and
all latent columns of half of the keys, for dP (sm100_pair_gather.py). Roles as above, mma in the even CTA; S in two parts, of 48 and of 16
keys, in tensor memory as in ../sparse_prefill/sm100.py. The score role swaps its sums by halves of 32 keys. What the mma role waits for
comes from both CTAs, and what it commits goes to both:

  kv_ready[3]       gather -> mma           8: the CTAs' columns of all keys
  kv_free[3]        score -> gather         4: dS of the next tile is in shared memory, behind its dP, which came after dQ of this tile;
                                            and in the even CTA one of mma, when the bits have been read
  value_ready       gather -> mma           8: the CTAs' keys, for dP
  value_free[2]     mma -> gather           1: dP has read half of their columns
  seen_ready[3]     gather -> score         4, and by way of kv_ready mma
  scores_ready[2]   mma -> score            1: a part of S
  scores_free       score -> mma            8: both parts have been read
  dout_ready[2]     dout -> mma             1 and the bytes of both CTAs: half of the columns of dO
  dout_free[2]      mma -> dout             1
  query_ready, dprobs_free, dscores_ready, dq_free   8;  the others as above

The trick: dP takes 16 columns of its own and those of the second part of S, so that the first part of the next S runs until dP has been
loaded. Copies of keys are started when dS is stored, so that they take their turns of shared memory while the tensor cores wait for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.mla import D_LATENT
from ...spec.sparse_prefill import SparsePrefillConfig
from ..attention.cta import Arrivals
from ..definition import KernelDefinition
from ..sm100.config import EVEN_CTA, GROUP_WARPS, PAIR
from ..sm100.kernel import LatentKernelSm100, LatentRegistersSm100
from ..sm100.score import LatentQueriesSm100
from ..sparse_prefill.sm100_output import TokenQueries
from .abi import DqOperands, SparsePrefillDqAbi
from .sm100_config import GEOMETRY, PAIR_GEOMETRY, DqSm100Geometry, DqSm100Smem, arrivals
from .sm100_load import DqSm100DoutRole, DqSm100GatherRole
from .sm100_mma import DqSm100Gemm, DqSm100MmaRole, DqSm100PairGemm, DqSm100PairMmaRole
from .sm100_output import DqSm100OutputRole
from .sm100_pair_gather import DqSm100PairGatherRole
from .sm100_score import DqSm100PairRows, DqSm100Rows, DqSm100ScoreRole

ONE_CTA = 1  # a multiprocessor; else ptxas ignores setmaxnreg


class DqSm100Kernel(LatentKernelSm100):
    """Kernel of either form: the roles that a geometry suffices to tell apart."""

    registers = LatentRegistersSm100(None, 240, 96, 48)  # more for output, which holds a row of Q
    smem_type = DqSm100Smem
    create_rows: Any
    gather_role: Any

    def __init__(self, config: SparsePrefillConfig, arch: Arch, geometry: DqSm100Geometry) -> None:
        super().__init__(SparsePrefillDqAbi(config, ONE_CTA), arch, geometry, geometry.layout(), has_rope=config.d_qk > D_LATENT)

    @cute.jit
    def run_mma(self, operands: DqOperands, smem: DqSm100Smem, tmem: Int32, warp: Int32):
        """Run the roles mma and dout in their warps."""
        if warp == self.mma_warp + 1:
            DqSm100DoutRole().run(operands, smem)
        elif warp == self.mma_warp and (not self.geometry.paired or cute.arch.block_idx_in_cluster() == EVEN_CTA):
            self.mma_role.run(operands, smem, self.gemm(self.dtype, self.has_rope, smem, tmem))

    def tensor_maps(self, operands: DqOperands) -> tuple[Any, ...]:
        """Return the map of dO. That of Q is the Hopper kernel's."""
        return (operands.args.dout_map,)

    def score_role(self) -> DqSm100ScoreRole:
        """Return the score role."""
        return DqSm100ScoreRole(self.dtype, self.create_rows)

    def output_role(self) -> DqSm100OutputRole:
        """Return the output role."""
        return DqSm100OutputRole(self.dtype, TokenQueries(LatentQueriesSm100(self.geometry, self.has_rope)))

    def producer_role(self, smem: DqSm100Smem) -> Any:
        """Return the gather role."""
        return self.gather_role(self.has_rope)

    def arrivals(self, smem: Any) -> tuple[Arrivals, ...]:
        """Return the arrivals of every barrier."""
        return arrivals(smem, self.kv_releases)

    def built(self) -> KernelDefinition:
        """Return the variant, ready to compile."""
        definition = super().built()
        return replace(definition, roles=(*definition.roles, Role("dout", self.mma_warp + 1, 1)))


class SparsePrefillDqSm100(DqSm100Kernel):
    """One variant of the kernel of a pair of CTAs."""

    create_rows = DqSm100PairRows.create
    gather_role = DqSm100PairGatherRole
    mma_role = DqSm100PairMmaRole()
    gemm = DqSm100PairGemm

    @staticmethod
    def kv_releases() -> Int32:
        """Return the arrivals of kv_free: the score role, and in the even CTA the mma role, which has read the bits."""
        return GROUP_WARPS + cutlass.select_(cute.arch.block_idx_in_cluster() == EVEN_CTA, Int32(1), Int32(0))


class SparsePrefillDqHeads64Sm100(DqSm100Kernel):
    """One variant of the kernel of a CTA that works alone."""

    named_barriers = ()
    create_rows = DqSm100Rows.create
    gather_role = DqSm100GatherRole
    mma_role = DqSm100MmaRole()
    gemm = DqSm100Gemm
    kv_releases = 2  # of left_free: a commit, and the mma role, which has read the bits


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    if config.cluster == PAIR:
        return SparsePrefillDqSm100(config, arch, PAIR_GEOMETRY).built()
    return SparsePrefillDqHeads64Sm100(config, arch, GEOMETRY).built()
