"""Shared memory of sparse prefill on Blackwell, and the geometry of a CTA that works alone. sm100.py describes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutlass import Float32, Int32, Uint8, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout
from ..sm100.config import GROUP, HALF_LANES, PAIR, SIXTEEN_BIT, SIXTEEN_BIT_PARTS, LatentSmemSm100

HEADS64 = replace(SIXTEEN_BIT, kv_stages=3, paired=False)
HALVES = PAIR  # of the columns of a tile: each is copied, handed over, multiplied and released by itself
HALF_BOXES = HEADS64.latent_boxes  # of latent columns
HALF_COLUMNS = D_LATENT // HALVES
LOWER_LANES = HALF_LANES << 16  # of a warp, in an address of tensor memory: where Q and S of the second half lie

QUAD = 4  # threads of the score role that have a row
INDEXER_STATES = QUAD * TILE_ROWS

SHARES, REFERENCE, MAXIMUM, INDEXER_SHARES, INDEXER_REFERENCE, ROW_STATES = 0, 2, 3, 4, 6, 7  # shares of a row's threads, others of the row


@dataclass(frozen=True)
class SparsePrefillSmemSm100(LatentSmemSm100):
    """Shared memory, with what the softmax of a token has come to."""

    # fp32 (7, 64 rows): two shares of the row sum, the reference in log2 units, the maximum score, unscaled; before the bound of
    # lse_indexer, where that is asked for, two shares of the row sum and the reference
    sRows: cute.Pointer
    sIndexer: cute.Pointer  # fp32 (2, threads of a tile's rows): a thread's share of a row sum before the bound, and its reference
    left_ready: StageBarriers | None  # of a CTA that works alone: of columns 0..255. kv_ready and kv_free, of whole tiles, come later
    left_free: StageBarriers | None


def pair_smem() -> SmemLayout:
    """Return the layout of shared memory of a pair's CTA."""
    return SIXTEEN_BIT_PARTS.smem(
        *SIXTEEN_BIT_PARTS.seen_fields(), Array("sRows", Float32, ROW_STATES * TILE_ROWS), Array("sIndexer", Float32, 2 * GROUP)
    )


def heads64_smem() -> SmemLayout:
    """Return the layout of shared memory of a CTA that works alone. There are no fields to exchange scores."""
    seen_ready, seen_bits = HEADS64.seen_fields()
    return SmemLayout((
        Array("sKv", Uint8, HEADS64.kv_stages * HEADS64.stage_bytes, SWIZZLE_PERIOD),
        Array("sAlpha", Float32, HEADS64.parities * TILE_ROWS),
        Array("sRows", Float32, ROW_STATES * TILE_ROWS),
        Array("sIndexer", Float32, 2 * INDEXER_STATES),
        *(Barriers(name, HEADS64.kv_stages) for name in ("left_ready", "left_free", "kv_ready", "kv_free")),
        seen_ready,
        *(Barriers(name, 1) for name in ("query_ready", "scores_ready", "scores_free", "stats_ready", "stats_free")),
        *(Barriers(name, HEADS64.parities) for name in ("alpha_ready", "probs_ready", "output_ready")),
        seen_bits,
        Array("tmem_cell", Int32, 1),
    ))  # fmt: skip
