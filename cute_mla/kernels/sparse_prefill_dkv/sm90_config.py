"""Tile geometry, shared memory and barriers of sparse_prefill_dkv on Hopper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.arch import SM90
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.sparse_prefill_dkv import SparsePrefillDkvConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.cta import both_ways
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, SmemLayout, Tile
from ..primitives.wgmma import K_STEP
from ..sm90.cta import BOX_BYTES, WARPS_PER_GROUP

GROUPS = 2  # warpgroups that multiply
THREADS = (1 + GROUPS) * 32 * WARPS_PER_GROUP
LOAD_REGISTERS = 40  # a lane; all threads start with 168
MULTIPLY_REGISTERS = 232
LOAD_WARP = 0

STAGE_BYTES = 2 * BOX_BYTES  # P and dS of 64 slots and 64 heads
RESERVED = 2048  # bytes for barriers, tiles that are announced, and what alignment takes
TILE_WORDS = 4  # that announce a tile
END = -1  # in place of a tile's first row: there are no more tiles


@dataclass(frozen=True)
class DkvSm90Geometry:
    """Numbers of a variant. A CTA has the columns of one group; each of its warpgroups has half of those that are values."""

    config: SparsePrefillDkvConfig

    @property
    def columns(self) -> int:
        """Return the columns of a CTA that Q and dO have."""
        return D_LATENT // self.config.column_groups

    @property
    def group_columns(self) -> int:
        """Return those of a warpgroup."""
        return self.columns // GROUPS

    @property
    def has_rope(self) -> bool:
        """Return whether Q has columns that dO lacks. The first warpgroup of the last group of columns has them as well."""
        return self.config.d_qk > D_LATENT

    @property
    def stages(self) -> int:
        """Return the boxes of P and dS that shared memory has room for."""
        boxes = self.config.head_tiles * (2 * self.columns // BOX_COLUMNS + int(self.has_rope))
        return (SM90.smem_per_block - RESERVED - boxes * BOX_BYTES) // STAGE_BYTES

    @property
    def wgmma_per_tile(self) -> int:
        """Return the WGMMA instructions of a tile: one warpgroup's code has the RoPE columns, the other's has not."""
        steps = self.config.head_tiles * TILE_ROWS // K_STEP
        return steps * (2 * GROUPS + int(self.has_rope))

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of all tensors."""
        rope = (Tile("sRope", dtype, (TILE_ROWS, BOX_COLUMNS, self.config.head_tiles)),) if self.has_rope else ()
        return SmemLayout((
            *(Tile(name, dtype, (TILE_ROWS, self.columns, self.config.head_tiles)) for name in ("sQ", "sD")),
            *rope,
            *(Tile(name, dtype, (TILE_ROWS, TILE_KEYS, self.stages)) for name in ("sP", "sS")),
            Array("tiles", Int32, self.stages * TILE_WORDS, 16),
            *both_ways("tile", self.stages),
            *both_ways("query", 1),
        ))  # fmt: skip


@dataclass(frozen=True)
class DkvSm90Smem:
    """Shared memory, as DkvSm90Geometry.smem lays it out. Rows of all tensors are heads."""

    sQ: cute.Tensor  # (64 heads, columns, head tiles)
    sD: cute.Tensor  # dO, likewise
    sRope: Any  # (64 heads, 64 columns, head tiles), or None
    sP: cute.Tensor  # (64 heads, 64 slots, stages)
    sS: cute.Tensor  # dS, likewise
    tiles: cute.Pointer  # int32 [stages, 4]: a DkvTile each, in the first stage of a tile
    tile_ready: StageBarriers
    tile_free: StageBarriers
    query_ready: StageBarriers
    query_free: StageBarriers


@dataclass(frozen=True)
class DkvTile:
    """A tile that has keys, as the load role announces it.

    first_row: the row of its first slot, or END. begins: 1 if it is the first one of a token. low, high: a bit for each slot that names a
    row of kv.
    """

    first_row: Int32
    begins: Int32
    low: Int32
    high: Int32

    @staticmethod
    def load(smem: DkvSm90Smem, use: Int32) -> DkvTile:
        """Wait tile_ready. Return the tile of a use."""
        smem.tile_ready.consumer_wait(use)
        words = smem.tiles + smem.tile_ready.stage(use) * TILE_WORDS
        return DkvTile(*(words[i] for i in range(TILE_WORDS)))

    def store(self, smem: DkvSm90Smem, use: Int32) -> None:
        """Write the tile of a use. One thread."""
        words = smem.tiles + smem.tile_ready.stage(use) * TILE_WORDS
        for i, word in enumerate((self.first_row, self.begins, self.low, self.high)):
            words[i] = word
