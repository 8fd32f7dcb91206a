"""The roles of the SM100 dK and dV kernel that load query rows by TMA: one warp each, box by box, ahead of the products."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS
from ...spec.dense_prefill_dq import STATISTICS
from ..primitives.elements import store_words
from ..primitives.pipeline import StageBarriers, arrive
from ..primitives.tma import load_box
from ..sm100.boxes import CHUNKS_PER_ROW
from .operands import Operands
from .sm100_config import Geometry, Pipes, Tiles

ROWS_PER_PASS = cute.arch.WARP_SIZE // CHUNKS_PER_ROW  # that a warp clears


class RowRole:
    """One warp: TMA of tiles of query rows, of one head of the group after the other; zeroes over rows behind the last one.

    P and dS are 0 there, but 0 times a NaN that may lie there is NaN. boxes: of a tile. has_statistics: whether it brings those, too.
    """

    boxes: int
    has_statistics: bool

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    def barriers(self, pipes: Pipes) -> tuple[StageBarriers, StageBarriers, StageBarriers]:
        """Return the role's ready, free and landed barriers."""
        raise NotImplementedError

    def tensor_map(self, operands: Operands) -> Any:
        """Return the tensor map."""
        raise NotImplementedError

    def target(self, tiles: Tiles) -> cute.Tensor:
        """Return the boxes in shared memory."""
        raise NotImplementedError

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Wait the free barriers. Signal the ready ones."""
        _, _, landed = self.barriers(pipes)
        use, cleared, size = Int32(0), Int32(0), self.geometry.tile_queries
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            count = self.geometry.tiles(item)
            for head in cutlass.range(operands.heads_per_kv, unroll=1):
                for i in cutlass.range(count, unroll=1):
                    first = item.first_query + i * size
                    where = (item.first_head + head, item.first_row + first)
                    whole = first + size <= item.queries
                    self.start(operands, tiles, pipes, use + i, where, (whole, landed.barrier(cleared)))
                    if not whole:
                        landed.consumer_wait(cleared)
                        self.clear(tiles, pipes, use + i, item.queries - first)
                        cleared = cleared + 1
                use = use + count

    @cute.jit
    def start(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, use: Int32, where: tuple[Int32, Int32], signal: tuple[Boolean, cute.Pointer]
    ):
        """Start the copies of a tile from (head, row) on. signal: whether they signal their own barriers, and which one if not."""
        (ready, free, _), (own, landed), size = self.barriers(pipes), signal, self.geometry.tile_queries
        target = self.target(tiles).iterator
        for box in cutlass.range_constexpr(self.boxes):
            number = use * self.boxes + box
            free.producer_acquire(number)
            barrier = cutlass.select_(own, ready.barrier(number), landed)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.geometry.box_bytes)
                place = target + ready.stage(number) * (size * BOX_COLUMNS)
                load_box(place, self.tensor_map(operands), (box * BOX_COLUMNS, where[0], where[1]), barrier)
        if cutlass.const_expr(self.has_statistics):
            pipes.statistic_free.producer_acquire(use)
            barrier = cutlass.select_(own, pipes.statistic_ready.barrier(use), landed)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.geometry.statistic_bytes)
                load_box(self.statistics(tiles, pipes, use), operands.args.statistics_map, (where[1], where[0], Int32(0)), barrier)

    @cute.jit
    def clear(self, tiles: Tiles, pipes: Pipes, use: Int32, rows: Int32):
        """Clear the rows of a tile behind the first `rows`, and hand it on. lse is +inf there: P is 0."""
        (ready, _, _), size, lane = self.barriers(pipes), self.geometry.tile_queries, cute.arch.lane_idx()
        places = [self.target(tiles).iterator + ready.stage(use * self.boxes + box) * (size * BOX_COLUMNS) for box in range(self.boxes)]
        # whole rows, so the swizzle does not matter
        for step in cutlass.range(rows // ROWS_PER_PASS, size // ROWS_PER_PASS, unroll=1):
            row = step * ROWS_PER_PASS + lane // CHUNKS_PER_ROW
            if row >= rows:
                for place in places:
                    store_words(cute.recast_ptr(place + row * BOX_COLUMNS, dtype=Int32) + lane % CHUNKS_PER_ROW * 4, [Int32(0)] * 4)
        if cutlass.const_expr(self.has_statistics):
            for step in cutlass.range_constexpr(0, size, cute.arch.WARP_SIZE):
                row = step + lane
                if row >= rows:
                    statistic = self.statistics(tiles, pipes, use) + row
                    statistic.store(Float32.inf)
                    (statistic + size).store(Float32(0))
        cute.arch.fence_proxy("async.shared", space="cta")
        for box in cutlass.range_constexpr(self.boxes):
            arrive(ready.barrier(use * self.boxes + box))
        if cutlass.const_expr(self.has_statistics):
            arrive(pipes.statistic_ready.barrier(use))

    def statistics(self, tiles: Tiles, pipes: Pipes, use: Int32) -> cute.Pointer:
        """Return where the statistics of a tile are."""
        return tiles.statistics + pipes.statistic_ready.stage(use) * (STATISTICS * self.geometry.tile_queries)


class QueryRole(RowRole):
    """TMA of Q and the statistics of its rows."""

    has_statistics = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.boxes = geometry.query_boxes

    def barriers(self, pipes: Pipes) -> tuple[StageBarriers, StageBarriers, StageBarriers]:
        """Return the role's ready, free and landed barriers."""
        return pipes.query_ready, pipes.query_free, pipes.query_landed

    def tensor_map(self, operands: Operands) -> Any:
        """Return the tensor map."""
        return operands.args.q_map

    def target(self, tiles: Tiles) -> cute.Tensor:
        """Return the boxes in shared memory."""
        return tiles.sQ


class SlopeRole(RowRole):
    """TMA of dO."""

    has_statistics = False

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)
        self.boxes = geometry.slope_boxes

    def barriers(self, pipes: Pipes) -> tuple[StageBarriers, StageBarriers, StageBarriers]:
        """Return the role's ready, free and landed barriers."""
        return pipes.slope_ready, pipes.slope_free, pipes.slope_landed

    def tensor_map(self, operands: Operands) -> Any:
        """Return the tensor map."""
        return operands.args.dout_map

    def target(self, tiles: Tiles) -> cute.Tensor:
        """Return the boxes in shared memory."""
        return tiles.sD
