"""Tile geometry, shared memory, barriers and registers of the SM90 dense prefill kernel."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from ...spec.arch import SM90
from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, D_V, TILE_ROWS
from ...spec.mla import ELEMENT_BYTES
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, SmemLayout, Tile
from ..primitives.wgmma import K_STEP
from .board import ITEM_WORDS

TILE_KEYS = 128
TILE_KEY_BITS = TILE_KEYS.bit_length() - 1
GROUPS = 2  # of warps that compute, each with its own query rows
GROUP_ROWS = TILE_ROWS[SM90.name] // GROUPS

WARPGROUP = 128
WARPS_PER_GROUP = WARPGROUP // 32
THREADS = (1 + GROUPS) * WARPGROUP
KEY_WARP, VALUE_WARP, QUERY_WARP, ITEM_WARP = 0, 1, 2, 3  # of the first warpgroup
ITEM_STAGES = 4  # items that may be posted ahead

LOAD_REGISTERS = 40  # a lane; all threads start with 168
COMPUTE_REGISTERS = 232

TURN_BARRIER = 1  # and 2: bar.sync ids, of the warpgroup whose turn it is; 0 is the CTA's
STAGE_BARRIER = 3  # and 4: of one warpgroup

BOX_BYTES = BOX_ROWS * BOX_COLUMNS * ELEMENT_BYTES


@dataclass(frozen=True)
class Geometry:
    """Numbers that depend on the columns of q and k."""

    d_qk: int

    @property
    def query_bytes(self) -> int:
        """Return the bytes of one warpgroup's rows of Q."""
        return GROUP_ROWS * self.d_qk * ELEMENT_BYTES

    @property
    def key_bytes(self) -> int:
        """Return the bytes of one tile of K."""
        return TILE_KEYS * self.d_qk * ELEMENT_BYTES

    @property
    def value_bytes(self) -> int:
        """Return the bytes of one tile of V."""
        return TILE_KEYS * D_V * ELEMENT_BYTES

    @property
    def stages(self) -> int:
        """Return the tiles of K, and as many of V, that shared memory has room for beside Q and the barriers."""
        return (SM90.smem_per_block - SWIZZLE_PERIOD - GROUPS * self.query_bytes) // (self.key_bytes + self.value_bytes)

    @property
    def wgmma_per_tile(self) -> tuple[int, int]:
        """Return the WGMMA instructions of S, in steps of 64 x 128 x 16, and of P V. One role's code serves both warpgroups."""
        return self.d_qk // K_STEP, TILE_KEYS // K_STEP

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of q, k and v."""
        return SmemLayout((
            Tile("sQ", dtype, (GROUP_ROWS, self.d_qk, GROUPS)),
            Tile("sK", dtype, (TILE_KEYS, self.d_qk, self.stages)),
            Tile("sV", dtype, (TILE_KEYS, D_V, self.stages)),
            Array("sItems", Int32, ITEM_STAGES * ITEM_WORDS, 16),
            Barriers("key_ready", self.stages),
            Barriers("key_free", self.stages),
            Barriers("value_ready", self.stages),
            Barriers("value_free", self.stages),
            Barriers("value_landed", 1),
            Barriers("query_ready", GROUPS),
            Barriers("query_free", GROUPS),
            Barriers("item_ready", ITEM_STAGES),
            Barriers("item_free", ITEM_STAGES),
        ))  # fmt: skip


@dataclass(frozen=True)
class Tiles:
    """Shared memory as tensors: rows x columns x stages."""

    sQ: cute.Tensor  # (64 rows, d_qk, 2): of each warpgroup
    sK: cute.Tensor  # (128 keys, d_qk, stages)
    sV: cute.Tensor  # (128 keys, 128 columns, stages)
    sItems: cute.Pointer  # int32 (4, 8): items


@dataclass(frozen=True)
class Pipes:
    """The barriers of Geometry.smem. sm90.py says who arrives where."""

    key_ready: StageBarriers
    key_free: StageBarriers
    value_ready: StageBarriers
    value_free: StageBarriers
    value_landed: StageBarriers
    query_ready: StageBarriers
    query_free: StageBarriers
    item_ready: StageBarriers
    item_free: StageBarriers


def key_tiles(keys: Int32) -> Int32:
    """Return the tiles of that many keys."""
    return (keys + (TILE_KEYS - 1)) // TILE_KEYS
