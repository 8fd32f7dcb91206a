"""The caller's mask in the attend role of the SM120 kernel.

A lane has 16 scores of each of two rows of a tile of 64 keys. It loads both words of each row, while S is multiplied: its bits lie
2 (t % 4) further than those of the quad's first lane.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ..dense_prefill.operands import DensePrefillItem, EveryKey, TileWalk
from ..dense_prefill.sm120_attend import DensePrefillSm120Products
from ..primitives.arithmetic import smaller
from ..primitives.rows import registers
from ..primitives.wgmma import ROWS_PER_THREAD, half
from .operands import MaskRows

TILE_WORDS = 2
WORD_BITS = 32
MASK_WORD_BYTES = 4


@dataclass(frozen=True)
class WordMask(EveryKey):
    """The mask of a call."""

    mask: MaskRows

    def rows_of(self, item: DensePrefillItem, thread: DensePrefillSm120Products, walk: TileWalk) -> WordRows:
        """Return the mask of the thread's two rows of an item's block, along a walk."""
        starts = tuple(self.mask.row(item, thread.row(row_half)).toint() for row_half in range(ROWS_PER_THREAD))
        return WordRows(walk, thread.thread % 4 * 2, self.mask.last_word(item), starts, registers(ROWS_PER_THREAD * TILE_WORDS))


@dataclass(frozen=True)
class WordRows(EveryKey):
    """The mask of a thread's two rows.

    column: the first of the lane's scores. last: word with bits. starts: addresses of word 0 of the rows. rWords: both words of each row.
    """

    walk: TileWalk
    column: Int32
    last: Int32
    starts: tuple[Int64, ...]
    rWords: cute.Tensor

    def load(self) -> None:
        """Start to load the words of the tile that the walk is at."""
        for word in range(TILE_WORDS):
            place = smaller(self.walk.tile(Int32(0)) * TILE_WORDS + word, self.last)
            for row_half, start in enumerate(self.starts):
                first = cute.make_ptr(Int32, start, cute.AddressSpace.gmem, assumed_align=MASK_WORD_BYTES)
                self.rWords[row_half * TILE_WORDS + word] = (first + place).load()

    def hide(self, scores: cute.Tensor) -> None:
        """Set the scores of hidden keys to -inf, by selects, so that NaN vanishes."""
        words = [Uint32(self.rWords[i]) >> Uint32(self.column) for i in range(ROWS_PER_THREAD * TILE_WORDS)]
        for i in range(cute.size(scores)):
            word, bit = divmod(8 * (i >> 2) + (i & 1), WORD_BITS)
            shown = (words[half(i) * TILE_WORDS + word] & Uint32(1 << bit)) != 0
            scores[i] = cutlass.select_(shown, scores[i], -Float32.inf)
