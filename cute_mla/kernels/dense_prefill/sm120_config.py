"""Tile geometry, shared memory, barriers and registers of the SM120 dense prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from ...manifest import Role
from ...spec.arch import SM120
from ...spec.dense_prefill import TILE_ROWS
from ...spec.mla import ELEMENT_BYTES
from ..attention.cta import Arrivals, both_ways
from ..primitives.copies import CHUNK
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout, Tile
from ..primitives.warp_products import BOX_COLUMNS, K, M, N
from .sm90_config import ITEM_STAGES
from .tiles import DensePrefillTiles

BLOCK_ROWS = TILE_ROWS[SM120.name]
LANES = 32
LOAD_WARPS = 4  # a warpgroup, whose registers the others get
MATH_WARPS = BLOCK_ROWS // M
TURN_WARPS = 4  # one of each scheduler
QUERY_COLUMNS = 192  # of Q in registers, at most
STEP_BYTES = MATH_WARPS * LANES * CHUNK  # of 16 columns of Q, of all lanes
THREADS = (LOAD_WARPS + MATH_WARPS) * LANES
KEY_WARP, VALUE_WARP, ITEM_WARP = range(3)
ITEM_READERS = 2 + MATH_WARPS  # warps that take items
ROLES = (
    Role("keys", KEY_WARP, 1), Role("values", VALUE_WARP, 1), Role("items", ITEM_WARP, 1), Role("attend", LOAD_WARPS, MATH_WARPS),
)  # fmt: skip


@dataclass(frozen=True)
class DensePrefillSm120Geometry(DensePrefillTiles):
    """Numbers of a variant. A tile of K is also one of Q, of as many rows."""

    arch = SM120

    @property
    def box_bytes(self) -> int:
        """Return the bytes of 64 columns of a tile."""
        return self.tile_keys * BOX_COLUMNS * ELEMENT_BYTES

    @property
    def query_uses(self) -> int:
        """Return the stages of K that Q of an item takes."""
        return BLOCK_ROWS // self.tile_keys

    @property
    def kept_steps(self) -> int:
        """Return the steps of 16 columns of Q, the last ones, for which there are no registers: lanes keep them in shared memory."""
        return max(self.config.d_qk - QUERY_COLUMNS, 0) // K

    @property
    def stages(self) -> int:
        """Return the tiles of K, and of V, as many as shared memory has room for with the barriers."""
        return (SM120.smem_per_block - SWIZZLE_PERIOD - self.kept_steps * STEP_BYTES) // (self.key_bytes + self.value_bytes)

    @property
    def products(self) -> int:
        """Return the products of a tile in a warp's code: S in steps of 16 columns, and P V in steps of 16 keys."""
        return self.config.d_qk // K * (self.tile_keys // N) + self.tile_keys // K * (self.config.d_v // N)

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of q, k and v."""
        return SmemLayout((
            Tile("sK", dtype, (self.tile_keys, self.config.d_qk, self.stages)),
            Tile("sV", dtype, (self.tile_keys, self.config.d_v, self.stages)),
            *((Array("sQ", Int32, self.kept_steps * STEP_BYTES // 4, 128),) if self.kept_steps else ()),
            Array("sItems", Int32, ITEM_STAGES * self.item_words, 16),
            *both_ways("key", self.stages),
            *both_ways("value", self.stages),
            Barriers("tail_landed", 1),
            *both_ways("item", ITEM_STAGES),
        ))  # fmt: skip


@dataclass(frozen=True)
class DensePrefillSm120Smem:
    """Shared memory, as DensePrefillSm120Geometry.smem lays it out. Tensors: rows x columns x stages. sm120.py says who arrives where."""

    sK: cute.Tensor  # (keys, d_qk, stages): keys, or rows of Q
    sV: cute.Tensor  # (keys, d_v, stages)
    sItems: cute.Pointer  # int32 (4, item_words): items
    key_ready: StageBarriers
    key_free: StageBarriers
    value_ready: StageBarriers
    value_free: StageBarriers
    tail_landed: StageBarriers
    item_ready: StageBarriers
    item_free: StageBarriers
    sQ: cute.Pointer | None = None  # int32 (kept_steps, threads that attend, 4)

    def arrivals(self) -> tuple[Arrivals, ...]:
        """Return the arrivals of every barrier."""
        return (
            (1, (self.key_ready, self.value_ready, self.tail_landed, self.item_ready)),
            (MATH_WARPS, (self.key_free, self.value_free)),
            (ITEM_READERS, (self.item_free,)),
        )
