"""Scheduler of sparse prefill: query tokens, each a work tile of its own, with the interface of split_kv_scheduler.

The CTAs that share the heads of a token are a group. Group z of n takes the tokens z, z + n, z + 2 n and so on: tokens that
are worked on at the same time are neighbours, whose keys are often the same, and no order has to be agreed upon.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from ..primitives.arithmetic import clip
from ..primitives.rows import load_or
from .split_kv_scheduler import TileRange, WorkTile, tiles_of


@dataclass(frozen=True)
class TokenSchedule:
    """The tokens of a call, in place of requests.

    lengths: int32 [tokens], clipped to `limit`; null at run time: every token has `limit` keys.
    """

    lengths: cute.Pointer
    limit: Int32
    tokens: Int32

    def first_work_tile(self) -> tuple[Int32, Int32]:
        """Return (token, tile) at which this CTA's work begins."""
        return cute.arch.block_idx()[2], Int32(0)

    def last_request(self) -> Int32:
        """Return the last token of all."""
        return self.tokens - 1

    def keys(self, token: Int32) -> Int32:
        """Return the keys of a token."""
        return clip(load_or(self.lengths, token, self.limit), self.limit)

    def tile_range(self, token: Int32, begin_tile: Int32) -> TileRange:
        """Return all of a token, whose first tile is 0."""
        keys = self.keys(token)
        return TileRange(token, begin_tile, tiles_of(keys), keys, more=False)

    def work_tile(self, token: Int32, begin_tile: Int32) -> WorkTile:
        """Return the epilogue's view of a token, which is never split."""
        return self.work_tile_of(self.tile_range(token, begin_tile), token, begin_tile)

    def work_tile_of(self, tile_range: TileRange, token: Int32, begin_tile: Int32) -> WorkTile:
        """Return work_tile(token, begin_tile), whose tile range is at hand."""
        return WorkTile(
            length=tile_range.keys,
            direct=True,
            accum_row=Int32(0),
            next_req=token + cute.arch.grid_dim()[2],
            next_tile=Int32(0),
        )
