"""Sparse MLA decode on Blackwell, over every cache format.

For every query token and head r, over the slots j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A pair of CTAs holds the heads of one query token (block_idx y), 64 each, and walks the work tiles of one partition, 64
indices (one tile) at a time. Each CTA gathers its half of the columns of every key, converts what is e4m3, and puts it where
the TMA of the dense kernel would. Roles and pipelines: ../sm100/gather.py and dense_decode/sm100.py.

Up to 64 heads: a CTA works alone on each query token and partition. It gathers all columns of every key, in two halves, which are those of
the CTAs of a pair. Products, and the trick that lets Q fit: ../sm100/heads64.py.

Roles: as ../sm100/gather.py, mma in every CTA. Pipelines (producer -> consumer; arrivals per phase):
  left_ready[3]    gather -> mma           4: columns 0..255 of a tile's keys
  kv_ready[3]      gather -> mma           4: the other columns
  left_free[3]     mma -> gather           1: P V has read columns 0..255
  kv_free[3]       mma -> gather, output   1: P V has read the others, and P
  seen_ready[3]    gather -> score         4: a bit per key of the stage
  query_ready      score -> mma            4: Q of a work tile is in tensor memory
  scores_ready     mma -> score            1: S of a tile
  scores_free      score -> mma            4
  alpha_ready[2]   score -> output         4: rescale factors
  probs_ready[2]   score -> mma            4: P, over the RoPE columns of its tile
  output_ready[2]  output -> mma           4: O is scaled; of a work tile's first tile, O of the one before has been read
  stats_ready, stats_free   score -> output, and back   4: the factors of O
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from cutlass import Float32, Int32

from ...spec.arch import Arch
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.sparse_decode import SparseDecodeConfig
from ..attention.cta import Arrivals
from ..attention.scheduler import KeyTile
from ..attention.softmax import SinkScale
from ..definition import KernelDefinition
from ..primitives.arithmetic import pin_address
from ..primitives.smem import Array
from ..sm100.config import SIXTEEN_BIT_PARTS
from ..sm100.gather import LatentGatherRoleSm100, LatentKeySourceSm100
from ..sm100.heads64 import HALVES, HEADS64, Heads64Gemm, Heads64MmaRoleSm100, heads64_arrivals, heads64_smem
from ..sm100.heads64_rows import Heads64RowsSm100
from ..sm100.kernel import LatentKernelSm100, LatentRegistersSm100
from ..sm100.score import LatentQueriesSm100, LatentRowsSm100, LatentScoreRoleSm100, SeenMaskSm100
from .abi import SparseDecodeAbi
from .operands import SparseDecodeIndices, SparseDecodeOperands, look_up, slot_address
from .sm100_columns import MixedKeys, ScaledKeys, SparseDecodeSmemSm100, half_columns
from .sm100_heads64 import HalvesGatherRoleSm100

ONE_CTA = 1  # a multiprocessor: unless told so, ptxas ignores setmaxnreg here (C7508)
HEADS64_REGISTERS = LatentRegistersSm100(160, 160, 144, 48)


class SparseDecodeSm100(LatentKernelSm100):
    """One variant of the kernel."""

    smem_type = SparseDecodeSmemSm100

    def __init__(self, config: SparseDecodeConfig, arch: Arch) -> None:
        smem = SIXTEEN_BIT_PARTS.smem(*SIXTEEN_BIT_PARTS.seen_fields(), *SparseDecodeSmemSm100.fields(config, SIXTEEN_BIT_PARTS))
        super().__init__(SparseDecodeAbi(config), arch, SIXTEEN_BIT_PARTS, smem, has_rope=config.format.d_qk > D_LATENT)
        self.config = config

    def score_role(self) -> LatentScoreRoleSm100:
        """Return the score role, whose rows may have sinks."""
        return LatentScoreRoleSm100(self.dtype, SlotMask(), SinkScale(), LatentQueriesSm100(SIXTEEN_BIT_PARTS, self.has_rope))

    def producer_role(self, smem: SparseDecodeSmemSm100) -> LatentGatherRoleSm100:
        """Return the gather role."""
        columns = partial(half_columns, self.config, self.dtype, smem)
        return LatentGatherRoleSm100(columns, SlotKeys(self.config), early=self.config.format.quantised > 0)


class SparseDecodeHeads64Sm100(LatentKernelSm100):
    """One variant of the kernel of a CTA that works alone."""

    registers = HEADS64_REGISTERS
    named_barriers = ()
    smem_type = SparseDecodeSmemSm100
    mma_role = Heads64MmaRoleSm100()
    gemm = Heads64Gemm

    def __init__(self, config: SparseDecodeConfig, arch: Arch) -> None:
        smem = heads64_smem((Array("sInverse", Float32, TILE_ROWS),), SparseDecodeSmemSm100.fields(config, HEADS64))
        super().__init__(SparseDecodeAbi(config, ONE_CTA), arch, HEADS64, smem, has_rope=config.format.d_qk > D_LATENT)
        self.config = config

    def score_role(self) -> LatentScoreRoleSm100:
        """Return the score role, whose rows may have sinks."""
        queries = LatentQueriesSm100(HEADS64, self.has_rope)
        return LatentScoreRoleSm100(self.dtype, SlotMask(), SinkScale(), queries, Heads64RowsSm100.create)

    def producer_role(self, smem: SparseDecodeSmemSm100) -> HalvesGatherRoleSm100:
        """Return the gather role."""
        first, second = (half_columns(self.config, self.dtype, smem, half) for half in range(HALVES))
        return HalvesGatherRoleSm100((first, second), SlotKeys(self.config))

    def arrivals(self, smem: Any) -> tuple[Arrivals, ...]:
        """Return the arrivals of every barrier."""
        return heads64_arrivals(smem)


class SlotMask(SeenMaskSm100):
    """Mask of slots that do not count, for whose bits nobody has waited."""

    def apply(self, operands: SparseDecodeOperands, rows: LatentRowsSm100, keys: KeyTile, tile: Int32) -> None:
        """Set scores of keys that do not count to -inf."""
        rows.smem.seen_ready.consumer_wait(tile)
        super().apply(operands, rows, keys, tile)


@dataclass(frozen=True)
class SlotKeys(LatentKeySourceSm100):
    """The slots that the indices of this CTA's query token name."""

    config: SparseDecodeConfig

    def key_list(self, operands: SparseDecodeOperands, req: Int32) -> SparseDecodeIndices:
        """Return the indices of this CTA's query token."""
        return SparseDecodeIndices.create(operands, req)

    def look_up(self, keys: SparseDecodeIndices, position: Int32) -> Int32:
        """Return an index."""
        return look_up(keys, position)

    def locate(self, operands: SparseDecodeOperands, keys: SparseDecodeIndices, found: Int32, position: Int32) -> ScaledKeys | MixedKeys:
        """Return the address of the slot of an index."""
        in_extra = keys.in_extra(position)
        row, scales = slot_address(operands, self.config, found, in_extra)
        if self.config.mixes_formats:
            return MixedKeys(pin_address(row), pin_address(scales), in_extra)
        return ScaledKeys(row, scales)


def build(config: SparseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = SparseDecodeHeads64Sm100 if config.cluster == 1 else SparseDecodeSm100
    return kernel(config, arch).built()
