"""Tiles of query rows of the SM90 dK and dV kernel, which DkdvRowRole loads: all columns of a tile at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_prefill_dq import STATISTICS
from ..dense_prefill.sm90_load import load_boxes
from ..primitives.copies import load_box
from ..primitives.pipeline import StageBarriers, arrive
from ..sm90.cta import clear_rows
from .operands import DkdvItem


@dataclass(frozen=True)
class DkdvSm90RowTiles:
    """Tiles of Q or dO.

    target: (tile rows, columns, stages). nbytes: of a tile and its statistics. statistics: their tensor map and place, fp32 [stages, 2,
    tile rows], of the tensor that brings them.
    """

    ready: StageBarriers
    free: StageBarriers
    landed: StageBarriers
    tensor_map: Any
    target: cute.Tensor
    nbytes: int
    statistics: tuple[Any, cute.Pointer] | None = None

    @property
    def size(self) -> int:
        """Return the rows of a tile."""
        rows: int = cute.size(self.target, mode=[0])
        return rows

    def lse_of(self, stage: Int32, row: int | Int32) -> cute.Pointer:
        """Return the place of lse of a row of a stage; that of delta is `size` further."""
        assert self.statistics is not None
        return self.statistics[1] + (stage * (STATISTICS * self.size) + row)

    def start(
        self, use: tuple[Int32, Int32], item: DkdvItem, where: tuple[Int32, Int32], landed: cute.Pointer
    ) -> tuple[Boolean, tuple[Int32, cute.Pointer]]:
        """Start the copies of a tile when it is free, as DkdvRowTiles says. Its place is its stage and ready barrier."""
        whole = where[1] + self.size <= item.queries
        number = use[0] + use[1]
        stage, ready = self.ready.stage(number), self.ready.barrier(number)
        self.free.producer_acquire(number)
        barrier = cutlass.select_(whole, ready, landed)
        with cute.arch.elect_one():
            head, row = item.first_head + where[0], item.first_row + where[1]
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.nbytes)
            load_boxes(self.target, stage, self.tensor_map, (head, row), barrier, self.size)
            if self.statistics is not None:
                load_box(self.lse_of(stage, 0), self.statistics[0], (row, head, Int32(0)), barrier)
        return whole, (stage, ready)

    @cute.jit
    def clear(self, place: tuple[Int32, cute.Pointer], rows: Int32):
        """Clear the rows of a tile from number `rows` on, and signal that it is ready. lse is +inf there: P is 0."""
        (stage, ready), lane = place, cute.arch.lane_idx()
        clear_rows(self.target, stage, rows, lane, cute.arch.WARP_SIZE)
        if cutlass.const_expr(self.statistics is not None):
            for step in cutlass.range_constexpr(0, self.size, cute.arch.WARP_SIZE):
                row = step + lane
                if row >= rows and row < self.size:
                    statistic = self.lse_of(stage, row)
                    statistic.store(Float32.inf)
                    (statistic + self.size).store(Float32(0))
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive(ready)
