"""Sparse prefill on Hopper.

For every query token and head r, over the rows j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A group of CTAs along x holds the heads of a query token, 64 each, and takes the tokens z, z + grid z and so on, 64 indices (one
tile) at a time.

Roles (512 threads):
  copy     warps 0, 1: cp.async of rows to the stages
  deliver  warp 2: hands over stages that have landed, of a pair to the peer as well
  indices  warp 3: indices, checks, which keys are there; Q of the next token to L2, and to shared memory
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse, the greatest logit, lse of the first indices; the sink
  output   warpgroups 2, 3

Score and output are the decode kernels': dense_decode/sm90.py describes tiles, their pipelines and the trick. In front of them
are (producer -> consumer; arrivals per phase):
  valid_ready[3]   indices -> copy, deliver, score   1: rows of a tile, and a bit per key
  kv_landed[10]    copy -> deliver                   64: the threads' copies, as they complete
  rope_landed[3]   copy -> deliver                   64
  kv_ready[10]     deliver -> score, output          1; of a stage that a pair shares, and the bytes of the peer's half
  rope_ready[3]    deliver -> score                  1
  queries_landed   indices -> score                  32: the lanes' copies, as they complete
  queries_free     score -> indices                  4: the boxes have been read, by a phase's loads or by the last S of a token

Q of a token comes while the token before is finished, in two phases through the same boxes. As soon as the last S of a token is complete,
the first phase brings the column tiles of Q that go to registers. Score takes them when it has written P, and then the others come.

A pair shares the first two stages of a tile: each CTA copies half of their keys and hands them to the peer. The other two each copies
whole: they take the place of stages that have just come free, and the peer's half would come too late. The RoPE columns come between,
and S takes them last: so the columns of a key are summed up in the sequence of sparse decode, which has the same bits.

A tile without any key is passed by: of it there are only the handshakes. All roles walk from token to token on their own, and the role
`indices` looks ahead over the end of a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from cutlass import Int32, cute

from ...spec.arch import Arch
from ...spec.sparse_prefill import SparsePrefillConfig
from ..attention.softmax import OnlineSoftmax, SinkScale
from ..definition import KernelDefinition
from ..sm90.cta import LatentSm90Kernel, LatentSm90Parts, LatentSm90Queries, LatentSm90Smem, LatentSm90Stages, warpgroup_roles
from ..sm90.output import LatentSm90Output, LatentSm90OutputRole
from ..sm90.score import LatentSm90AbsentKeyMask, LatentSm90ScoreRole
from .abi import SparsePrefillAbi
from .operands import SparsePrefillOperands
from .sm90_copy import (
    COPY_WARPS,
    DELIVER_WARP,
    PRODUCER_ROLES,
    SparsePrefillSm90CopyRole,
    SparsePrefillSm90DeliverRole,
    SparsePrefillSm90Smem,
)
from .sm90_indices import SparsePrefillSm90IndexRole
from .sm90_score import SparsePrefillSm90RowResults, SparsePrefillSm90Scores

RINGS = 10, 3  # stages of keys; and of RoPE columns, P and which keys are present
Q_TILES_IN_REGISTERS = 5
OPTIONAL = {"sValid", "rope_ready", "rope_free", "right_turn"}


class SparsePrefillSm90(LatentSm90Parts):
    """One variant of the kernel. Copies need no registers for bytes, so that Q gets them."""

    registers = (40, 152)
    roles = PRODUCER_ROLES + warpgroup_roles("gather")[1:]

    def __init__(self, config: SparsePrefillConfig) -> None:
        super().__init__(config)
        self.stages = LatentSm90Stages(config.d_qk, before_rope=2)
        # boxes hold as many column tiles as go to registers
        self.queries = LatentSm90Queries(config.d_qk, Q_TILES_IN_REGISTERS, boxes=Q_TILES_IN_REGISTERS)
        added = SparsePrefillSm90Smem.added(RINGS)
        self.layout = LatentSm90Smem.layout(self.stages, self.queries, self.dtype, RINGS, OPTIONAL, *added)
        self.expected = ("HGMMA", self.stages.wgmma_per_tile)

    def smem(self, memory: dict[str, Any]) -> SparsePrefillSm90Smem:
        """Return the allocated shared memory as the roles see it."""
        return SparsePrefillSm90Smem.create(self.stages, memory)

    def prefetch(self, operands: SparsePrefillOperands) -> None:
        """Do nothing: there is no plan."""

    @cute.jit
    def produce(self, operands: SparsePrefillOperands, smem: SparsePrefillSm90Smem, warp: Int32, thread: Int32):
        """Run the roles copy, deliver and indices."""
        producer = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if producer < COPY_WARPS:
            SparsePrefillSm90CopyRole(self.cluster).run(operands, smem, thread)
        elif producer == DELIVER_WARP:
            SparsePrefillSm90DeliverRole(self.cluster).run(operands, smem)
        else:
            SparsePrefillSm90IndexRole(self.queries).run(operands, smem)

    def score(self, operands: SparsePrefillOperands, smem: SparsePrefillSm90Smem, thread: Int32) -> None:
        """Run the score role."""
        scores = partial(SparsePrefillSm90Scores.create, self.queries)
        softmax, results = partial(OnlineSoftmax.create, keeps_maximum=True), SparsePrefillSm90RowResults.create(smem)
        LatentSm90ScoreRole(scores, LatentSm90AbsentKeyMask(), SinkScale(), softmax, results).run(operands, smem, thread)

    def output(self, operands: SparsePrefillOperands, smem: SparsePrefillSm90Smem, thread: Int32, side: Int32) -> None:
        """Run the output role."""
        output = partial(LatentSm90Output.create, self.cluster, None)
        LatentSm90OutputRole(output, self.dtype).run(operands, smem, thread, side)


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return LatentSm90Kernel(SparsePrefillAbi(config), arch, SparsePrefillSm90(config)).complete()
