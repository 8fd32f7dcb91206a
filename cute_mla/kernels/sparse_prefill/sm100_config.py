"""Shared memory of sparse prefill on Blackwell. sm100.py describes it."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, cute

from ...spec.dense_decode import TILE_ROWS
from ..primitives.smem import Array, SmemLayout
from ..sm100.config import GROUP, SIXTEEN_BIT_PARTS, LatentSmemSm100
from ..sm100.heads64 import heads64_smem
from ..sm100.heads64_rows import QUAD

INDEXER_STATES = QUAD * TILE_ROWS

SHARES, REFERENCE, MAXIMUM, INDEXER_SHARES, INDEXER_REFERENCE, ROW_STATES = 0, 2, 3, 4, 6, 7  # shares of a row's threads, others of the row


@dataclass(frozen=True)
class SparsePrefillSmemSm100(LatentSmemSm100):
    """Shared memory, with what the softmax of a token has come to."""

    # fp32 (7, 64 rows): two shares of the row sum, the reference in log2 units, the maximum score, unscaled; before the bound of
    # lse_indexer, where that is asked for, two shares of the row sum and the reference
    sRows: cute.Pointer
    sIndexer: cute.Pointer  # fp32 (2, threads of a tile's rows): a thread's share of a row sum before the bound, and its reference


def pair_smem() -> SmemLayout:
    """Return the layout of shared memory of a pair's CTA."""
    return SIXTEEN_BIT_PARTS.smem(
        *SIXTEEN_BIT_PARTS.seen_fields(), Array("sRows", Float32, ROW_STATES * TILE_ROWS), Array("sIndexer", Float32, 2 * GROUP)
    )


def alone_smem() -> SmemLayout:
    """Return the layout of shared memory of a CTA that works alone."""
    return heads64_smem((Array("sRows", Float32, ROW_STATES * TILE_ROWS), Array("sIndexer", Float32, 2 * INDEXER_STATES)))
