"""The two matrix products of the SM100 decode kernels, as the even CTA of a pair issues them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32

from ...spec.split_plan import TILE_KEYS
from ..primitives import tcgen05
from ..primitives.tcgen05 import Keep
from .config import (
    BOX_BYTES,
    CHUNK_COLUMNS,
    OUTPUT_CHUNKS,
    OUTPUT_COLUMN,
    PAIR,
    PAIR_ROWS,
    QUERY_COLUMN,
    ROW_BYTES,
    SCORE_COLUMN,
    STEP_BYTES,
    STEP_COLUMNS,
    STEPS_PER_BOX,
    SUM_COLUMN,
    SUM_COLUMNS,
    Geometry,
    Tiles,
)


@dataclass(frozen=True)
class PairGemm:
    """The operands in both CTAs, which lie at the same addresses in each. One thread multiplies.

    dtype: of Q, K, V and P.
    """

    dtype: type[cutlass.Numeric]
    has_rope: bool
    tiles: Tiles
    tmem: Int32

    @property
    def geometry(self) -> Geometry:
        """That of the elements."""
        return self.tiles.geometry

    def keys(self, slot: Int32) -> Any:
        """K of a tile as operand."""
        return tcgen05.k_major(self.tiles.slot(slot))

    def probs_and_values(self, slot: Int32) -> tuple[Any, Any]:
        """P and V of a tile as operands."""
        base = self.tiles.slot(slot)
        return tcgen05.k_major(base + self.geometry.probs_offset), tcgen05.mn_major(base, BOX_BYTES)

    def scores(self, keys: Any, buffer: int | Int32 = 0) -> None:
        """S = Q K^T over the columns that each CTA holds, to one of the places for S: the lanes 0..63 and 64..127 get the two
        partial sums, since the even CTA's keys meet the Q in the lower lanes and the odd CTA's keys the Q in the upper ones."""
        shape = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * TILE_KEYS)
        for step in range(self.geometry.latent_steps + (self.geometry.rope_steps if self.has_rope else 0)):
            # the box after the latent ones holds the RoPE columns, so the steps run through without a seam
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            tcgen05.multiply(
                self.tmem + (SCORE_COLUMN - buffer * TILE_KEYS),
                tcgen05.a_in_tmem(self.tmem + (QUERY_COLUMN + step * STEP_COLUMNS)),
                keys.advance_start_address(box * BOX_BYTES + step_in_box * STEP_BYTES),
                shape,
                accumulate=step > 0,
            )

    def output(self, probs: Any, values: Any, accumulate: Boolean) -> None:
        """O += P V, or O = P V, for the 256 value columns of each CTA; and so the sum of P, where it is asked for."""
        wide = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * CHUNK_COLUMNS, transpose_b=True)
        narrow = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * SUM_COLUMNS)
        chunk_bytes = self.geometry.latent_boxes // OUTPUT_CHUNKS * BOX_BYTES
        for step in range(self.geometry.key_steps):
            row = step * self.geometry.step_keys * ROW_BYTES
            products = [(OUTPUT_COLUMN + chunk * CHUNK_COLUMNS, values, row + chunk * chunk_bytes, wide) for chunk in range(OUTPUT_CHUNKS)]
            if self.geometry.sums_probs:
                products.append((SUM_COLUMN, tcgen05.k_major(self.tiles.sOnes), 0, narrow))
            for i, (column, b, offset, product) in enumerate(products):
                # all multiply the same keys of P, which the tensor core may keep: that much less for the port of smem
                keep = Keep.FILL if i == 0 else Keep.LASTUSE if i == len(products) - 1 else Keep.USE
                tcgen05.multiply(
                    self.tmem + column,
                    probs.advance_start_address(step * STEP_BYTES),
                    b.advance_start_address(offset),
                    product,
                    accumulate=accumulate if step == 0 else True,
                    keep_a=keep,
                )
