"""Masks of the caller over the keys of a sequence, as the roles that compute scores apply them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, cute

from .operands import TileWalk, WorkItem


@dataclass(frozen=True)
class EveryKey:
    """The mask of a call that gives none: it hides nothing, and costs nothing."""

    def rows_of(self, item: WorkItem, thread: Any, walk: TileWalk) -> EveryKey:
        """Return the mask of a thread's rows of an item's block, along a walk. thread: what says which rows these are."""
        return self

    def kept(self, flag: Boolean) -> Boolean | Int32:
        """Return a flag as a role keeps it while scores are masked."""
        return flag

    def load(self) -> None:
        """Start to load the bits of the tile that the walk is at, unless they have come."""

    def hide(self, scores: cute.Tensor, first: int = 0) -> None:
        """Set the scores of hidden keys of that tile, from key `first` on, to -inf, by selects, so that NaN vanishes."""
