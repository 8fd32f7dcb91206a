"""Tile geometry, shared memory and barriers of the SM90 dK and dV kernel. Warps, registers and named barriers are the forward's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32

from ...spec.arch import SM90
from ...spec.dense_prefill_dq import STATISTIC_BYTES, STATISTICS
from ...spec.mla import ELEMENT_BYTES
from ..attention.cta import both_ways
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout, Tile
from ..primitives.wgmma import K_STEP, TILE_ROWS
from .load import ITEM_WORDS, ITEMS_AHEAD
from .operands import DkdvGeometry, DkdvSmem

GROUP_KEYS = TILE_ROWS  # of one warpgroup
LOAD_REGISTERS = 24  # a lane; all threads start with 168
COMPUTE_REGISTERS = 240
BOX_ALIGNMENT = 128  # bytes; of what TMA writes without swizzle

# warps of the first warpgroup
QUERY_WARP, DOUT_WARP, KEY_WARP = 0, 1, 2


@dataclass(frozen=True)
class DkdvSm90Geometry(DkdvGeometry):
    """Numbers of a variant."""

    arch = SM90.name

    @property
    def shares_keys(self) -> bool:
        """Return whether both warpgroups have all keys of an item, and one of its sums each."""
        return self.item_keys == GROUP_KEYS

    @property
    def query_bytes(self) -> int:
        """Return the bytes of one tile of Q and its statistics."""
        return self.tile_queries * (self.config.d_qk * ELEMENT_BYTES + STATISTICS * STATISTIC_BYTES)

    @property
    def dout_bytes(self) -> int:
        """Return the bytes of one tile of dO."""
        return self.tile_queries * self.config.d_v * ELEMENT_BYTES

    @property
    def stages(self) -> int:
        """Return the tiles of Q, and as many of dO, that shared memory has room for with K, V and the barriers."""
        return (SM90.smem_per_block - SWIZZLE_PERIOD - self.item_bytes) // (self.query_bytes + self.dout_bytes)

    @property
    def wgmma_per_tile(self) -> int:
        """Return the WGMMA instructions of a tile: S, dP, dV and dK. One role's code serves both warpgroups."""
        return (self.config.d_qk + self.config.d_v + 2 * self.tile_queries) // K_STEP

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of q, dout, k and v."""
        parts, columns = self.item_keys // GROUP_KEYS, (self.config.d_qk, self.config.d_v)
        probs = (
            (Array("probs", dtype, self.stages * GROUP_KEYS * self.tile_queries, BOX_ALIGNMENT), Barriers("probs_ready", self.stages))
            if self.shares_keys
            else ()
        )
        return SmemLayout((
            *(Tile(name, dtype, (GROUP_KEYS, width, parts)) for name, width in zip(("sK", "sV"), columns, strict=True)),
            *(Tile(name, dtype, (self.tile_queries, width, self.stages)) for name, width in zip(("sQ", "sD"), columns, strict=True)),
            Array("statistics", Float32, self.stages * STATISTICS * self.tile_queries, BOX_ALIGNMENT),
            Array("items", Int32, ITEMS_AHEAD * ITEM_WORDS),
            *both_ways("query", self.stages),
            *both_ways("dout", self.stages),
            Barriers("query_landed", 1),
            Barriers("dout_landed", 1),
            *both_ways("key", 1),
            *probs,
        ))  # fmt: skip


@dataclass(frozen=True)
class DkdvSm90Smem(DkdvSmem):
    """Shared memory, as DkdvSm90Geometry.smem lays it out. Of K and V, a part for each warpgroup, or one for both."""

    probs: Any  # where the warpgroups share the keys: [stages, 4, 128, 8], P^T rounded: 8 elements of a thread, of all threads, four times
    probs_ready: Any  # likewise
