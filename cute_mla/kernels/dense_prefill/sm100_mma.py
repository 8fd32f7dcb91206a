"""The two matrix products of the SM100 kernel, as one thread issues them."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32

from ...spec.dense_prefill import D_V
from ..parts import tcgen05
from .sm100_geometry import (
    BOX_BYTES,
    HALF_KEYS,
    K_STEP,
    OUTPUT_COLUMN,
    ROW_BYTES,
    SLOT_BYTES,
    STEPS_PER_BOX,
    STEPS_PER_HALF,
    TILE_KEYS,
    TILE_ROWS,
    Geometry,
    Tiles,
)

K_MAJOR_STEP = K_STEP * 2  # bytes of 16 elements
MN_MAJOR_STEP = K_STEP * ROW_BYTES  # bytes of 16 rows
TMEM_STEP = K_STEP // 2  # columns of 16 elements


@dataclass(frozen=True)
class TileGemm:
    """The operands."""

    dtype: type[cutlass.Numeric]
    geometry: Geometry
    tiles: Tiles
    tmem: Int32

    def scores(self, tile: int, slots: list[Int32]) -> None:
        """S = Q K^T of a Q tile with the keys in these slots, 64 columns each."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=TILE_KEYS)
        for box, slot in enumerate(slots):
            query = tcgen05.k_major(self.tiles.sQ + (tile * self.geometry.query_bytes + box * SLOT_BYTES))
            keys = tcgen05.k_major(self.tiles.sKv + slot * SLOT_BYTES)
            for step in range(STEPS_PER_BOX):
                tcgen05.multiply(
                    self.tmem + tile * TILE_KEYS,
                    query.advance_start_address(step * K_MAJOR_STEP),
                    keys.advance_start_address(step * K_MAJOR_STEP),
                    shape,
                    accumulate=box + step > 0,
                    group=tcgen05.OWN_GROUP,
                )

    def output(self, tile: int, half: int, slot: Int32, accumulate: bool | Boolean) -> None:
        """O += P V, or O = P V, for half of the keys, whose values are in the slot."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=D_V, transpose_b=True)
        values = tcgen05.mn_major(self.tiles.sKv + slot * SLOT_BYTES, BOX_BYTES)
        probs = self.tmem + (tile * TILE_KEYS + half * HALF_KEYS // 2)
        for step in range(STEPS_PER_HALF):
            tcgen05.multiply(
                self.tmem + (OUTPUT_COLUMN + tile * D_V),
                tcgen05.a_in_tmem(probs + step * TMEM_STEP),
                values.advance_start_address(step * MN_MAJOR_STEP),
                shape,
                accumulate=accumulate if step == 0 else True,
                group=tcgen05.OWN_GROUP,
            )
