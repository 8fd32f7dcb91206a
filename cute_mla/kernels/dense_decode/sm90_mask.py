"""Mask of dense decode on SM90: the keys that a query row sees."""

from __future__ import annotations

from itertools import product
from typing import Any

from cutlass import cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..attention.softmax import mask_keys
from ..primitives.arithmetic import computed_with
from ..primitives.wgmma import ROWS_PER_THREAD
from ..sm90.config import TileState
from ..sm90.score import TileScores, query_row
from ..sm90.valid_keys import mask_absent
from .operands import Operands
from .visible_keys import WORD_KEYS, visible_word


class EndMask:
    """Mask of keys past the end, and of causally hidden ones."""

    @cute.jit
    def apply(self, operands: Operands, tiles: Any, scores: TileScores, state: TileState, keys: KeyTile):
        """Set the scores of keys that a row does not see to -inf."""
        if keys.left - operands.args.hidden_keys < TILE_KEYS:
            rows = [query_row(scores.thread, row_half) for row_half in range(ROWS_PER_THREAD)]
            limits = [operands.key_limit(keys, operands.token_and_head(row)[0]) for row in rows]
            mask_keys(scores.scores, scores.thread, limits)


class KeyMask:
    """Mask of keys past the end, and of those that causal, tree_mask or a window hide."""

    @cute.jit
    def apply(self, operands: Operands, tiles: Any, scores: TileScores, state: TileState, keys: KeyTile):
        """Set the scores of keys that a row does not see to -inf."""
        if operands.hides_keys(keys):
            for row_half, first in product(range(ROWS_PER_THREAD), range(0, TILE_KEYS, WORD_KEYS)):
                # no registers are left to keep what follows from a row
                token, _ = operands.token_and_head(computed_with(query_row(scores.thread, row_half), keys.left))
                word = visible_word(operands, keys, token, first)
                mask_absent(scores.scores, scores.thread, {first // WORD_KEYS: word}, row_half)
