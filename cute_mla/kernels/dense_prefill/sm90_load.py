"""The roles of the SM90 kernel that fill shared memory by TMA: one warp each, which runs ahead of the warpgroups that compute."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ..primitives.pipeline import arrive
from ..primitives.tma import load_box
from ..sm90.clear_rows import clear_rows
from .board import Board
from .operands import Operands
from .sm90_config import GROUP_ROWS, GROUPS, TILE_KEYS, Geometry, Pipes, Tiles, key_tiles


class KeyRole:
    """One warp: TMA of K."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes):
        """Wait item_ready, key_free. Signal item_free, key_ready."""
        use, turn = Int32(0), Int32(1)
        more, item = board.take(Int32(0))
        while more:
            count = key_tiles(item.keys)
            for i in cutlass.range(count, unroll=1):
                stage, ready = pipes.key_ready.stage(use + i), pipes.key_ready.barrier(use + i)
                pipes.key_free.producer_acquire(use + i)
                where = (item.kv_head, item.first_key + (count - 1 - i) * TILE_KEYS)
                load_tile(tiles.sK, stage, operands.args.k_map, where, ready, self.geometry.key_bytes)
            use = use + count
            more, item = board.take(turn)
            turn = turn + 1
        # the kernel behind this one waits for the end of it before it reads or writes anything
        cute.arch.griddepcontrol_launch_dependents()


class ValueRole:
    """One warp: TMA of V; zeroes over what lies behind the last key."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes):
        """Wait item_ready, value_free. Signal item_free, value_ready.

        P is 0 behind the last key, but 0 times a NaN that may lie there is NaN.
        """
        use, cleared, turn = Int32(0), Int32(0), Int32(1)
        more, item = board.take(Int32(0))
        while more:
            count = key_tiles(item.keys)
            for i in cutlass.range(count, unroll=1):
                stage, ready = pipes.value_ready.stage(use + i), pipes.value_ready.barrier(use + i)
                pipes.value_free.producer_acquire(use + i)
                first = (count - 1 - i) * TILE_KEYS
                where = (item.kv_head, item.first_key + first)
                whole = first + TILE_KEYS <= item.keys
                landed = cutlass.select_(whole, ready, pipes.value_landed.barrier(cleared))
                load_tile(tiles.sV, stage, operands.args.v_map, where, landed, self.geometry.value_bytes)
                if not whole:
                    pipes.value_landed.consumer_wait(cleared)
                    clear_rows(tiles.sV, stage, item.keys - first, cute.arch.lane_idx(), cute.arch.WARP_SIZE)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive(ready)
                    cleared = cleared + 1
            use = use + count
            more, item = board.take(turn)
            turn = turn + 1


class QueryRole:
    """One warp: TMA of Q, in variants whose rows of Q allow it."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes):
        """Wait item_ready, query_free. Signal item_free, query_ready. Rows behind the sequence's are those of the next one, or zeros."""
        done, turn = Int32(0), Int32(1)
        more, item = board.take(Int32(0))
        while more:
            if item.keys > 0:
                for group in cutlass.range_constexpr(GROUPS):
                    use = done * GROUPS + group
                    pipes.query_free.producer_acquire(use)
                    where = (item.head, item.first_row + group * GROUP_ROWS)
                    load_tile(tiles.sQ, group, operands.args.q_map, where, pipes.query_ready.barrier(use), self.geometry.query_bytes)
                done = done + 1
            more, item = board.take(turn)
            turn = turn + 1


@cute.jit
def load_tile(target: cute.Tensor, stage: Any, tensor_map: Any, where: tuple[Int32, Int32], ready: cute.Pointer, nbytes: int):
    """Start the copy of a stage of (rows, columns, stages), from (head, first row) on; its bytes count on `ready`."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ready, nbytes)
        load_boxes(target, stage, tensor_map, where, ready)


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
