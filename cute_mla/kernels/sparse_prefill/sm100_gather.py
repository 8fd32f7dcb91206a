"""The gather role of sparse prefill on Blackwell: the rows that the indices of a query token name, and copies of tiles that have any.

A pair has the gather role of ../sm100/gather.py. With up to 64 heads a CTA copies all columns of the keys of a tile, in two halves.
sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..primitives.pipeline import StageBarriers
from ..sm100.config import HALF_KEYS
from ..sm100.gather import (
    CHUNK,
    CHUNKS_PER_ROW,
    NO_POSITION,
    WARP_KEYS,
    CopiedColumns,
    LaneKeys,
    TileColumns,
    WarpRows,
    copy_runs,
    store_seen,
    warp_rows,
)
from ..sm100.heads64 import HALF_BOXES, HALF_COLUMNS, HEADS64
from .operands import NO_ROW, SparsePrefillIndices, SparsePrefillOperands
from .sm100_config import SparsePrefillSmemSm100

HALF_BYTES = HALF_COLUMNS * ELEMENT_BYTES


@dataclass(frozen=True)
class TileKeys(LaneKeys):
    """The keys of a warp, and which of the tile's count.

    Lane l has the l-th key from the warp's first one on, and the one 32 keys from it. other: the second one counts.
    """

    other: Boolean

    def any_seen(self) -> Boolean:
        """Return whether a key of the tile counts."""
        return (cute.arch.vote_ballot_sync(self.row != 0) | cute.arch.vote_ballot_sync(self.other)) != 0


class SkippingTile(TileColumns):
    """Copies of a tile's columns, of tiles that have keys."""

    @cute.jit
    def copy(self, rows: WarpRows, keys: TileKeys):
        """Start the copies of a tile that has keys."""
        if keys.any_seen():
            copy_runs(self.copied, rows, keys)


class SparsePrefillTokenKeys:
    """The rows that the indices of a query token name."""

    def key_list(self, operands: SparsePrefillOperands, req: Int32) -> SparsePrefillIndices:
        """Return the indices of a token."""
        return operands.index_list(req)

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """Return the position of the lane's key: the tile's keys in turn, from the warp's first one on."""
        return begin_tile * TILE_KEYS + (warp * WARP_KEYS + cute.arch.lane_idx()) % TILE_KEYS

    def look_up(self, keys: SparsePrefillIndices, position: Int32) -> tuple[Int32, Int32]:
        """Return the indices at the lane's position, and 32 positions from it within the tile: a warp looks at all 64."""
        return keys.look_up(position), keys.look_up(position ^ HALF_KEYS)

    def locate(self, operands: SparsePrefillOperands, keys: SparsePrefillIndices, found: tuple[Int32, Int32], position: Int32) -> TileKeys:
        """Return the row of the first index, and whether the second one names any."""
        return TileKeys(keys.row_address(found[0]), found[1] >= 0)


class SparsePrefillTokenEntries(SparsePrefillTokenKeys):
    """The rows that the indices of a query token name, checked where they are used: nothing waits for a look-up when it is made."""

    def look_up(self, keys: SparsePrefillIndices, position: Int32) -> tuple[Int32, Int32]:
        """Return the entries at the lane's position, and 32 positions from it within the tile."""
        return keys.entry(position), keys.entry(position ^ HALF_KEYS)

    def locate(self, operands: SparsePrefillOperands, keys: SparsePrefillIndices, found: tuple[Int32, Int32], position: Int32) -> TileKeys:
        """Return the row of the first index, and whether the second one names any."""
        return TileKeys(keys.row_address(keys.checked(found[0])), keys.checked(found[1]) >= 0)


def half_runs(half: int, has_rope: bool) -> tuple[CopiedColumns, ...]:
    """Return the movers of half of the latent columns, and, with the second half, of the RoPE columns after them."""
    latent = CopiedColumns.create(HALF_BYTES // CHUNK, half * HALF_BOXES, Int32(half * HALF_BYTES))
    if half == 0 or not has_rope:
        return (latent,)
    return latent, CopiedColumns.create(CHUNKS_PER_ROW, HEADS64.rope_box, Int32(D_LATENT * ELEMENT_BYTES))


@dataclass(frozen=True)
class SparsePrefillHalvesRoleSm100:
    """Four warps. has_rope: whether keys have columns that are not values."""

    has_rope: bool
    source = SparsePrefillTokenEntries()

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, warp: Int32):
        """Wait left_free, kv_free. Signal left_ready, kv_ready, seen_ready."""
        schedule = operands.schedule
        token, _ = schedule.first_work_tile()
        tile = Int32(0)
        first, other = self.first_entries(operands, token, warp)
        while token <= schedule.last_request():
            count = schedule.tile_range(token, Int32(0)).tiles
            following = schedule.work_tile(token, Int32(0)).next_req
            next_first, next_other = self.first_entries(operands, following, warp)
            self.fill_tiles(operands, smem, count, token, (first, other), tile, warp)
            token, tile, first, other = following, tile + count, next_first, next_other
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def first_entries(self, operands: SparsePrefillOperands, token: Int32, warp: Int32):
        """Return the entries at the lane's position in the first tile of a token, if there is one. The list is asked a token ahead."""
        first, other = Int32(NO_ROW), Int32(NO_ROW)
        if token <= operands.schedule.last_request():
            first, other = self.source.look_up(self.source.key_list(operands, token), self.source.first_key(Int32(0), warp))
        return first, other

    @cute.jit
    def fill_tiles(
        self, operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, count: Int32, token: Int32, found: tuple[Int32, Int32],
        first_tile: Int32, warp: Int32,
    ):  # fmt: skip
        """Copy the tiles of one token. Of this lane's keys, the list is asked a tile ahead. first_tile: number of the first tile.

        The right half of a tile is handed over when the copies of the next tile's left half are under way. Nobody waits for it before:
        S of a tile comes after P V of the tile two before, whose left half is the stage that those copies fill.
        """
        listed = self.source.key_list(operands, token)
        position = self.source.first_key(Int32(0), warp)
        for t in cutlass.range(count, unroll=1):
            keys = self.source.locate(operands, listed, found, position)
            position = position + TILE_KEYS
            found = self.source.look_up(listed, cutlass.select_(t + 1 < count, position, Int32(NO_POSITION)))
            tile = first_tile + t
            rows, filled = warp_rows(smem, tile, warp), keys.any_seen()
            smem.left_free.producer_acquire(tile)
            self.copy_half(0, rows, keys, filled)
            store_seen(smem, tile, warp, keys)
            smem.seen_ready.producer_commit(tile)
            if t > 0:
                self.hand_over(smem.kv_ready, tile - 1, 1)
            smem.kv_free.producer_acquire(tile)
            self.copy_half(1, rows, keys, filled)
            self.hand_over(smem.left_ready, tile, 1)
        if count > 0:
            self.hand_over(smem.kv_ready, first_tile + count - 1, 0)

    @cute.jit
    def copy_half(self, half: cutlass.Constexpr[int], rows: WarpRows, keys: TileKeys, filled: Boolean):
        """Start the copies of half of a tile, if it has keys."""
        if filled:
            copy_runs(half_runs(half, self.has_rope), rows, keys)
        cute.arch.cp_async_commit_group()

    def hand_over(self, ready: StageBarriers | None, tile: Int32, under_way: int) -> None:
        """Signal that the warp's share of half a tile is in its stage: all copies have landed but those of the last `under_way` halves."""
        cute.arch.cp_async_wait_group(under_way)
        cute.arch.fence_proxy("async.shared", space="cta")
        ready.producer_commit(tile)
