"""The roles of the SM90 kernel that fill shared memory by TMA: one warp each, which runs ahead of the warpgroups that compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ..primitives.pipeline import StageBarriers, arrive
from ..primitives.tma import load_box
from ..sm90.clear_rows import clear_rows
from .board import Board
from .sm90_config import GROUP_ROWS, GROUPS


@dataclass(frozen=True)
class TilePipe:
    """The barriers of tiles of K or V. landed: of a tile whose rows behind the last key are zeroed before it is ready; None: of none."""

    ready: StageBarriers
    free: StageBarriers
    landed: StageBarriers | None = None


class TileRole:
    """One warp: TMA of tiles of K or V, the last tile of an item first.

    keys, nbytes: of a tile. box_rows: of a box.
    """

    def __init__(self, keys: int, nbytes: int, box_rows: int = BOX_ROWS) -> None:
        self.keys = keys
        self.nbytes = nbytes
        self.box_rows = box_rows

    @cute.jit
    def run(self, tensor_map: Any, board: Board, target: cute.Tensor, pipe: TilePipe):
        """Wait item_ready and the free barriers. Signal item_free and the ready barriers.

        Where a product sums over the keys, its other factor is 0 behind the last one, but 0 times a NaN that may lie there is NaN.
        """
        use, cleared, turn = Int32(0), Int32(0), Int32(1)
        more, item = board.take(Int32(0))
        while more:
            walk = item.walk((item.keys + (self.keys - 1)) // self.keys)
            for i in cutlass.range(walk.count, unroll=1):
                walk.advance()
                stage, ready = pipe.ready.stage(use + i), pipe.ready.barrier(use + i)
                pipe.free.producer_acquire(use + i)
                first = walk.tile(i) * self.keys
                where = (item.kv_head, item.first_key + first)
                if cutlass.const_expr(pipe.landed is None):
                    load_tile(target, stage, tensor_map, where, ready, self.nbytes, self.box_rows)
                else:
                    whole = first + self.keys <= item.keys
                    landed = cutlass.select_(whole, ready, pipe.landed.barrier(cleared))
                    load_tile(target, stage, tensor_map, where, landed, self.nbytes, self.box_rows)
                    if not whole:
                        pipe.landed.consumer_wait(cleared)
                        clear_rows(target, stage, item.keys - first, cute.arch.lane_idx(), cute.arch.WARP_SIZE)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        arrive(ready)
                        cleared = cleared + 1
            use = use + walk.count
            more, item = board.take(turn)
            turn = turn + 1


class RowPipes(Protocol):
    """The barriers of an item's rows, one for each warpgroup."""

    @property
    def query_ready(self) -> StageBarriers:
        """Return the barriers of rows that have come."""

    @property
    def query_free(self) -> StageBarriers:
        """Return the barriers back."""


class QueryRole:
    """One warp: TMA of the rows of an item, in variants whose rows allow it. nbytes: of one warpgroup's rows."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    @cute.jit
    def run(self, sources: tuple[tuple[Any, cute.Tensor], ...], board: Board, pipes: RowPipes):
        """Wait item_ready, query_free. Signal item_free, query_ready. Rows behind the sequence's are those of the next one, or zeros.

        sources: tensor maps and where in shared memory their rows go.
        """
        done, turn = Int32(0), Int32(1)
        more, item = board.take(Int32(0))
        while more:
            if item.has_queries():
                for group in cutlass.range_constexpr(GROUPS):
                    use = done * GROUPS + group
                    ready = pipes.query_ready.barrier(use)
                    pipes.query_free.producer_acquire(use)
                    where = (item.head, item.first_row + group * GROUP_ROWS)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(ready, self.nbytes)
                        for tensor_map, target in sources:
                            load_boxes(target, group, tensor_map, where, ready)
                done = done + 1
            more, item = board.take(turn)
            turn = turn + 1


@cute.jit
def load_tile(
    target: cute.Tensor, stage: Any, tensor_map: Any, where: tuple[Int32, Int32], ready: cute.Pointer, nbytes: int, box_rows: int
):
    """Start the copy of a stage of (rows, columns, stages), from (head, first row) on; its bytes count on `ready`."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ready, nbytes)
        load_boxes(target, stage, tensor_map, where, ready, box_rows)


def load_boxes(
    target: cute.Tensor, stage: Any, tensor_map: Any, where: tuple[Int32, Int32], ready: cute.Pointer, box_rows: int = BOX_ROWS
) -> None:
    """Start the copies of a stage of (rows, columns, stages) in boxes of `box_rows` rows, from (head, first row) on. One thread."""
    rows, columns = cute.size(target, mode=[0]), cute.size(target, mode=[1])
    head, first = where
    for column in range(0, columns, BOX_COLUMNS):
        for row in range(0, rows, box_rows):
            box = target.iterator + (stage * (rows * columns) + column * rows + row * BOX_COLUMNS)
            load_box(box, tensor_map, (column, head, first + row), ready)
