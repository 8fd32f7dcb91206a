"""Tiles of sparse_prefill_dkv in shared memory, on either architecture, and what the load role says of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.arch import SM90, SM100
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.sparse_prefill_dkv import SparsePrefillDkvConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.cta import both_ways
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, Field, Tile
from ..sm90.cta import BOX_BYTES

STAGE_BYTES = 2 * BOX_BYTES  # P and dS of 64 slots and 64 heads
RESERVED = 2048  # bytes for barriers, tiles that are announced, and what alignment takes
TILE_WORDS = 4  # that announce a tile
END = -1  # in place of a tile's first row: there are no more tiles
assert SM90.smem_per_block == SM100.smem_per_block


@dataclass(frozen=True)
class DkvGeometry:
    """Numbers of a variant. A CTA has the columns of one group."""

    config: SparsePrefillDkvConfig

    @property
    def columns(self) -> int:
        """Return the columns of a CTA that Q and dO have."""
        return D_LATENT // self.config.column_groups

    @property
    def has_rope(self) -> bool:
        """Return whether Q has columns that dO lacks."""
        return self.config.d_qk > D_LATENT

    def takes_rope(self, number: Int32) -> Boolean:
        """Return whether this CTA has the RoPE columns of a token as well, the number-th that has keys: the CTAs of a token take turns."""
        groups = self.config.column_groups
        return Boolean(self.has_rope) & ((cute.arch.block_idx()[0] + number) % groups == groups - 1)

    @property
    def stages(self) -> int:
        """Return the boxes of P and dS that shared memory has room for."""
        boxes = self.config.head_tiles * (2 * self.columns // BOX_COLUMNS + int(self.has_rope))
        return (SM90.smem_per_block - RESERVED - boxes * BOX_BYTES) // STAGE_BYTES

    def fields(self, dtype: type[cutlass.Numeric]) -> tuple[Field, ...]:
        """Return the fields of shared memory that both architectures have. dtype: of all tensors."""
        rope = (Tile("sRope", dtype, (TILE_ROWS, BOX_COLUMNS, self.config.head_tiles)),) if self.has_rope else ()
        return (
            *(Tile(name, dtype, (TILE_ROWS, self.columns, self.config.head_tiles)) for name in ("sQ", "sD")),
            *rope,
            *(Tile(name, dtype, (TILE_ROWS, TILE_KEYS, self.stages)) for name in ("sP", "sS")),
            Array("tiles", Int32, self.stages * TILE_WORDS, 16),
            *both_ways("tile", self.stages),
            Barriers("query_ready", 1),
        )


@dataclass(frozen=True)
class DkvSmem:
    """Shared memory, as DkvGeometry.fields lays it out. Rows of all tensors are heads."""

    sQ: cute.Tensor  # (64 heads, columns, head tiles)
    sD: cute.Tensor  # dO, likewise
    sRope: Any  # (64 heads, 64 columns, head tiles), or None
    sP: cute.Tensor  # (64 heads, 64 slots, stages)
    sS: cute.Tensor  # dS, likewise
    tiles: cute.Pointer  # int32 [stages, 4]: a DkvTile each, in the first stage of a tile
    tile_ready: StageBarriers
    tile_free: StageBarriers
    query_ready: StageBarriers


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
    def load(smem: DkvSmem, use: Int32) -> DkvTile:
        """Wait tile_ready. Return the tile of a use."""
        smem.tile_ready.consumer_wait(use)
        words = smem.tiles + smem.tile_ready.stage(use) * TILE_WORDS
        return DkvTile(*(words[i] for i in range(TILE_WORDS)))

    def store(self, smem: DkvSmem, use: Int32) -> None:
        """Write the tile of a use. One thread."""
        words = smem.tiles + smem.tile_ready.stage(use) * TILE_WORDS
        for i, word in enumerate((self.first_row, self.begins, self.low, self.high)):
            words[i] = word
