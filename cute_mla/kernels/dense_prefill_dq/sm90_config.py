"""Tile geometry, shared memory and barriers of the SM90 dQ kernel. Warps, registers and named barriers are the forward's."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from ...spec.arch import SM90
from ...spec.dense_prefill import HEAD_DIMS
from ...spec.dense_prefill_dq import TILE_KEYS
from ...spec.mla import ELEMENT_BYTES
from ..dense_prefill.board import ITEM_WORDS
from ..dense_prefill.sm90_config import GROUP_ROWS, GROUPS, ITEM_STAGES
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout, Tile
from ..primitives.wgmma import K_STEP

KEY_STAGES = 2  # tiles of K, which is held from S to dQ


@dataclass(frozen=True)
class Geometry:
    """Numbers that depend on the columns of q and k."""

    d_qk: int

    @property
    def d_v(self) -> int:
        """Return the columns of v and out."""
        return HEAD_DIMS[self.d_qk]

    @property
    def tile_keys(self) -> int:
        """Return the keys of a tile."""
        return TILE_KEYS[SM90.name][self.d_qk]

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one warpgroup's rows of Q and dO."""
        return GROUP_ROWS * (self.d_qk + self.d_v) * ELEMENT_BYTES

    @property
    def key_bytes(self) -> int:
        """Return the bytes of one tile of K."""
        return self.tile_keys * self.d_qk * ELEMENT_BYTES

    @property
    def value_bytes(self) -> int:
        """Return the bytes of one tile of V."""
        return self.tile_keys * self.d_v * ELEMENT_BYTES

    @property
    def value_stages(self) -> int:
        """Return the tiles of V: as many as of K, or what shared memory has room for beside these, Q, dO and the barriers."""
        room = SM90.smem_per_block - SWIZZLE_PERIOD - GROUPS * self.row_bytes - KEY_STAGES * self.key_bytes
        return min(KEY_STAGES, room // self.value_bytes)

    @property
    def wgmma_per_tile(self) -> int:
        """Return the WGMMA instructions of a tile: S, dP and dQ. One role's code serves both warpgroups."""
        return (self.d_qk + self.d_v + self.tile_keys) // K_STEP

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of q, dout, k and v."""
        return SmemLayout((
            Tile("sQ", dtype, (GROUP_ROWS, self.d_qk, GROUPS)),
            Tile("sD", dtype, (GROUP_ROWS, self.d_v, GROUPS)),
            Tile("sK", dtype, (self.tile_keys, self.d_qk, KEY_STAGES)),
            Tile("sV", dtype, (self.tile_keys, self.d_v, self.value_stages)),
            Array("sItems", Int32, ITEM_STAGES * ITEM_WORDS, 16),
            Barriers("key_ready", KEY_STAGES),
            Barriers("key_free", KEY_STAGES),
            Barriers("value_ready", self.value_stages),
            Barriers("value_free", self.value_stages),
            Barriers("key_landed", 1),
            Barriers("query_ready", GROUPS),
            Barriers("query_free", GROUPS),
            Barriers("item_ready", ITEM_STAGES),
            Barriers("item_free", ITEM_STAGES),
        ))  # fmt: skip

    def tiles(self, keys: Int32) -> Int32:
        """Return the tiles of that many keys."""
        return (keys + (self.tile_keys - 1)) // self.tile_keys


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x stages."""

    sQ: cute.Tensor  # (64 rows, d_qk, 2): of each warpgroup
    sD: cute.Tensor  # (64 rows, d_v, 2)
    sK: cute.Tensor  # (tile keys, d_qk, 2)
    sV: cute.Tensor  # (tile keys, d_v, 2 or 1)
    sItems: cute.Pointer  # int32 (4, 8): items


@dataclass(frozen=True)
class Pipes:
    """The barriers of Geometry.smem. sm90.py says who arrives where."""

    key_ready: StageBarriers
    key_free: StageBarriers
    value_ready: StageBarriers
    value_free: StageBarriers
    key_landed: StageBarriers
    query_ready: StageBarriers
    query_free: StageBarriers
    item_ready: StageBarriers
    item_free: StageBarriers
