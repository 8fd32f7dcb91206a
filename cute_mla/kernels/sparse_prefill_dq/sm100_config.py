"""Shared and tensor memory of sparse_prefill_dq on Blackwell, and its barriers. sm100.py describes them."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Uint8, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_ROPE
from ..attention.cta import Arrivals
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout
from ..sm100.config import BOX_BYTES, GROUP_WARPS, QUERY_COLUMN, STEPS_PER_BOX, LatentGeometrySm100, LatentSmemSm100

DOUT_BOXES = D_LATENT // BOX_COLUMNS  # of 64 rows of dO
DOUT_BYTES = DOUT_BOXES * BOX_BYTES
ROPE_COLUMN = QUERY_COLUMN + 144  # of tensor memory, after Q: dQ of the RoPE columns, half of them in each half of the lanes
ROPE_COLUMNS = D_ROPE // 2

assert TILE_ROWS * BOX_COLUMNS * 2 == BOX_BYTES


@dataclass(frozen=True)
class DqSm100Geometry(LatentGeometrySm100):
    """Numbers of a CTA that works alone, with dP and dQ in place of O."""

    def products_per_tile(self, has_rope: bool) -> int:
        """Return the matrix products of one tile: S, dP, dQ."""
        rope = self.key_steps if has_rope else 0
        return super().products_per_tile(has_rope) + DOUT_BOXES * STEPS_PER_BOX + rope

    def smem(self) -> SmemLayout:
        """Return the layout of shared memory."""
        seen_ready, seen_bits = self.seen_fields()
        return SmemLayout((
            Array("sKv", Uint8, self.kv_stages * self.stage_bytes, SWIZZLE_PERIOD),
            Array("sD", Uint8, DOUT_BYTES, SWIZZLE_PERIOD),
            Array("sS", Uint8, BOX_BYTES, SWIZZLE_PERIOD),
            *(Barriers(name, self.kv_stages) for name in ("left_ready", "left_free", "kv_ready", "kv_free")),
            seen_ready,
            *(Barriers(name, 1) for name in ("query_ready", "query_free", "dout_ready", "dout_free", "scores_ready", "scores_free")),
            *(Barriers(name, 1) for name in ("dprobs_ready", "dprobs_free", "dscores_ready", "dq_ready", "dq_free")),
            seen_bits,
            Array("sBegun", Int32, 1),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip


GEOMETRY = DqSm100Geometry(kv_stages=2, score_groups=1, score_parts=1, paired=False)


@dataclass(frozen=True)
class DqSm100Smem(LatentSmemSm100):
    """Shared memory, as DqSm100Geometry.smem lays it out."""

    sD: cute.Pointer  # bytes of dO: a box for 64 columns
    sS: cute.Pointer  # a box: P on its way to memory, then dS
    sBegun: cute.Pointer  # int32: whether any tile of the token has keys
    query_free: StageBarriers
    dout_ready: StageBarriers
    dout_free: StageBarriers
    dprobs_ready: StageBarriers
    dprobs_free: StageBarriers
    dscores_ready: StageBarriers
    dq_ready: StageBarriers
    dq_free: StageBarriers


def arrivals(smem: DqSm100Smem) -> tuple[Arrivals, ...]:
    """Return the arrivals of every barrier: warps of the arriving role, one commit or copy, or a commit and the mma role."""
    by_warps = (
        smem.left_ready, smem.kv_ready, smem.seen_ready, smem.query_ready, smem.scores_free, smem.dprobs_free, smem.dscores_ready,
        smem.dq_free,
    )  # fmt: skip
    once = (smem.kv_free, smem.query_free, smem.dout_ready, smem.dout_free, smem.scores_ready, smem.dprobs_ready)
    return (GROUP_WARPS, by_warps), (2, (smem.left_free, smem.dq_ready)), (1, once)
