"""dQ of sparse prefill on Blackwell, and the gradients of its scores.

For every query token and head r, over the rows j that the token's indices name and that exist:

    p_rj = exp(scale <q_r, k_j> - lse'_r)    dS_rj = p_rj (<dout_r, k_j[:512]> - delta'_r)    dq_r = scale sum_j dS_rj k_j

A CTA has 64 heads of a query token. It takes the tokens z, z + grid z and so on of a chunk, 64 indices (one tile) at a time. Where Q, S
and dQ lie, and which half of the columns a stage's half has: ../sm100/heads64.py.

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
  dq_ready        mma -> output            2: dQ of a token is complete; whether there is any has been written
  dq_free         output -> mma            4

The trick: products go in the order S of a tile, dQ of the tile before, dP of the tile, so that exponentials run under dQ and dS is made
under the next S. dP takes the lanes of the second half of S, while the first half of the next S takes the others: so the tensor cores
wait for no load of scores, and Q fits into tensor memory beside dQ. A tile without any key is passed by. README.md has the clocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cutlass import Int32, cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.mla import D_LATENT
from ...spec.sparse_prefill import SparsePrefillConfig
from ..attention.cta import Arrivals
from ..definition import KernelDefinition
from ..sm100.kernel import LatentKernelSm100, LatentRegistersSm100
from ..sm100.score import LatentQueriesSm100
from ..sparse_prefill.sm100_output import TokenQueries
from .abi import DqOperands, SparsePrefillDqAbi
from .sm100_config import GEOMETRY, DqSm100Smem, arrivals
from .sm100_load import DqSm100DoutRole, DqSm100GatherRole
from .sm100_mma import DqSm100Gemm, DqSm100MmaRole
from .sm100_output import DqSm100OutputRole
from .sm100_score import DqSm100ScoreRole

ONE_CTA = 1  # a multiprocessor; else ptxas ignores setmaxnreg


class SparsePrefillDqSm100(LatentKernelSm100):
    """One variant of the kernel."""

    registers = LatentRegistersSm100(None, 240, 96, 48)  # more for output, which holds a row of Q
    named_barriers = ()
    smem_type = DqSm100Smem

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(SparsePrefillDqAbi(config, ONE_CTA), arch, GEOMETRY, GEOMETRY.smem(), has_rope=config.d_qk > D_LATENT)

    @cute.jit
    def run_mma(self, operands: DqOperands, smem: DqSm100Smem, tmem: Int32, warp: Int32):
        """Run the roles mma and dout in their warps."""
        if warp == self.mma_warp:
            DqSm100MmaRole().run(operands, smem, DqSm100Gemm(self.dtype, self.has_rope, smem, tmem))
        elif warp == self.mma_warp + 1:
            DqSm100DoutRole().run(operands, smem)

    def tensor_maps(self, operands: DqOperands) -> tuple[Any, ...]:
        """Return the map of dO. That of Q is the Hopper kernel's."""
        return (operands.args.dout_map,)

    def score_role(self) -> DqSm100ScoreRole:
        """Return the score role."""
        return DqSm100ScoreRole(self.dtype)

    def output_role(self) -> DqSm100OutputRole:
        """Return the output role."""
        return DqSm100OutputRole(self.dtype, TokenQueries(LatentQueriesSm100(self.geometry, self.has_rope)))

    def producer_role(self, smem: DqSm100Smem) -> DqSm100GatherRole:
        """Return the gather role."""
        return DqSm100GatherRole(self.has_rope)

    def arrivals(self, smem: Any) -> tuple[Arrivals, ...]:
        """Return the arrivals of every barrier."""
        return arrivals(smem)

    def built(self) -> KernelDefinition:
        """Return the variant, ready to compile."""
        definition = super().built()
        return replace(definition, roles=(*definition.roles, Role("dout", self.mma_warp + 1, 1)))


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return SparsePrefillDqSm100(config, arch).built()
