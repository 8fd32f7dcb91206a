"""Mask of dense decode on SM100: the keys that a query row sees."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..primitives.smem import clear_rows
from ..sm100.config import HALF_KEYS
from ..sm100.score import LatentRowsSm100
from .operands import DenseDecodeOperands
from .visible_keys import WORD_KEYS, visible_word


@dataclass(frozen=True)
class DenseDecodeMaskSm100:
    """Mask of keys past the end, and of those that causal, tree_mask or a window hide.

    clears_unused: whether keys that no query token sees come as they are; else they are zeros. own_keys_first: whether a CTA's half of the
    keys comes first in its boxes of values.
    """

    clears_unused: bool
    own_keys_first: bool = False

    @cute.jit
    def apply(self, operands: DenseDecodeOperands, rows: LatentRowsSm100, keys: KeyTile, tile: Int32):
        """Set the scores of keys that a row does not see to -inf."""
        if operands.hides_keys(keys):
            token, _ = operands.token_and_head(operands.row_at(rows.row, keys.req))
            words = [visible_word(operands, keys, token, first) for first in range(0, TILE_KEYS, WORD_KEYS)]
            rows.mask_unseen(rows.own_bits(words))

    def clear_values(self, operands: DenseDecodeOperands, rows: LatentRowsSm100, stage: Int32, keys: KeyTile) -> None:
        """Zero the rows of keys that no query token sees: P is 0 there, but 0 times a NaN of an unused row is NaN."""
        if self.clears_unused:
            flip = cute.arch.block_idx_in_cluster() * HALF_KEYS if self.own_keys_first else 0
            _clear_unused(operands, rows, stage, keys, flip)


@cute.jit
def _clear_unused(operands: DenseDecodeOperands, rows: LatentRowsSm100, stage: Int32, keys: KeyTile, flip: int | Int32):
    if operands.hides_values(keys):
        unseen = operands.unseen_keys(keys) if operands.key_masks else None
        clear_rows(rows.smem.stage(stage), rows.smem.geometry.rope_box, keys.remaining, rows.thread, unseen, flip)
