"""Work items on their way from the warp that finds them to the other roles of a dense prefill kernel.

Finding an item takes some 200 instructions that depend on each other and two loads, by estimate 1,500 clocks, which a role does not
have between two products.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from cutlass import Boolean, Int32, cute

from ..primitives.elements import aligned, store_words
from ..primitives.pipeline import StageBarriers
from .operands import WorkItem

WORDS_AT_ONCE = 4  # 16 bytes
ITEM_WORDS = 8  # whether there is an item, and a WorkItem


class BoardPipes(Protocol):
    """The barriers of a board."""

    @property
    def item_ready(self) -> StageBarriers:
        """Return the barriers from the warp that posts to the roles: 1 arrival."""

    @property
    def item_free(self) -> StageBarriers:
        """Return the barriers back: an arrival of every warp that takes items."""


@dataclass(frozen=True)
class Board:
    """The coming items of a CTA. sItems: int32 (stages, words): whether there is one, and the item. kind: of items."""

    sItems: cute.Pointer
    pipes: BoardPipes
    kind: type[WorkItem] = WorkItem

    @property
    def words(self) -> int:
        """Return the words of an item."""
        return 1 + len(fields(self.kind))

    def post_item(self, turn: Int32, item: WorkItem) -> Int32:
        """Post an item. Return the next turn."""
        self.post(turn, Boolean(True), item)
        return turn + 1

    def post_end(self, turn: Int32) -> None:
        """Post that there is no further item."""
        self.post(turn, Boolean(False), self.nothing())

    def nothing(self) -> WorkItem:
        """Return an item without rows and keys."""
        return self.kind(*[Int32(0)] * (self.words - 1))

    def post(self, turn: Int32, there: Boolean, item: WorkItem) -> None:
        """Signal item_ready when the item may be read. One warp."""
        self.pipes.item_free.producer_acquire(turn)
        words = [Int32(there), *(getattr(item, field.name) for field in fields(self.kind))]
        with cute.arch.elect_one():
            for first in range(0, self.words, WORDS_AT_ONCE):
                store_words(self._cell(turn) + first, words[first : first + WORDS_AT_ONCE])
            cute.arch.mbarrier_arrive(self.pipes.item_ready.barrier(turn))

    def take(self, turn: Int32) -> tuple[Boolean, WorkItem]:
        """Wait item_ready, signal item_free.

        Return (whether there is an item of that number, the item, without rows and keys if not). One warp.
        """
        self.pipes.item_ready.consumer_wait(turn)
        rWords = cute.make_rmem_tensor(cute.make_layout(self.words), Int32)
        cute.autovec_copy(cute.make_tensor(aligned(self._cell(turn), 16), rWords.layout), rWords)
        self.pipes.item_free.consumer_release(turn)
        there, *numbers = (cute.arch.make_warp_uniform(rWords[i]) for i in range(self.words))
        return there != 0, self.kind(*numbers)

    def _cell(self, turn: Int32) -> cute.Pointer:
        return self.sItems + self.pipes.item_ready.stage(turn) * self.words
