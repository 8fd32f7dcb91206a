"""Tiles of query rows of the SM100 dK and dV kernel, which DkdvRowRole loads: box by box, ahead of the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS
from ...spec.dense_prefill_dq import STATISTICS
from ..primitives.copies import load_box
from ..primitives.pipeline import StageBarriers, arrive
from ..primitives.rows import store_vector
from ..primitives.smem import CHUNKS_PER_ROW
from .operands import DkdvItem
from .sm100_config import DkdvSm100Geometry

ROWS_PER_PASS = cute.arch.WARP_SIZE // CHUNKS_PER_ROW  # that a warp clears


@dataclass(frozen=True)
class DkdvStatisticTiles:
    """Statistics of the rows of two tiles. target: fp32 [2 tiles, 2, tile rows]."""

    ready: StageBarriers
    free: StageBarriers
    tensor_map: Any
    target: cute.Pointer

    def place(self, use: Int32, size: int) -> cute.Pointer:
        """Return the place of the statistics of a tile. size: rows of a tile."""
        return self.target + self.ready.stage(use) * (STATISTICS * size)


@dataclass(frozen=True)
class DkdvSm100RowTiles:
    """Tiles of Q or dO. target: (tile rows, 64 columns, boxes). boxes: of a tile. statistics: of the tensor that brings them."""

    geometry: DkdvSm100Geometry
    ready: StageBarriers
    free: StageBarriers
    landed: StageBarriers
    tensor_map: Any
    target: cute.Tensor
    boxes: int
    statistics: DkdvStatisticTiles | None = None

    def place(self, number: Int32) -> cute.Pointer:
        """Return the place of a box."""
        return self.target.iterator + self.ready.stage(number) * (self.geometry.tile_queries * BOX_COLUMNS)

    @cute.jit
    def start(self, use: tuple[Int32, Int32], item: DkdvItem, where: tuple[Int32, Int32], landed: cute.Pointer) -> tuple[Boolean, Int32]:
        """Start the copies of a tile when it is free, as DkdvRowTiles says. Its place is the number of its use."""
        head, row = item.first_head + where[0], item.first_row + where[1]
        whole = where[1] + self.geometry.tile_queries <= item.queries
        tile = use[0] + use[1]
        for box in cutlass.range_constexpr(self.boxes):
            number = tile * self.boxes + box
            self.free.producer_acquire(number)
            barrier = cutlass.select_(whole, self.ready.barrier(number), landed)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.geometry.box_bytes)
                load_box(self.place(number), self.tensor_map, (box * BOX_COLUMNS, head, row), barrier)
        if cutlass.const_expr(self.statistics is not None):
            self.statistics.free.producer_acquire(tile)
            barrier = cutlass.select_(whole, self.statistics.ready.barrier(tile), landed)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.geometry.statistic_bytes)
                place = self.statistics.place(tile, self.geometry.tile_queries)
                load_box(place, self.statistics.tensor_map, (row, head, Int32(0)), barrier)
        return whole, tile

    @cute.jit
    def clear(self, use: Int32, rows: Int32):
        """Clear the rows of a tile from number `rows` on, and signal that it is ready. lse is +inf there: P is 0."""
        size, lane = self.geometry.tile_queries, cute.arch.lane_idx()
        places = [self.place(use * self.boxes + box) for box in range(self.boxes)]
        # whole rows, so the swizzle does not matter
        for step in cutlass.range(rows // ROWS_PER_PASS, size // ROWS_PER_PASS, unroll=1):
            row = step * ROWS_PER_PASS + lane // CHUNKS_PER_ROW
            if row >= rows:
                for place in places:
                    store_vector(cute.recast_ptr(place + row * BOX_COLUMNS, dtype=Int32) + lane % CHUNKS_PER_ROW * 4, [Int32(0)] * 4)
        if cutlass.const_expr(self.statistics is not None):
            for step in cutlass.range_constexpr(0, size, cute.arch.WARP_SIZE):
                row = step + lane
                if row >= rows:
                    statistic = self.statistics.place(use, size) + row
                    statistic.store(Float32.inf)
                    (statistic + size).store(Float32(0))
        cute.arch.fence_proxy("async.shared", space="cta")
        for box in cutlass.range_constexpr(self.boxes):
            arrive(self.ready.barrier(use * self.boxes + box))
        if cutlass.const_expr(self.statistics is not None):
            arrive(self.statistics.ready.barrier(use))
