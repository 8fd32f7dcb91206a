"""dQ of sparse prefill on Hopper, and the gradients of its scores.

For every query token and head r, over the rows j that the token's indices name and that exist:

    p_rj = exp(scale <q_r, k_j> - lse'_r)    dS_rj = p_rj (<dout_r, k_j[:512]> - delta'_r)    dq_r = scale sum_j dS_rj k_j

A CTA has 64 heads of a query token. It takes the tokens z, z + grid z and so on of a chunk, 64 indices (one tile) at a time.

Roles (512 threads):
  copy     warps 0, 1: cp.async of rows to the stages; sparse prefill's, as are the next two
  deliver  warp 2: hands over stages that have landed
  indices  warp 3: indices, checks, which keys are there; TMA of Q and dO of a token
  score    warpgroup 1: S = Q K^T, dP = dO V^T, P, dS to shared memory; P and dS to memory; dQ of the RoPE columns
  output   warpgroups 2, 3: dQ += dS K, 256 of the latent columns each

Pipelines (producer -> consumer; arrivals per phase). A stage has 128 columns of a tile's keys, in ascending order:
  valid_ready[2]   indices -> copy, deliver, score, output   1: rows of a tile, and a bit per key
  kv_landed[n]     copy -> deliver           64: the threads' copies, as they complete
  rope_landed[2]   copy -> deliver           64
  kv_ready[n]      deliver -> score, output  1
  kv_free[n]       output -> copy            4: the warpgroup that has the stage's columns; S and dP are complete then
  rope_ready[2]    deliver -> score          1
  rope_free[2]     score, output -> indices, copy  12: every warp has done with the tile, its bits included; score a tile later
  probs_ready[2]   score -> output           4: dS of a tile
  right_turn[2]    output -> output, score   4: the left output group has issued its products of a tile, the others may
  dscores_free     output -> score           8: dQ of a tile is complete, and dS may be overwritten
  queries_landed   indices -> score          1 and the bytes of Q and dO, once per token that has keys
  queries_free     score -> indices          4

The trick: the tile of keys serves three products in turn, S and dP as it lies, dQ transposed. There is neither a maximum nor a rescale,
so dP fills the tensor cores where S alone would leave them idle: of the first two stages it comes between the products of S, while keys
arrive, of the others between the exponentials. dQ takes the stages in the order in which they are filled again. A tile without any key
is passed by: of it there are only the handshakes. README.md has the clocks.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.sparse_prefill import SparsePrefillConfig
from ..definition import KernelDefinition
from ..primitives.copies import prefetch_map
from ..primitives.smem import fields_of
from ..sm90.cta import LatentSm90Kernel, LatentSm90Parts, warpgroup_roles
from ..sparse_prefill.sm90_copy import COPY_WARPS, DELIVER_WARP, PRODUCER_ROLES, SparsePrefillSm90CopyRole, SparsePrefillSm90DeliverRole
from .abi import DqOperands, SparsePrefillDqAbi
from .sm90_config import DqSm90Geometry, DqSm90Smem
from .sm90_load import DqSm90IndexRole
from .sm90_output import DqSm90OutputRole
from .sm90_score import DqSm90ScoreRole


class SparsePrefillDqSm90(LatentSm90Parts):
    """One variant of the kernel."""

    registers = (32, 160)
    named_barriers = ()
    roles = PRODUCER_ROLES + warpgroup_roles("gather")[1:]

    def __init__(self, config: SparsePrefillConfig) -> None:
        super().__init__(config)
        self.geometry = DqSm90Geometry(config.d_qk)
        self.layout = self.geometry.smem(self.dtype)
        self.expected = ("HGMMA", self.geometry.wgmma_per_tile)

    def smem(self, memory: dict[str, Any]) -> DqSm90Smem:
        """Return the allocated shared memory as the roles see it."""
        return DqSm90Smem(**fields_of(DqSm90Smem, {**memory, "stages": self.geometry.stages}))

    @cute.jit
    def prefetch(self, operands: DqOperands):
        """Bring the tensor maps to where the first copy looks for them. One warp."""
        with cute.arch.elect_one():
            for tensor_map in (operands.args.q_map, operands.args.dout_map):
                prefetch_map(tensor_map)

    @cute.jit
    def produce(self, operands: DqOperands, smem: DqSm90Smem, warp: Int32, thread: Int32):
        """Run the roles copy, deliver and indices."""
        producer = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if producer < COPY_WARPS:
            SparsePrefillSm90CopyRole(1).run(operands, smem, thread)
        elif producer == DELIVER_WARP:
            SparsePrefillSm90DeliverRole(1).run(operands, smem)
        else:
            DqSm90IndexRole(self.geometry).run(operands, smem)

    def score(self, operands: DqOperands, smem: DqSm90Smem, thread: Int32) -> None:
        """Run the score role."""
        DqSm90ScoreRole(self.dtype).run(operands, smem, thread)

    def output(self, operands: DqOperands, smem: DqSm90Smem, thread: Int32, side: Int32) -> None:
        """Run the output role."""
        DqSm90OutputRole(self.dtype).run(operands, smem, thread, side)


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return LatentSm90Kernel(SparsePrefillDqAbi(config), arch, SparsePrefillDqSm90(config)).complete()
