"""Shared and tensor memory of sparse_prefill_dq on Blackwell, and its barriers. sm100.py describes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Uint8, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_ROPE, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.cta import Arrivals
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout
from ..sm100.config import (
    BOX_BYTES,
    GROUP_WARPS,
    PAIR,
    QUERY_COLUMN,
    ROW_BYTES,
    SCORE_COLUMN,
    STEPS_PER_BOX,
    LatentGeometrySm100,
    LatentSmemSm100,
)

DOUT_BOXES = D_LATENT // BOX_COLUMNS  # of 64 rows of dO
DOUT_BYTES = DOUT_BOXES * BOX_BYTES
ROPE_COLUMN = QUERY_COLUMN + 144  # of tensor memory, after Q: dQ of the RoPE columns, half of them in each half of the lanes
ROPE_COLUMNS = D_ROPE // 2

PART_KEYS = ((0, 48), (48, 16))  # of a pair: the first key of a part of S, and the number of keys
PAIR_SCORE_COLUMN = SCORE_COLUMN - PART_KEYS[1][1]
DPROBS_COLUMN = PAIR_SCORE_COLUMN + PART_KEYS[1][0]  # of a pair: dP takes the columns of the second part, and the last ones
TOKENS = 2  # of which it is known whether they have keys
ROPE_ROW_BYTES = ROPE_COLUMNS * ELEMENT_BYTES  # of a key, in a CTA of a pair
VALUE_ROWS = TILE_KEYS // PAIR  # keys of a tile all of whose latent columns a CTA of a pair holds, for dP
VALUE_BOX_BYTES = VALUE_ROWS * ROW_BYTES
VALUE_BYTES = DOUT_BOXES * VALUE_BOX_BYTES
DPROBS_PARTS = 2  # of a pair, of the columns that dP contracts: their keys and dO come and are free part by part
ONE_STAGE = ("query_ready", "query_free", "scores_free", "dprobs_ready", "dprobs_free", "dscores_ready", "dq_ready", "dq_free")

assert TILE_ROWS * BOX_COLUMNS * 2 == BOX_BYTES


@dataclass(frozen=True)
class DqSm100Geometry(LatentGeometrySm100):
    """Numbers of a CTA, with dP and dQ in place of O."""

    def products_per_tile(self, has_rope: bool) -> int:
        """Return the matrix products of one tile: S, dP, dQ."""
        rope = self.key_steps if has_rope else 0
        return super().products_per_tile(has_rope) + DOUT_BOXES * STEPS_PER_BOX + rope

    def layout(self) -> SmemLayout:
        """Return the layout of shared memory of a CTA that works alone."""
        seen_ready, seen_bits = self.seen_fields()
        return SmemLayout((
            Array("sKv", Uint8, self.kv_stages * self.stage_bytes, SWIZZLE_PERIOD),
            Array("sD", Uint8, DOUT_BYTES, SWIZZLE_PERIOD),
            Array("sS", Uint8, BOX_BYTES, SWIZZLE_PERIOD),
            *(Barriers(name, self.kv_stages) for name in ("left_ready", "left_free", "kv_ready", "kv_free")),
            seen_ready,
            *(Barriers(name, 1) for name in (*ONE_STAGE, "scores_ready", "dout_ready", "dout_free")),
            seen_bits,
            Array("sBegun", Int32, TOKENS),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip


@dataclass(frozen=True)
class DqSm100PairGeometry(DqSm100Geometry):
    """Numbers of a CTA of a pair. Its RoPE columns, half of them, have a box of their own with rows of 64 bytes."""

    exchange_words = TILE_ROWS * TILE_KEYS // PAIR  # of one part of S

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage of the CTA's columns of all keys of a tile."""
        return self.rope_box * BOX_BYTES + TILE_KEYS * ROPE_ROW_BYTES

    def score_column(self, part: int, stage: Int32) -> int | Int32:
        """Return the first column of tensor memory of half of S, as the score role reads it."""
        return PAIR_SCORE_COLUMN + part * self.part_keys

    def layout(self) -> SmemLayout:
        """Return the layout of shared memory of a pair's CTA."""
        seen_ready, seen_bits = self.seen_fields()
        return SmemLayout((
            Array("sKv", Uint8, self.kv_stages * self.stage_bytes, SWIZZLE_PERIOD),
            Array("sV", Uint8, VALUE_BYTES, SWIZZLE_PERIOD),
            Array("sD", Uint8, DOUT_BYTES, SWIZZLE_PERIOD),
            Array("sS", Uint8, BOX_BYTES, SWIZZLE_PERIOD),
            Array("sExchange", Float32, self.exchange_words, 16),
            *(Barriers(name, self.kv_stages) for name in ("kv_ready", "kv_free")),
            Barriers("scores_ready", self.score_parts),
            seen_ready,
            *(Barriers(name, 1) for name in (*ONE_STAGE, "value_ready")),
            *(Barriers(name, DPROBS_PARTS) for name in ("value_free", "dout_ready", "dout_free")),
            seen_bits,
            Array("sBegun", Int32, TOKENS),
            Array("tmem_cell", Int32, 1),
        ))  # fmt: skip


GEOMETRY = DqSm100Geometry(kv_stages=2, score_groups=1, score_parts=1, paired=False)
PAIR_GEOMETRY = DqSm100PairGeometry(kv_stages=3, score_groups=1, score_parts=2)


@dataclass(frozen=True)
class DqSm100Smem(LatentSmemSm100):
    """Shared memory, as DqSm100Geometry.layout lays it out."""

    sD: cute.Pointer  # bytes of dO: a box for 64 columns
    sS: cute.Pointer  # a box: P on its way to memory, then dS
    sBegun: cute.Pointer  # int32 (2): whether any tile of a token has keys
    sV: cute.Pointer | None  # of a pair, bytes of boxes of 32 keys x 128 bytes: all latent columns of half of the keys of a tile
    value_ready: StageBarriers | None
    value_free: StageBarriers | None
    query_free: StageBarriers
    dout_ready: StageBarriers
    dout_free: StageBarriers
    dprobs_ready: StageBarriers
    dprobs_free: StageBarriers
    dscores_ready: StageBarriers
    dq_ready: StageBarriers
    dq_free: StageBarriers


def arrivals(smem: Any, kv_releases: int | Callable[[], Int32]) -> tuple[Arrivals, ...]:
    """Return the arrivals of every barrier.

    Warps of the arriving role, of a pair those of both CTAs where the mma role waits; one commit or copy; or a commit and a warp of the
    score role. kv_releases: of the barrier of columns that does not wait for a commit alone.
    """
    by_mma = (smem.query_ready, smem.scores_free, smem.dprobs_free, smem.dscores_ready, smem.dq_free, smem.kv_ready)
    once = (smem.query_free, smem.dout_ready, smem.dout_free, smem.scores_ready, smem.dprobs_ready)
    if smem.geometry.paired:
        awaited, bits, others = (*by_mma, smem.value_ready), smem.kv_free, (*once, smem.value_free)
    else:
        awaited, bits, others = (*by_mma, smem.left_ready), smem.left_free, (*once, smem.kv_free)
    warps = GROUP_WARPS * (PAIR if smem.geometry.paired else 1)
    return (warps, awaited), (GROUP_WARPS, (smem.seen_ready,)), (2, (smem.dq_ready,)), (kv_releases, (bits,)), (1, others)
