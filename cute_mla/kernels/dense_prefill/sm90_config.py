"""Tile geometry, shared memory, barriers and registers of the SM90 dense prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from ...manifest import Role
from ...spec.arch import SM90
from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, TILE_ROWS
from ...spec.mla import ELEMENT_BYTES
from ..attention.cta import Arrivals, both_ways
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout, Tile
from ..primitives.wgmma import K_STEP
from .tiles import DensePrefillTiles

GROUPS = 2  # of warps that compute, each with its own query rows
GROUP_ROWS = TILE_ROWS[SM90.name] // GROUPS

WARPGROUP = 128
WARPS_PER_GROUP = WARPGROUP // 32
THREADS = (1 + GROUPS) * WARPGROUP
KEY_WARP, VALUE_WARP, QUERY_WARP, ITEM_WARP = 0, 1, 2, 3  # of the first warpgroup
ITEM_READERS = 3 + GROUPS * WARPS_PER_GROUP  # warps that take items
ITEM_STAGES = 4  # items that may be posted ahead
RANK_KEYS = TILE_ROWS[SM90.name]  # unit of an item's rank: under a causal mask, the keys that a block sees beyond those of the block before
RANK_BITS = RANK_KEYS.bit_length() - 1

COLUMNS_AT_ONCE = 128  # of a row of out
WIDE_COLUMNS_AT_ONCE = 32  # where O has 128 registers of a lane

TURN_BARRIER = 1  # and 2: bar.sync ids, of the warpgroup whose turn it is; 0 is the CTA's
TURN_BARRIERS = tuple((f"turn_{group}", TURN_BARRIER + group) for group in range(GROUPS))
LOAD_ROLES = (Role("keys", KEY_WARP, 1), Role("values", VALUE_WARP, 1), Role("queries", QUERY_WARP, 1), Role("items", ITEM_WARP, 1))
ATTEND_ROLES = tuple(Role(f"attend_{group}", (1 + group) * WARPS_PER_GROUP, WARPS_PER_GROUP) for group in range(GROUPS))

BOX_BYTES = BOX_ROWS * BOX_COLUMNS * ELEMENT_BYTES


@dataclass(frozen=True)
class DensePrefillSm90Geometry(DensePrefillTiles):
    """Numbers of a variant."""

    arch = SM90

    @property
    def wide_output(self) -> bool:
        """Return whether O leaves few registers: out is rounded in pieces."""
        return self.config.d_v > COLUMNS_AT_ONCE

    @property
    def written_columns(self) -> int:
        """Return the columns of a row of out that are rounded before they are written."""
        return WIDE_COLUMNS_AT_ONCE if self.wide_output else COLUMNS_AT_ONCE

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one warpgroup's rows: Q."""
        return GROUP_ROWS * self.config.d_qk * ELEMENT_BYTES

    @property
    def stages(self) -> tuple[int, int]:
        """Return the tiles of K, and of V, as many as shared memory has room for with Q and the barriers."""
        stages = (SM90.smem_per_block - SWIZZLE_PERIOD - GROUPS * self.row_bytes) // (self.key_bytes + self.value_bytes)
        return stages, stages

    @property
    def wgmma_per_tile(self) -> tuple[int, ...]:
        """Return the WGMMA instructions of S and of P V, in steps of 16 columns and of 16 keys. One role's code serves both warpgroups."""
        return self.config.d_qk // K_STEP, self.tile_keys // K_STEP

    def row_tiles(self, dtype: type[cutlass.Numeric]) -> tuple[Tile, ...]:
        """Return the rows of an item in shared memory."""
        return (Tile("sQ", dtype, (GROUP_ROWS, self.config.d_qk, GROUPS)),)

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of q, k and v."""
        key_stages, value_stages = self.stages
        return SmemLayout((
            *self.row_tiles(dtype),
            Tile("sK", dtype, (self.tile_keys, self.config.d_qk, key_stages)),
            Tile("sV", dtype, (self.tile_keys, self.config.d_v, value_stages)),
            Array("sItems", Int32, ITEM_STAGES * self.item_words, 16),
            *both_ways("key", key_stages),
            *both_ways("value", value_stages),
            Barriers("tail_landed", 1),
            *both_ways("query", GROUPS),
            *both_ways("item", ITEM_STAGES),
        ))  # fmt: skip


@dataclass(frozen=True)
class DensePrefillSm90Smem:
    """Shared memory, as DensePrefillSm90Geometry.smem lays it out. Tensors are rows x columns x stages. sm90.py says who arrives where."""

    sQ: cute.Tensor  # (64 rows, d_qk, 2): of each warpgroup
    sK: cute.Tensor  # (keys, d_qk, stages)
    sV: cute.Tensor  # (keys, d_v, stages)
    sItems: cute.Pointer  # int32 (4, item_words): items
    key_ready: StageBarriers
    key_free: StageBarriers
    value_ready: StageBarriers
    value_free: StageBarriers
    tail_landed: StageBarriers
    query_ready: StageBarriers
    query_free: StageBarriers
    item_ready: StageBarriers
    item_free: StageBarriers

    def arrivals(self) -> tuple[Arrivals, ...]:
        """Return the arrivals of every barrier."""
        return (
            (1, (self.key_ready, self.value_ready, self.tail_landed, self.query_ready, self.item_ready)),
            (GROUPS * WARPS_PER_GROUP, (self.key_free, self.value_free)),
            (WARPS_PER_GROUP, (self.query_free,)),
            (ITEM_READERS, (self.item_free,)),
        )
