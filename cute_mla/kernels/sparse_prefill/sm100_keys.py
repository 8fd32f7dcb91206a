"""The keys of a query token on Blackwell: where the rows lie that its indices name, and copies of tiles that have any."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Boolean, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..sm100.config import HALF_KEYS
from ..sm100.row_copy import WARP_KEYS, CopiedTile, LaneKeys, WarpRows, copy_runs
from .operands import IndexList, Operands


@dataclass(frozen=True)
class TileKeys(LaneKeys):
    """The keys of a warp, and which of the tile's count.

    Lane l has the l-th key from the warp's first one on, and the one 32 keys from it. other: the second one counts.
    """

    other: Boolean

    def any_seen(self) -> Boolean:
        """Return whether a key of the tile counts."""
        return (cute.arch.vote_ballot_sync(self.row != 0) | cute.arch.vote_ballot_sync(self.other)) != 0


class SkippingTile(CopiedTile):
    """Copies of a tile's columns, of tiles that have keys."""

    @cute.jit
    def copy(self, rows: WarpRows, keys: TileKeys):
        """Start the copies of a tile that has keys."""
        if keys.any_seen():
            copy_runs(self.runs, rows, keys)


class TokenRows:
    """The rows that the indices of a query token name."""

    def key_list(self, operands: Operands, req: Int32) -> IndexList:
        """Return the indices of a token."""
        return operands.index_list(req)

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """Return the position of the lane's key: the tile's keys in turn, from the warp's first one on."""
        return begin_tile * TILE_KEYS + (warp * WARP_KEYS + cute.arch.lane_idx()) % TILE_KEYS

    def look_up(self, keys: IndexList, position: Int32) -> tuple[Int32, Int32]:
        """Return the indices at the lane's position, and 32 positions from it within the tile: a warp looks at all 64."""
        return keys.look_up(position), keys.look_up(position ^ HALF_KEYS)

    def locate(self, operands: Operands, keys: IndexList, found: tuple[Int32, Int32], position: Int32) -> TileKeys:
        """Return the row of the first index, and whether the second one names any."""
        return TileKeys(keys.row_address(found[0]), found[1] >= 0)
