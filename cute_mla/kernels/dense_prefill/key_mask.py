"""Masks of the caller over the keys of a sequence, as the roles that compute scores apply them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import cute

from .operands import TileWalk, WorkItem


@dataclass(frozen=True)
class EveryKey:
    """The mask of a call that gives none: it hides nothing, and costs nothing."""

    def rows_of(self, item: WorkItem, thread: Any) -> EveryKey:
        """Return the mask of a thread's rows of an item's block. thread: what says which rows these are."""
        return self

    def load(self, walk: TileWalk) -> None:
        """Start to load the bits of the tile that the walk is at."""

    def hide(self, scores: cute.Tensor) -> None:
        """Set the scores of hidden keys of that tile to -inf, by selects, so that NaN vanishes."""
