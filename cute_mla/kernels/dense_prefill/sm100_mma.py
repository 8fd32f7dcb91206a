"""The two matrix products of the SM100 kernel, as one thread issues them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32

from ...spec.dense_prefill import D_V
from ..parts import tcgen05
from .sm100_geometry import (
    BOX_BYTES,
    K_STEP,
    OUTPUT_COLUMN,
    ROW_BYTES,
    SLOT_BYTES,
    STEPS_PER_BOX,
    STEPS_PER_SLOT,
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

    def keys(self, slots: list[Int32]) -> list[Any]:
        """K of a key tile as operands, 64 columns each."""
        return [tcgen05.k_major(self.tiles.sKv + slot * SLOT_BYTES) for slot in slots]

    def values(self, slots: list[Int32]) -> list[Any]:
        """V of a key tile as operands, 64 keys each."""
        return [tcgen05.mn_major(self.tiles.sKv + slot * SLOT_BYTES, BOX_BYTES) for slot in slots]

    def scores(self, tile: int, keys: list[Any]) -> None:
        """S = Q K^T of a Q tile."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=TILE_KEYS)
        for box, operand in enumerate(keys):
            query = tcgen05.k_major(self.tiles.sQ + (tile * self.geometry.query_bytes + box * SLOT_BYTES))
            for step in range(STEPS_PER_BOX):
                tcgen05.multiply(
                    self.tmem + tile * TILE_KEYS,
                    query.advance_start_address(step * K_MAJOR_STEP),
                    operand.advance_start_address(step * K_MAJOR_STEP),
                    shape,
                    accumulate=box + step > 0,
                    group=tcgen05.OWN_GROUP,
                )

    def output(self, tile: int, values: list[Any], first: int, end: int, accumulate: bool | Boolean) -> None:
        """O += P V, or O = P V, for the keys first .. end - 1 of a key tile."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=D_V, transpose_b=True)
        probs = self.tmem + tile * TILE_KEYS
        for step in range(first // K_STEP, end // K_STEP):
            slot, step_in_slot = divmod(step, STEPS_PER_SLOT)
            tcgen05.multiply(
                self.tmem + (OUTPUT_COLUMN + tile * D_V),
                tcgen05.a_in_tmem(probs + step * TMEM_STEP),
                values[slot].advance_start_address(step_in_slot * MN_MAJOR_STEP),
                shape,
                accumulate=accumulate if step == 0 else True,
                group=tcgen05.OWN_GROUP,
            )
