"""Tile geometry, shared memory and barriers of the SM90 dK and dV kernel. Warps, registers and named barriers are the forward's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.arch import SM90
from ...spec.dense_prefill import HEAD_DIMS
from ...spec.dense_prefill_dkdv import TILE_KEYS, TILE_QUERIES
from ...spec.dense_prefill_dq import STATISTIC_BYTES, STATISTICS
from ...spec.mla import ELEMENT_BYTES
from ..primitives.integers import larger
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout, Tile
from ..primitives.wgmma import K_STEP, TILE_ROWS
from .operands import KeyItem
from .posted_item import ITEM_WORDS, ITEMS_AHEAD

GROUP_KEYS = TILE_ROWS  # of one warpgroup
LOAD_REGISTERS = 24  # a lane; all threads start with 168
COMPUTE_REGISTERS = 240
BOX_ALIGNMENT = 128  # bytes; of what TMA writes without swizzle

# warps of the first warpgroup
QUERY_WARP, SLOPE_WARP, KEY_WARP = 0, 1, 2


@dataclass(frozen=True)
class Geometry:
    """Numbers that depend on the columns of q and k."""

    d_qk: int

    @property
    def d_v(self) -> int:
        """Return the columns of v and dout."""
        return HEAD_DIMS[self.d_qk]

    @property
    def item_keys(self) -> int:
        """Return the keys of a work item."""
        return TILE_KEYS[SM90.name][self.d_qk]

    @property
    def shares_keys(self) -> bool:
        """Return whether both warpgroups have all keys of an item, and one of its sums each."""
        return self.item_keys == GROUP_KEYS

    @property
    def tile_queries(self) -> int:
        """Return the query rows of a tile."""
        return TILE_QUERIES[SM90.name][self.d_qk]

    @property
    def item_bytes(self) -> int:
        """Return the bytes of an item's K and V."""
        return self.item_keys * (self.d_qk + self.d_v) * ELEMENT_BYTES

    @property
    def query_bytes(self) -> int:
        """Return the bytes of one tile of Q and its statistics."""
        return self.tile_queries * (self.d_qk * ELEMENT_BYTES + STATISTICS * STATISTIC_BYTES)

    @property
    def slope_bytes(self) -> int:
        """Return the bytes of one tile of dO."""
        return self.tile_queries * self.d_v * ELEMENT_BYTES

    @property
    def stages(self) -> int:
        """Return the tiles of Q, and as many of dO, that shared memory has room for beside K, V and the barriers."""
        return (SM90.smem_per_block - SWIZZLE_PERIOD - self.item_bytes) // (self.query_bytes + self.slope_bytes)

    @property
    def wgmma_per_tile(self) -> int:
        """Return the WGMMA instructions of a tile: S, dP, dV and dK. One role's code serves both warpgroups."""
        return (self.d_qk + self.d_v + 2 * self.tile_queries) // K_STEP

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of q, dout, k and v."""
        parts = self.item_keys // GROUP_KEYS
        probs = (
            (Array("probs", dtype, self.stages * GROUP_KEYS * self.tile_queries, BOX_ALIGNMENT), Barriers("probs_ready", self.stages))
            if self.shares_keys
            else ()
        )
        return SmemLayout((
            Tile("sK", dtype, (GROUP_KEYS, self.d_qk, parts)),
            Tile("sV", dtype, (GROUP_KEYS, self.d_v, parts)),
            Tile("sQ", dtype, (self.tile_queries, self.d_qk, self.stages)),
            Tile("sD", dtype, (self.tile_queries, self.d_v, self.stages)),
            Array("statistics", Float32, self.stages * STATISTICS * self.tile_queries, BOX_ALIGNMENT),
            Array("items", Int32, ITEMS_AHEAD * ITEM_WORDS),
            Barriers("query_ready", self.stages),
            Barriers("query_free", self.stages),
            Barriers("slope_ready", self.stages),
            Barriers("slope_free", self.stages),
            Barriers("query_landed", 1),
            Barriers("slope_landed", 1),
            Barriers("key_ready", 1),
            Barriers("key_free", 1),
            *probs,
        ))  # fmt: skip

    def tiles(self, item: KeyItem) -> Int32:
        """Return the tiles of the query rows of one head that see the item."""
        rows = larger(item.queries - item.first_query, Int32(0))
        return (rows + (self.tile_queries - 1)) // self.tile_queries


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x stages."""

    sK: cute.Tensor  # (64 keys, d_qk, 2): of each warpgroup, or 1: of both
    sV: cute.Tensor  # (64 keys, d_v, 2 or 1)
    sQ: cute.Tensor  # (tile queries, d_qk, stages)
    sD: cute.Tensor  # (tile queries, d_v, stages)
    statistics: cute.Pointer  # fp32 [stages, 2, tile queries]: lse in log2 units, delta
    items: cute.Pointer  # int32 [2, fields]: a PostedItem each, of turns by their parity
    probs: Any  # where the warpgroups share the keys: [stages, 4, 128, 8], P^T rounded: 8 elements of a thread, of all threads, four times


@dataclass(frozen=True)
class Pipes:
    """The barriers of Geometry.smem. sm90.py says who arrives where."""

    query_ready: StageBarriers
    query_free: StageBarriers
    slope_ready: StageBarriers
    slope_free: StageBarriers
    query_landed: StageBarriers
    slope_landed: StageBarriers
    key_ready: StageBarriers
    key_free: StageBarriers
    probs_ready: Any  # likewise
