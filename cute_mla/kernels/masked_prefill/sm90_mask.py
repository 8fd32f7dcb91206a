"""The caller's mask in the attend role of the SM90 kernel.

A quad has two rows of a tile of 128 keys, four words each. A lane loads one word of each row, while S is multiplied. The quad transposes
the words: what a lane gets has the bits of its own 32 scores of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ..dense_prefill.operands import DensePrefillItem, EveryKey, TileWalk
from ..dense_prefill.sm90_gemm import DensePrefillProducts
from ..primitives.arithmetic import smaller
from ..primitives.wgmma import ROWS_PER_THREAD, flat, half
from .operands import MaskRows, in_register

TILE_WORDS = 4
MASK_WORD_BYTES = 4
# the low fields of bits, by the step of a transposition of 4 lanes x 4 fields of 2 bits in each byte, and the bits between fields
LOW_FIELDS = {1: 0x33333333, 2: 0x0F0F0F0F}
FIELD_BITS = 2


@dataclass(frozen=True)
class QuadMask(EveryKey):
    """The mask of a call."""

    mask: MaskRows

    def kept(self, flag: Boolean) -> Int32:
        """Return a flag as a role keeps it while scores are masked."""
        return in_register(flag)

    def rows_of(self, item: DensePrefillItem, thread: DensePrefillProducts, walk: TileWalk) -> QuadRows:
        """Return the mask of the thread's two rows of an item's block, along a walk."""
        lane = thread.thread % TILE_WORDS
        starts = tuple(self.mask.row(item, thread.row(row_half)).toint() for row_half in range(ROWS_PER_THREAD))
        return QuadRows(walk, lane, self.mask.last_word(item), starts, cute.make_rmem_tensor(cute.make_layout(ROWS_PER_THREAD), Int32))


@dataclass(frozen=True)
class QuadRows(EveryKey):
    """The mask of a thread's two rows.

    lane: of the quad. last: word with bits. starts: addresses of word 0 of the rows. rWords: the lane's word of each row.
    """

    walk: TileWalk
    lane: Int32
    last: Int32
    starts: tuple[Int64, ...]
    rWords: cute.Tensor

    def load(self) -> None:
        """Start to load the lane's words of the tile that the walk is at."""
        place = smaller(self.walk.tile(Int32(0)) * TILE_WORDS + self.lane, self.last)
        for row_half, start in enumerate(self.starts):
            word = cute.make_ptr(Int32, start, cute.AddressSpace.gmem, assumed_align=MASK_WORD_BYTES) + place
            self.rWords[row_half] = word.load()

    def hide(self, scores: cute.Tensor) -> None:
        """Set the scores of hidden keys to -inf, by selects, so that NaN vanishes."""
        rS = flat(scores)
        words = [self.own_bits(Uint32(self.rWords[row_half])) for row_half in range(ROWS_PER_THREAD)]
        for i in sorted(range(cute.size(rS)), key=lambda i: (half(i), own_bit(i))):
            rS[i] = cutlass.select_((words[half(i)] & Uint32(1 << own_bit(i))) != 0, rS[i], -Float32.inf)

    def own_bits(self, word: Uint32) -> Uint32:
        """Return the bits of the lane's scores of a row, given the lane's word of it.

        Bits 8 e + 2 w and the next of the result are bits 8 e + 2 l and the next of word w, for lane l: its columns of byte e.
        """
        for step, low in LOW_FIELDS.items():
            shift = Uint32(FIELD_BITS * step)
            upper = (self.lane & step) != 0
            high = low << (FIELD_BITS * step)
            received = Uint32(cute.arch.shuffle_sync_bfly(word, step))
            word = cutlass.select_(
                upper,
                (word & Uint32(high)) | ((received & Uint32(high)) >> shift),
                (word & Uint32(low)) | ((received & Uint32(low)) << shift),
            )
        return word


def own_bit(register: int) -> int:
    """Return the bit of a score in its row's word."""
    word, eight = divmod(register >> 2, TILE_WORDS)
    return 8 * eight + FIELD_BITS * word + (register & 1)
