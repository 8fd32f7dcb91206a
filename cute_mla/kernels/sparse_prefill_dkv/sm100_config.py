"""Warps, tensor memory and shared memory of sparse_prefill_dkv on Blackwell."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import ELEMENT_BYTES
from ..attention.cta import TMEM_COLUMNS, both_ways
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, SmemLayout
from .tiles import DkvGeometry, DkvSmem

ROW_WARPS = 4  # warps 0..3: a quarter of the lanes of tensor memory each
LOAD_WARP, MMA_WARP = ROW_WARPS, ROW_WARPS + 1
THREADS = 32 * (MMA_WARP + 1)

K_STEP = 16  # heads of one product
STEP_BYTES = K_STEP * BOX_COLUMNS * ELEMENT_BYTES  # of a box
# A part of a tile's rows is the sum of one chain of products. Its second half of columns lies in the lanes 64..127
PART_COLUMNS = 256
PART_HALVES = 2
PART_TMEM = PART_COLUMNS // PART_HALVES
PARTS = TMEM_COLUMNS // PART_TMEM  # that tensor memory has room for
TMEM_LANE = 1 << 16


@dataclass(frozen=True)
class DkvSm100Geometry(DkvGeometry):
    """Numbers of a variant."""

    @property
    def products(self) -> int:
        """Return the matrix products of a tile."""
        return self.config.head_tiles * TILE_ROWS // K_STEP * (2 * self.columns // PART_COLUMNS + int(self.has_rope))

    def smem(self, dtype: type[cutlass.Numeric]) -> SmemLayout:
        """Return the layout of shared memory. dtype: of all tensors."""
        return SmemLayout((*self.fields(dtype), *both_ways("part", PARTS), Array("tmem_cell", Int32, 1)))


@dataclass(frozen=True)
class DkvSm100Smem(DkvSmem):
    """Shared memory, as DkvSm100Geometry.smem lays it out."""

    part_ready: StageBarriers
    part_free: StageBarriers
    tmem_cell: cute.Pointer  # int32: address of the tensor memory
