"""Warps, registers and instruction counts of sparse_prefill_dkv on Hopper."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass

from ...spec.dense_decode import TILE_ROWS
from ..primitives.smem import SmemLayout
from ..primitives.wgmma import K_STEP
from ..sm90.cta import WARPS_PER_GROUP
from .tiles import DkvGeometry

GROUPS = 2  # warpgroups that multiply
THREADS = (1 + GROUPS) * 32 * WARPS_PER_GROUP
LOAD_REGISTERS = 40  # a lane; all threads start with 168
MULTIPLY_REGISTERS = 232
LOAD_WARP = 0


@dataclass(frozen=True)
class DkvSm90Geometry(DkvGeometry):
    """Numbers of a variant. Each warpgroup has half of the CTA's columns that are values, the first one those of RoPE as well."""

    @property
    def group_columns(self) -> int:
        """Return the columns of values of a warpgroup."""
        return self.columns // GROUPS

    @property
    def wgmma_per_tile(self) -> int:
        """Return the WGMMA instructions of a tile: one warpgroup's code has the RoPE columns, the other's has not."""
        steps = self.config.head_tiles * TILE_ROWS // K_STEP
        return steps * (2 * GROUPS + int(self.has_rope))

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of all tensors."""
        return SmemLayout(self.fields(dtype))
