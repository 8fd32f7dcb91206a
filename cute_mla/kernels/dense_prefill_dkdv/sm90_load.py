"""The roles of the SM90 dK and dV kernel that load query rows by TMA: one warp each, ahead of the warpgroups that compute."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.dense_prefill_dq import STATISTICS
from ..dense_prefill.sm90_load import load_boxes
from ..primitives.pipeline import StageBarriers, arrive
from ..primitives.tma import load_box
from ..sm90.clear_rows import clear_rows
from .operands import Operands
from .sm90_config import Geometry, Pipes, Tiles


class RowRole:
    """One warp: TMA of tiles of query rows, of one head of the group after the other; zeroes over rows behind the last one.

    P and dS are 0 there, but 0 times a NaN that may lie there is NaN.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def barriers(self, pipes: Pipes) -> tuple[StageBarriers, StageBarriers, StageBarriers]:
        """Return the role's ready, free and landed barriers."""
        raise NotImplementedError

    def start(self, operands: Operands, tiles: Tiles, stage: Int32, where: tuple[Int32, Int32], landed: cute.Pointer) -> None:
        """Start the copies of a stage from (head, row) on. One thread."""
        raise NotImplementedError

    def clear(self, tiles: Tiles, stage: Int32, rows: Int32) -> None:
        """Clear the rows of a stage behind the first `rows`."""
        raise NotImplementedError

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Wait the free barriers. Signal the ready ones."""
        ready_of, free_of, landed_of = self.barriers(pipes)
        use, cleared, size = Int32(0), Int32(0), self.geometry.tile_queries
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            count = self.geometry.tiles(item)
            for head in cutlass.range(operands.heads_per_kv, unroll=1):
                for i in cutlass.range(count, unroll=1):
                    first = item.first_query + i * size
                    whole = first + size <= item.queries
                    stage, ready = ready_of.stage(use + i), ready_of.barrier(use + i)
                    free_of.producer_acquire(use + i)
                    landed = cutlass.select_(whole, ready, landed_of.barrier(cleared))
                    with cute.arch.elect_one():
                        self.start(operands, tiles, stage, (item.first_head + head, item.first_row + first), landed)
                    if not whole:
                        landed_of.consumer_wait(cleared)
                        self.clear(tiles, stage, item.queries - first)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        arrive(ready)
                        cleared = cleared + 1
                use = use + count


class QueryRole(RowRole):
    """TMA of Q and the statistics of its rows. lse behind the last row is +inf: P is 0 there."""

    def barriers(self, pipes: Pipes) -> tuple[StageBarriers, StageBarriers, StageBarriers]:
        """Return the role's ready, free and landed barriers."""
        return pipes.query_ready, pipes.query_free, pipes.query_landed

    def start(self, operands: Operands, tiles: Tiles, stage: Int32, where: tuple[Int32, Int32], landed: cute.Pointer) -> None:
        """Start the copies of a stage from (head, row) on. One thread."""
        size = self.geometry.tile_queries
        cute.arch.mbarrier_arrive_and_expect_tx(landed, self.geometry.query_bytes)
        load_boxes(tiles.sQ, stage, operands.args.q_map, where, landed, size)
        load_box(tiles.statistics + stage * (STATISTICS * size), operands.args.statistics_map, (where[1], where[0], Int32(0)), landed)

    @cute.jit
    def clear(self, tiles: Tiles, stage: Int32, rows: Int32):
        """Clear the rows of a stage behind the first `rows`."""
        size, lane = self.geometry.tile_queries, cute.arch.lane_idx()
        clear_rows(tiles.sQ, stage, rows, lane, cute.arch.WARP_SIZE)
        for step in cutlass.range_constexpr(0, size, cute.arch.WARP_SIZE):
            row = step + lane
            if row >= rows and row < size:
                statistic = tiles.statistics + (stage * (STATISTICS * size) + row)
                statistic.store(Float32.inf)
                (statistic + size).store(Float32(0))


class SlopeRole(RowRole):
    """TMA of dO."""

    def barriers(self, pipes: Pipes) -> tuple[StageBarriers, StageBarriers, StageBarriers]:
        """Return the role's ready, free and landed barriers."""
        return pipes.slope_ready, pipes.slope_free, pipes.slope_landed

    def start(self, operands: Operands, tiles: Tiles, stage: Int32, where: tuple[Int32, Int32], landed: cute.Pointer) -> None:
        """Start the copies of a stage from (head, row) on. One thread."""
        cute.arch.mbarrier_arrive_and_expect_tx(landed, self.geometry.slope_bytes)
        load_boxes(tiles.sD, stage, operands.args.dout_map, where, landed, self.geometry.tile_queries)

    def clear(self, tiles: Tiles, stage: Int32, rows: Int32) -> None:
        """Clear the rows of a stage behind the first `rows`."""
        clear_rows(tiles.sD, stage, rows, cute.arch.lane_idx(), cute.arch.WARP_SIZE)
