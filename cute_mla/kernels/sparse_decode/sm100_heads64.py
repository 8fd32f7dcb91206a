"""The gather role of a CTA that works alone on up to 64 heads, in sparse decode on Blackwell. sm100.py describes pipelines and trick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import TileRange
from ..primitives.pipeline import StageBarriers
from ..sm100.config import BOX_BYTES, GROUP_WARPS, ROW_BYTES
from ..sm100.gather import NO_POSITION, WARP_KEYS, LatentColumnsSm100, LatentKeySourceSm100, WarpRows, store_seen
from ..sm100.heads64 import HALF_BOXES, HALVES
from .operands import SparseDecodeOperands
from .sm100_columns import SparseDecodeSmemSm100

LAG = HALVES  # halves of tiles whose copies are under way


@dataclass(frozen=True)
class HalvesGatherRoleSm100:
    """Four warps. columns: the movers of the two halves of the columns."""

    columns: tuple[LatentColumnsSm100, LatentColumnsSm100]
    source: LatentKeySourceSm100

    @cute.jit
    def run(self, operands: SparseDecodeOperands, smem: SparseDecodeSmemSm100, warp: Int32):
        """Wait left_free, kv_free. Signal left_ready, kv_ready, seen_ready."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        tile = Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            self.fill_tiles(operands, smem, tile_range, self.source.first_key(begin_tile, warp), tile, warp)
            tile = tile + tile_range.tiles
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()
        for half in cutlass.range_constexpr(HALVES):
            self.finish_before(half, smem, tile, warp)
            cute.arch.cp_async_commit_group()  # no copies, in place of those that would follow

    @cute.jit
    def fill_tiles(
        self, operands: SparseDecodeOperands, smem: SparseDecodeSmemSm100, tile_range: TileRange, position: Int32, first_tile: Int32,
        warp: Int32,
    ):  # fmt: skip
        """Start the copies of one work tile, and finish each half of a tile before the same half of the next one is asked for.

        Of this lane's key, the list is asked a tile ahead. position: of the lane's key in the list. first_tile: number of the first tile.
        """
        listed = self.source.key_list(operands, tile_range.req)
        found = self.source.look_up(listed, cutlass.select_(tile_range.tiles > 0, position, Int32(NO_POSITION)))
        for t in cutlass.range(tile_range.tiles, unroll=1):
            tile = first_tile + t
            self.finish_before(0, smem, tile, warp)
            keys = self.source.locate(operands, listed, found, position)
            position = position + TILE_KEYS
            # nothing is fetched for the work tile that follows: its tiles may be another partition's
            found = self.source.look_up(listed, cutlass.select_(t + 1 < tile_range.tiles, position, Int32(NO_POSITION)))
            smem.left_free.producer_acquire(tile)
            self.copy(0, smem, tile, keys, warp)
            store_seen(smem, tile, warp, keys)
            self.finish_before(1, smem, tile, warp)
            smem.kv_free.producer_acquire(tile)
            self.copy(1, smem, tile, keys, warp)

    def copy(self, half: int, smem: SparseDecodeSmemSm100, tile: Int32, keys: Any, warp: Int32) -> None:
        """Start the copies of half of a tile."""
        self.columns[half].copy(half_rows(half, smem, tile, warp), keys)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def finish_before(self, half: cutlass.Constexpr[int], smem: SparseDecodeSmemSm100, tile: Int32, warp: Int32):
        """Finish half of the tile before this one, if there is any, when its copies have landed."""
        cute.arch.cp_async_wait_group(LAG - 1)
        if tile > 0:
            self.finish(half, smem, tile - 1, warp)

    def finish(self, half: int, smem: SparseDecodeSmemSm100, tile: Int32, warp: Int32) -> None:
        """Make columns of half of a tile, whose copies have landed, and hand them over."""
        self.columns[half].finish(half_rows(half, smem, tile, warp))
        cute.arch.fence_proxy("async.shared", space="cta")
        ready_of(half, smem).producer_commit(tile)
        if half == 0:
            smem.seen_ready.producer_commit(tile)


def ready_of(half: int, smem: SparseDecodeSmemSm100) -> StageBarriers:
    """Return the barriers by which half of a tile is handed over."""
    ready = smem.left_ready if half == 0 else smem.kv_ready
    assert ready is not None
    return ready


def half_rows(half: int, smem: SparseDecodeSmemSm100, tile: Int32, warp: Int32) -> WarpRows:
    """Return a warp's rows of half of the boxes of a tile's stage. number: of those of all stages, halves and warps."""
    stage = smem.kv_ready.stage(tile)
    first = smem.stage(stage) + (half * HALF_BOXES * BOX_BYTES + warp * (WARP_KEYS * ROW_BYTES))
    return WarpRows(first, (stage * HALVES + half) * GROUP_WARPS + warp)
