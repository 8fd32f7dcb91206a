"""The caller's mask in the softmax role of the SM100 kernel, where a thread has a row: four words of it for a tile of 128 keys.

They are loaded before the scores of the tile are waited for, which come after S, so that the loads are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import ClassVar

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.masked_prefill import MASK_WORD_KEYS
from ..attention.softmax import RESCALE_LOG2
from ..dense_prefill.operands import DensePrefillItem, EveryKey
from ..dense_prefill.sm100_config import TILE_KEYS
from ..dense_prefill.sm100_softmax import KEYS_STORED_AT_ONCE, RowSoftmax, greatest
from ..primitives.arithmetic import smaller
from .operands import MaskedTileWalk, MaskRows, in_register

TILE_WORDS = TILE_KEYS // MASK_WORD_KEYS
# up to which a maximum leaves the reference: ptxas would compute a sum equal to follow_maximum's but once, which the count of additions in
# machine code does not allow
CEILING_LOG2 = RESCALE_LOG2 - 1


@dataclass(frozen=True)
class RowMask(EveryKey):
    """The mask of a call."""

    mask: MaskRows

    def rows_of(self, item: DensePrefillItem, thread: Int32, walk: MaskedTileWalk) -> RowWords:  # type: ignore[override]  # its items have no other
        """Return the mask of a row of an item's block, along a walk. thread: the row."""
        words = cute.make_rmem_tensor(cute.make_layout(TILE_WORDS), Int32)
        return RowWords(walk, self.mask.row(item, thread), self.mask.last_word(item), words)


@dataclass(frozen=True)
class RowWords(EveryKey):
    """The mask of a thread's row. first: word 0 of it. last: word with bits. rWords: words of the tile that the walk is at.

    Most probabilities are stored early: their registers can then take the last scores, for which ptxas would else wait.
    """

    stored_early: ClassVar[int] = KEYS_STORED_AT_ONCE
    walk: MaskedTileWalk
    first: cute.Pointer
    last: Int32
    rWords: cute.Tensor

    def kept(self, flag: Boolean) -> Int32:
        """Return a flag as a role keeps it while scores are masked."""
        return in_register(flag)

    def load(self) -> None:
        """Start to load the words of the tile that the walk is at."""
        place = self.walk.tile(Int32(0)) * TILE_WORDS
        for i in range(TILE_WORDS):
            self.rWords[i] = (self.first + smaller(place + i, self.last)).load()

    def shown(self, score: Float32, key: int) -> Float32:
        """Return a score, or -inf if the key is hidden, by a select, so that NaN vanishes."""
        word, bit = divmod(key, MASK_WORD_KEYS)
        seen = (self.rWords[word] & Int32(1 << bit)) != 0
        return cutlass.select_(seen, score, -Float32.inf)

    @cute.jit
    def advance(self, rows: RowSoftmax) -> Float32:
        """Move the reference of the row to the scores that it sees if need be. Return the factor for everything accumulated before.

        Selects cost most in front of the maximum, where the warp has nothing else to compute. So the maximum of all scores comes first. If
        it leaves the references of the warp's rows alone, that of the scores that they see does, too. Hidden ones go when probabilities
        are computed.
        """
        words = reduce(or_, [self.rWords[i] for i in range(TILE_WORDS)])
        ceiling = cutlass.select_(words != 0, rows.row_ref[0] + CEILING_LOG2, Float32.inf)
        alpha = Float32(1)
        if cute.arch.vote_any_sync(greatest([rows.rS[i] for i in range(TILE_KEYS)]) * rows.scale_log2 > ceiling):
            alpha = rows.follow(greatest([self.shown(rows.rS[i], i) for i in range(TILE_KEYS)]))
        return alpha
