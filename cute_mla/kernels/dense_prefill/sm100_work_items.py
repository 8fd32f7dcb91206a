"""How the work items get to the roles of the SM100 kernel: the load role finds out what an item is and posts it.

Finding an item takes some 200 instructions that depend on each other and two loads, by estimate 1,500 clocks, which the mma role
does not have between two products."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Int32, cute

from ..primitives.fragments import aligned, store_words
from ..primitives.pipeline import arrive
from .operands import Item
from .sm100_config import ITEM_WORDS, Pipes


@dataclass(frozen=True)
class Board:
    """The items of the coming rounds. sItems: int32 (4 rounds, 8): whether there is one, and the item."""

    sItems: cute.Pointer
    pipes: Pipes

    def post(self, turn: Int32, there: Boolean, item: Item) -> None:
        """Signals item_ready when the item may be read. One warp."""
        self.pipes.item_free.wait_free(turn)
        numbers = (item.head, item.kv_head, item.first_row, item.rows, item.first_key, item.keys, item.diagonal)
        words = [Int32(there), *numbers]
        with cute.arch.elect_one():
            for half in (0, 4):
                store_words(self._cell(turn) + half, words[half : half + 4])
            cute.arch.mbarrier_arrive(self.pipes.item_ready.barrier(turn))

    def take(self, turn: Int32) -> tuple[Boolean, Item]:
        """Whether the CTA has an item in a round, and the item, without rows and keys if not. Waits item_ready, signals item_free.
        One warp."""
        self.pipes.item_ready.wait_ready(turn)
        rWords = cute.make_rmem_tensor(cute.make_layout(ITEM_WORDS), Int32)
        cute.autovec_copy(cute.make_tensor(aligned(self._cell(turn), 16), rWords.layout), rWords)
        arrive(self.pipes.item_free.barrier(turn))
        there, *numbers = (cute.arch.make_warp_uniform(rWords[i]) for i in range(ITEM_WORDS))
        return there != 0, Item(*numbers)

    def _cell(self, turn: Int32) -> cute.Pointer:
        return self.sItems + self.pipes.item_ready.slot(turn) * ITEM_WORDS
