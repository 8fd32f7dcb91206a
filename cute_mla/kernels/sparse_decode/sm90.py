"""Sparse MLA decode on Hopper.

The dense kernel (dense_decode/sm90.py) with another role in front: four warps gather the 64 slots that the indices of a tile
name, from a cache of any format, and write them as 16-bit columns to the stages of the pipelines. The roles score and output are
the dense kernel's, and so are tiles, barriers and the trick.

Roles (512 threads):
  gather   warpgroup 0: indices, addresses, loads, value x scale, rounded once; which keys are present
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse; the sink
  output   warpgroups 2, 3

A CTA holds up to 64 heads of one query token. Pipelines: as in dense_decode, with an arrival on kv_ready and rope_ready instead of
bytes: of the one warp of the gather role whose turn it is, when all four have stored and fenced. RoPE columns, which nobody converts,
go by cp.async. Where q has 512 columns, a key has none but its values: the RoPE stages then hold P and validity alone.
"""

from __future__ import annotations

from functools import partial

from cutlass import Int32

from ...manifest import NamedBarrier
from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT
from ...spec.sparse_decode import SparseDecodeConfig
from ..attention.softmax import SinkScale
from ..definition import KernelDefinition
from ..sm90.cta import (
    SHARED_REGISTERS,
    LatentSm90Kernel,
    LatentSm90Parts,
    LatentSm90Queries,
    LatentSm90Smem,
    LatentSm90Stages,
    warpgroup_roles,
)
from ..sm90.few_heads_cta import FewHeadsSm90Kernel
from ..sm90.output import LatentSm90Output, LatentSm90OutputRole
from ..sm90.score import LatentSm90AbsentKeyMask, LatentSm90ScoreRole, LatentSm90Scores
from .abi import SparseDecodeAbi
from .operands import SparseDecodeOperands
from .sm90_few_heads import SparseDecodeSm90FewHeads
from .sm90_gather import GATHER_BARRIER, SparseDecodeSm90GatherRole

# Columns where keys are converted: the output groups' first stages, which come free first, are filled first. Those of a latent ascend.
ALTERNATING = (0, 256, 128, 384)


def tiling_of(cache_format: CacheFormat) -> tuple[int, int, int]:
    """Return the column tiles of Q in registers, the kv stages, and the registers of a lane that gathers.

    Copies of 16-bit columns take no registers, so that Q has them, and a tenth stage the shared memory. Few column tiles of Q in registers
    leave the gather role those for its loads in flight where it converts.
    """
    if not cache_format.group:
        return 4, 10, 56
    return (2, 9, 88) if cache_format.d_qk > D_LATENT else (1, 9, 96)


class SparseDecodeSm90(LatentSm90Parts):
    """One variant of the kernel."""

    roles = warpgroup_roles("gather")
    named_barriers = LatentSm90Parts.named_barriers + tuple(
        NamedBarrier(f"slot_{stage}", GATHER_BARRIER + stage) for stage in range(len(ALTERNATING))
    )

    def __init__(self, config: SparseDecodeConfig) -> None:
        super().__init__(config)
        self.config = config
        in_registers, kv_stages, registers = tiling_of(config.format)
        self.registers = registers, SHARED_REGISTERS - registers
        # those of a latent ascend as in sparse prefill, so that both have the same bits
        self.stages = LatentSm90Stages(config.format.d_qk, *((ALTERNATING,) if config.format.group else ()))
        self.queries = LatentSm90Queries(config.format.d_qk, in_registers)
        optional = {"sValid", "rope_ready", "rope_free"}
        self.layout = LatentSm90Smem.layout(self.stages, self.queries, self.dtype, (kv_stages, 3), optional)
        self.expected = ("HGMMA", self.stages.wgmma_per_tile)

    def produce(self, operands: SparseDecodeOperands, smem: LatentSm90Smem, warp: Int32, thread: Int32) -> None:
        """Run the gather role."""
        SparseDecodeSm90GatherRole(self.config, self.dtype, self.stages).run(operands, smem, thread)

    def score(self, operands: SparseDecodeOperands, smem: LatentSm90Smem, thread: Int32) -> None:
        """Run the score role."""
        scores = partial(LatentSm90Scores.create, self.queries)
        LatentSm90ScoreRole(scores, LatentSm90AbsentKeyMask(), SinkScale()).run(operands, smem, thread)

    def output(self, operands: SparseDecodeOperands, smem: LatentSm90Smem, thread: Int32, side: Int32) -> None:
        """Run the output role."""
        output = partial(LatentSm90Output.create, self.cluster, None)
        LatentSm90OutputRole(output, self.dtype).run(operands, smem, thread, side)


def build(config: SparseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    if config.few_heads:
        return FewHeadsSm90Kernel(SparseDecodeAbi(config, 1), arch, SparseDecodeSm90FewHeads(config)).complete()
    return LatentSm90Kernel(SparseDecodeAbi(config), arch, SparseDecodeSm90(config)).complete()
