"""Shared memory, tensor memory and barriers of sparse prefill on Blackwell with up to 64 heads. sm100_heads64.py describes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cutlass import Float32, Int32, Uint8, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout
from ..sm100.config import BOX_BYTES, GROUP_WARPS, HALF_LANES, SIXTEEN_BIT, Geometry, Tiles
from ..sm100.indexed_keys import SEEN_WORDS
from .sm100_score import ROW_STATES, TokenPipes

STAGES = 3
HEADS64 = replace(SIXTEEN_BIT, kv_stages=STAGES, paired=False)
HALVES = 2  # of the columns of a tile: each is copied, handed over, multiplied and released by itself
HALF_BOXES = HEADS64.latent_boxes  # of latent columns
ROPE_BOX = HALVES * HALF_BOXES  # overwritten by P
STAGE_BYTES = (ROPE_BOX + 1) * BOX_BYTES
HALF_COLUMNS = D_LATENT // HALVES

QUAD = 4  # threads of the score role that have a row
INDEXER_STATES = QUAD * TILE_ROWS

LOWER_LANES = HALF_LANES << 16  # of a warp, in an address of tensor memory: where Q and S of the second half lie


class HeadsTiles(Tiles):
    """Shared memory: stages of all columns, of boxes of 64 keys x 128 bytes. There are no fields to exchange scores."""

    def stage(self, index: Int32) -> cute.Pointer:
        """Return the first byte of a stage."""
        return self.sKv + index * STAGE_BYTES


@dataclass(frozen=True)
class HeadsPipes(TokenPipes):
    """The barriers. Those of the shared roles are of whole tiles: kv_ready and kv_free come behind left_ready and left_free."""

    left_ready: StageBarriers
    left_free: StageBarriers

    def initialise_all(self) -> None:
        """Set the arrivals of every barrier: warps of the arriving role, or one commit."""
        by_warps = (
            self.left_ready, self.kv_ready, self.seen_ready, self.query_ready, self.scores_free, self.alpha_ready, self.probs_ready,
            self.output_ready, self.stats_ready, self.stats_free,
        )  # fmt: skip
        for barriers in by_warps:
            barriers.initialise(GROUP_WARPS)
        self.left_free.initialise(2)  # a commit, and the mma role has read the bits
        self.kv_free.initialise(1)
        self.scores_ready.initialise(1)
        cute.arch.mbarrier_init_fence()


def smem_layout(geometry: Geometry = HEADS64) -> SmemLayout:
    """Return the layout of shared memory."""
    return SmemLayout((
        Array("sKv", Uint8, STAGES * STAGE_BYTES, SWIZZLE_PERIOD),
        Array("sAlpha", Float32, geometry.parities * TILE_ROWS),
        Array("sRows", Float32, ROW_STATES * TILE_ROWS),
        Array("sIndexer", Float32, 2 * INDEXER_STATES),  # a thread's share of each row sum before the bound, and the reference
        *(Barriers(name, STAGES) for name in ("left_ready", "left_free", "kv_ready", "kv_free", "seen_ready")),
        *(Barriers(name, 1) for name in ("query_ready", "scores_ready", "scores_free", "stats_ready", "stats_free")),
        *(Barriers(name, geometry.parities) for name in ("alpha_ready", "probs_ready", "output_ready")),
        Array("sSeen", Int32, SEEN_WORDS * STAGES),
        Array("tmem_cell", Int32, 1),
    ))  # fmt: skip
