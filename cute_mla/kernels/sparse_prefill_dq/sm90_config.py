"""Shared memory and barriers of sparse_prefill_dq on Hopper: those of sparse prefill, with dO, dS, and all of Q."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint8, cute

from ...spec.arch import SM90
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_QK
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, SmemLayout, Tile
from ..primitives.wgmma import K_STEP
from ..sm90.cta import (
    BOX_BYTES,
    OUTPUT_WARPS,
    STAGE_BYTES,
    STAGE_COLUMNS,
    VALID_BYTES,
    WARPS_PER_GROUP,
    LatentSm90Stages,
)
from ..sparse_prefill.sm90_copy import COPY_WARPS, SparsePrefillSm90Smem

RESERVED = 2048  # bytes for barriers, rows of tiles, and what alignment takes
ROPE_STAGES = 2


@dataclass(frozen=True)
class DqSm90Geometry:
    """Numbers of a variant. d_qk: columns of a key."""

    d_qk: int

    @property
    def stages(self) -> LatentSm90Stages:
        """Return the stages of a tile."""
        return LatentSm90Stages(self.d_qk, before_rope=2)

    @property
    def query_boxes(self) -> int:
        """Return the boxes of Q."""
        return self.d_qk // BOX_COLUMNS

    @property
    def dout_boxes(self) -> int:
        """Return the boxes of dO."""
        return D_LATENT // BOX_COLUMNS

    @property
    def query_bytes(self) -> int:
        """Return the bytes of Q and dO of a token."""
        return (self.query_boxes + self.dout_boxes) * BOX_BYTES

    @property
    def kv_stages(self) -> int:
        """Return the stages of keys that shared memory has room for."""
        rope = ROPE_STAGES * BOX_BYTES if self.d_qk == D_QK else 0
        return (SM90.smem_per_block - RESERVED - self.query_bytes - BOX_BYTES - rope) // STAGE_BYTES

    @property
    def wgmma_per_tile(self) -> int:
        """Return the WGMMA instructions of a tile: S, dP, dQ of the RoPE columns, dQ; one role's code serves both output groups."""
        rope = TILE_KEYS // K_STEP if self.d_qk == D_QK else 0
        return (self.d_qk + D_LATENT) // K_STEP + rope + self.stages.output_stages * (TILE_KEYS // K_STEP)

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of all tensors."""
        kv = self.kv_stages
        rope = (Tile("sRope", dtype, (TILE_KEYS, BOX_COLUMNS, ROPE_STAGES)),) if self.d_qk == D_QK else ()
        return SmemLayout((
            Tile("sKv", dtype, (TILE_KEYS, STAGE_COLUMNS, kv)),
            *rope,
            Tile("sQ", dtype, (TILE_ROWS, BOX_COLUMNS, self.query_boxes)),
            Tile("sD", dtype, (TILE_ROWS, BOX_COLUMNS, self.dout_boxes)),
            Tile("sS", dtype, (TILE_ROWS, TILE_KEYS, 1)),
            Array("sValid", Uint8, ROPE_STAGES * VALID_BYTES, 8),
            Array("sBases", Int64, ROPE_STAGES),
            Array("sRows", Int32, ROPE_STAGES * TILE_KEYS),
            *(Barriers(name, kv) for name in ("kv_ready", "kv_free", "kv_landed")),
            *(Barriers(name, ROPE_STAGES) for name in ("rope_ready", "rope_free", "rope_landed")),
            *(Barriers(name, ROPE_STAGES) for name in ("valid_ready", "probs_ready", "right_turn")),
            *(Barriers(name, 1) for name in ("queries_free", "queries_landed", "dscores_free")),
        ))  # fmt: skip


@dataclass(frozen=True)
class DqSm90Smem(SparsePrefillSm90Smem):
    """Shared memory of all roles. sQ: all of Q. probs_ready: of dS, which takes the place of P. RoPE stages hold RoPE columns alone."""

    sD: Any  # (64 rows, 64 columns, boxes): dO
    sS: Any  # (64 rows, 64 keys, 1): dS
    dscores_free: StageBarriers

    def initialise(self, cluster: int, producers: int = 1) -> None:
        """Set the arrivals of every barrier."""
        arrivals = (
            (self.kv_ready, 1),
            (self.kv_free, WARPS_PER_GROUP),
            (self.kv_landed, COPY_WARPS * 32),
            (self.rope_ready, 1),
            (self.rope_free, WARPS_PER_GROUP + OUTPUT_WARPS),
            (self.rope_landed, COPY_WARPS * 32),
            (self.valid_ready, 1),
            (self.probs_ready, WARPS_PER_GROUP),
            (self.right_turn, WARPS_PER_GROUP),
            (self.queries_free, WARPS_PER_GROUP),
            (self.queries_landed, 1),
            (self.dscores_free, OUTPUT_WARPS),
        )
        for barriers, count in arrivals:
            barriers.initialise(count)
        cute.arch.mbarrier_init_fence()
