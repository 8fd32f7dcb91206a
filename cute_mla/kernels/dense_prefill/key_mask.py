"""Masks of the caller over the keys of a sequence, as the roles that compute scores apply them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cutlass import Boolean, Float32, Int32, cute

from .operands import TileWalk, WorkItem


@dataclass(frozen=True)
class EveryKey:
    """The mask of a call that gives none: it hides nothing, and costs nothing.

    stored_early: keys whose probabilities the SM100 kernel stores before it loads the last scores of a tile again.
    """

    stored_early: ClassVar[int] = 0

    def rows_of(self, item: WorkItem, thread: Any, walk: TileWalk) -> EveryKey:
        """Return the mask of a thread's rows of an item's block, along a walk. thread: what says which rows these are."""
        return self

    def kept(self, flag: Boolean) -> Boolean | Int32:
        """Return a flag as a role keeps it while scores are masked."""
        return flag

    def load(self) -> None:
        """Start to load the bits of the tile that the walk is at, unless they have come."""

    def hide(self, scores: cute.Tensor) -> None:
        """Set the scores of hidden keys of that tile to -inf, by selects, so that NaN vanishes."""

    def shown(self, score: Float32, key: int) -> Float32:
        """Return a score of the tile's key of this number, or -inf if the key is hidden."""
        return score

    def advance(self, rows: Any) -> Float32:
        """Move the reference of a row of scores to that tile if need be, as RowSoftmax.advance."""
        factor: Float32 = rows.advance()
        return factor
