"""Tile geometry and shared memory of the SM90 dQ kernel. Warps, registers and barriers are the forward's."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import cute

from ...spec.arch import SM90
from ...spec.dense_prefill_dq import TILE_KEYS
from ...spec.mla import ELEMENT_BYTES
from ..dense_prefill.sm90_config import GROUP_ROWS, GROUPS, DensePrefillSm90Geometry, DensePrefillSm90Smem
from ..primitives.smem import SWIZZLE_PERIOD, Tile
from ..primitives.wgmma import K_STEP

KEY_STAGES = 2  # tiles of K, which is held from S to dQ


@dataclass(frozen=True)
class DqSm90Geometry(DensePrefillSm90Geometry):
    """Numbers of a variant."""

    @property
    def tile_keys(self) -> int:
        """Return the keys of a tile, and of a TMA box."""
        return TILE_KEYS[SM90.name][self.config.d_qk]

    @property
    def box_keys(self) -> int:
        """Return the keys of a TMA box."""
        return self.tile_keys

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one warpgroup's rows: Q and dO."""
        return GROUP_ROWS * (self.config.d_qk + self.config.d_v) * ELEMENT_BYTES

    @property
    def stages(self) -> tuple[int, int]:
        """Return the tiles of K, and of V: as many, or what shared memory has room for with Q, dO and the barriers."""
        room = SM90.smem_per_block - SWIZZLE_PERIOD - GROUPS * self.row_bytes - KEY_STAGES * self.key_bytes
        return KEY_STAGES, min(KEY_STAGES, room // self.value_bytes)

    @property
    def wgmma_per_tile(self) -> tuple[int, ...]:
        """Return the WGMMA instructions of S, dP and dQ. One role's code serves both warpgroups."""
        return self.config.d_qk // K_STEP, self.config.d_v // K_STEP, self.tile_keys // K_STEP

    def row_tiles(self, dtype: type[cutlass.Numeric]) -> tuple[Tile, ...]:
        """Return the rows of an item in shared memory."""
        return (*DensePrefillSm90Geometry.row_tiles(self, dtype), Tile("sD", dtype, (GROUP_ROWS, self.config.d_v, GROUPS)))


@dataclass(frozen=True)
class DqSm90Smem(DensePrefillSm90Smem):
    """Shared memory, as DqSm90Geometry.smem lays it out. sm90.py says who arrives where."""

    sD: cute.Tensor  # dO: (64 rows, d_v, 2)
