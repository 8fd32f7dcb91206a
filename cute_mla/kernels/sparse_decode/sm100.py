"""Sparse MLA decode on Blackwell, over every cache format.

For every query token and head r, over the slots j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

A pair of CTAs holds the heads of one query token (block_idx y), 64 each, and walks the pieces of one part of the plan, 64
indices (one tile) at a time. Each CTA gathers its half of the columns of every key, converts what is e4m3, and puts it where
the TMA of the dense kernel would. Roles and pipelines: sm100/row_producer.py, sm100/indexed_producer.py, sm100/roles.py.
"""

from __future__ import annotations

from cutlass import Int32

from ...spec.arch import Arch
from ...spec.mla import D_LATENT
from ...spec.sparse_decode import SparseDecodeConfig
from ..definition import KernelDefinition
from ..sm100.indexed_producer import GatheredPair
from ..sm100.row_copy import CopiedTile
from ..sm100.row_producer import filled_source
from .entry import SparseDecode
from .operands import IndexList, Operands, look_up, slot_address
from .sm100_gather import ScaledKeys, ScaledTile, columns_of_cta


class SparseDecodeSm100(GatheredPair, SparseDecode):
    """One variant of the kernel."""

    def __init__(self, config: SparseDecodeConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.has_rope = config.format.d_qk > D_LATENT

    def columns_of(self, rank: Int32) -> ScaledTile | CopiedTile:
        """By cache format."""
        return columns_of_cta(self.format, self.dtype, rank)

    def index_list(self, operands: Operands, req: Int32) -> IndexList:
        """Those of this CTA's query token."""
        return IndexList.of(operands, req)

    def look_up(self, indices: IndexList, position: Int32) -> Int32:
        """An index."""
        return look_up(indices, position)

    def locate(self, operands: Operands, indices: IndexList, found: Int32, position: Int32) -> ScaledKeys:
        """Where the slot of an index lies."""
        return ScaledKeys(*slot_address(operands, self.format, found, indices.in_extra(position)))


def build(config: SparseDecodeConfig, arch: Arch) -> KernelDefinition:
    """The variant, ready to compile."""
    return filled_source(SparseDecodeSm100(config, arch))
