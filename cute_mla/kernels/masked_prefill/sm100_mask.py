"""The caller's mask in the softmax role of the SM100 kernel, where a thread has a row: four words of it for a tile of 128 keys.

They are loaded a tile ahead, since the scores of a tile may be there when those of the one before are done with.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.masked_prefill import MASK_WORD_KEYS
from ..dense_prefill.operands import WorkItem
from ..dense_prefill.sm100_config import TILE_KEYS
from ..primitives.integers import clip
from ..primitives.registers import computed_with
from .operands import KeyMask, MaskRows, VisibleTiles

TILE_WORDS = TILE_KEYS // MASK_WORD_KEYS


@dataclass(frozen=True)
class RowMask(KeyMask):
    """The mask of a call."""

    mask: MaskRows

    def rows_of(self, item: WorkItem, thread: Int32, walk: VisibleTiles) -> RowWords:  # type: ignore[override]  # its items have no other
        """Return the mask of a row of an item's block, along a walk, whose first words are being loaded. thread: the row."""
        rWords, rNext = (cute.make_rmem_tensor(cute.make_layout(TILE_WORDS), Int32) for _ in range(2))
        words = RowWords(walk, self.mask, self.mask.token(item, thread), self.mask.last_word(item), rWords, rNext)
        words.load_next()
        return words


@dataclass(frozen=True)
class RowWords(KeyMask):
    """The mask of a thread's row.

    token: of the row. last: word with bits. rWords: words of the tile that the walk is at. rNext: of the tile behind it.
    """

    walk: VisibleTiles
    mask: MaskRows
    token: Int32
    last: Int32
    rWords: cute.Tensor
    rNext: cute.Tensor

    def load(self) -> None:
        """Take the words of the tile that the walk is at."""
        for i in range(TILE_WORDS):
            self.rWords[i] = self.rNext[i]

    def load_next(self) -> None:
        """Start to load the words of the tile behind the one that the walk is at; some words if there is none.

        Without a branch: at its end the words would be moved, and waited for.
        """
        place = self.walk.next_tile() * TILE_WORDS
        start = self.mask.row_of(computed_with(self.token, place))  # an address takes registers that the loop does not have
        for i in range(TILE_WORDS):
            self.rNext[i] = (start + clip(place + i, self.last)).load()

    def hide(self, scores: cute.Tensor, first: int = 0) -> None:
        """Set the scores of hidden keys to -inf, by selects, so that NaN vanishes."""
        words = [self.rWords[i] for i in range(TILE_WORDS)]
        if first:  # a lane's own word: ptxas would keep 32 predicates of the first time, which it packs bit by bit
            words = [cute.arch.shuffle_sync(word, cute.arch.lane_idx()) for word in words]
        for i in range(first, TILE_KEYS):
            word, bit = divmod(i, MASK_WORD_KEYS)
            seen = (words[word] & Int32(1 << bit)) != 0
            scores[i] = cutlass.select_(seen, scores[i], -Float32.inf)
        if first == 0:  # its words but the last are not needed any more
            self.load_next()
