"""Mask of dense decode on SM100: the keys that a query row sees."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile, first_query_row
from ..primitives.smem import clear_rows
from ..sm100.score import LatentRowsSm100
from .operands import DenseDecodeOperands
from .visible_keys import WORD_KEYS, visible_word


@dataclass(frozen=True)
class DenseDecodeMaskSm100:
    """Mask of keys past the end, and of those that causal, tree_mask or a window hide.

    clears_unused: whether keys that no query token sees come as they are; else they are zeros.
    """

    clears_unused: bool

    @cute.jit
    def apply(self, operands: DenseDecodeOperands, rows: LatentRowsSm100, keys: KeyTile, tile: Int32):
        """Set the scores of keys that a row does not see to -inf."""
        if operands.hides_keys(keys):
            token, _ = operands.token_and_head(first_query_row() + rows.row)
            words = [visible_word(operands, keys, token, first) for first in range(0, TILE_KEYS, WORD_KEYS)]
            rows.mask_unseen(rows.own_bits(words))

    def clear_values(self, operands: DenseDecodeOperands, rows: LatentRowsSm100, stage: Int32, keys: KeyTile) -> None:
        """Zero the rows of keys that no query token sees: P is 0 there, but 0 times a NaN of an unused row is NaN."""
        if self.clears_unused:
            _clear_unused(operands, rows, stage, keys)


@cute.jit
def _clear_unused(operands: DenseDecodeOperands, rows: LatentRowsSm100, stage: Int32, keys: KeyTile):
    if operands.hides_values(keys):
        unseen = operands.unseen_keys(keys) if operands.key_masks else None
        thread = rows.half * TILE_ROWS + rows.row
        clear_rows(rows.smem.stage(stage), rows.smem.geometry.latent_boxes, keys.remaining, thread, unseen)
