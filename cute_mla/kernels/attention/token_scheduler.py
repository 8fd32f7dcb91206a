"""Walks query tokens, each a piece of work of its own: what `work` is to kernels whose requests may be cut.

The CTAs that share the heads of a token are a group. Group z of n takes the tokens z, z + n, z + 2 n and so on: tokens that
are worked on at the same time are neighbours, whose keys are often the same, and no order has to be agreed upon.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from .lengths import clip, entry_or
from .split_kv_scheduler import Extent, Piece, tiles_of


@dataclass(frozen=True)
class TokenSchedule:
    """The tokens of a call, in the place of requests. lengths: int32 [tokens], clipped to `limit`; null at run time: every
    token has `limit` keys."""

    lengths: cute.Pointer
    limit: Int32
    tokens: Int32

    def first_piece(self) -> tuple[Int32, Int32]:
        """(token, tile) at which this CTA's work begins."""
        return cute.arch.block_idx()[2], Int32(0)

    def last_request(self) -> Int32:
        """The last token of all."""
        return self.tokens - 1

    def keys(self, token: Int32) -> Int32:
        """Keys of a token."""
        return clip(entry_or(self.lengths, token, self.limit), self.limit)

    def extent(self, token: Int32, begin_tile: Int32) -> Extent:
        """All of a token, whose first tile is 0."""
        keys = self.keys(token)
        return Extent(tiles=tiles_of(keys), keys=keys, more=False)

    def piece(self, token: Int32, begin_tile: Int32) -> Piece:
        """A token is never cut."""
        return self.piece_of(self.extent(token, begin_tile), token, begin_tile)

    def piece_of(self, extent: Extent, token: Int32, begin_tile: Int32) -> Piece:
        """The same where its extent is at hand."""
        return Piece(
            length=extent.keys,
            direct=True,
            accum_row=Int32(0),
            next_req=token + cute.arch.grid_dim()[2],
            next_tile=Int32(0),
        )
