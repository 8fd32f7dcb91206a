"""The roles of the SM90 dQ kernel that fill shared memory by TMA: one warp each, which runs ahead of the warpgroups that compute."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ..dense_prefill.board import Board
from ..dense_prefill.sm90_config import GROUP_ROWS, GROUPS
from ..dense_prefill.sm90_load import load_boxes
from ..primitives.pipeline import arrive
from ..sm90.clear_rows import clear_rows
from .operands import Operands
from .sm90_config import Geometry, Pipes, Tiles


class KeyRole:
    """One warp: TMA of K; zeroes over what lies behind the last key."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes):
        """Wait item_ready, key_free. Signal item_free, key_ready.

        dS is 0 behind the last key, but 0 times a NaN that may lie there is NaN.
        """
        use, cleared, turn, size = Int32(0), Int32(0), Int32(1), self.geometry.tile_keys
        more, item = board.take(Int32(0))
        while more:
            count = self.geometry.tiles(item.keys)
            for i in cutlass.range(count, unroll=1):
                stage, ready = pipes.key_ready.stage(use + i), pipes.key_ready.barrier(use + i)
                pipes.key_free.producer_acquire(use + i)
                first = (count - 1 - i) * size
                whole = first + size <= item.keys
                landed = cutlass.select_(whole, ready, pipes.key_landed.barrier(cleared))
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(landed, self.geometry.key_bytes)
                    load_boxes(tiles.sK, stage, operands.args.k_map, (item.kv_head, item.first_key + first), landed, size)
                if not whole:
                    pipes.key_landed.consumer_wait(cleared)
                    clear_rows(tiles.sK, stage, item.keys - first, cute.arch.lane_idx(), cute.arch.WARP_SIZE)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive(ready)
                    cleared = cleared + 1
            use = use + count
            more, item = board.take(turn)
            turn = turn + 1
        # the kernel behind this one waits for the end of it before it reads or writes anything
        cute.arch.griddepcontrol_launch_dependents()


class ValueRole:
    """One warp: TMA of V."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes):
        """Wait item_ready, value_free. Signal item_free, value_ready.

        What lies behind the last key reaches columns of dP that are not used.
        """
        use, turn, size = Int32(0), Int32(1), self.geometry.tile_keys
        more, item = board.take(Int32(0))
        while more:
            count = self.geometry.tiles(item.keys)
            for i in cutlass.range(count, unroll=1):
                stage, ready = pipes.value_ready.stage(use + i), pipes.value_ready.barrier(use + i)
                pipes.value_free.producer_acquire(use + i)
                where = (item.kv_head, item.first_key + (count - 1 - i) * size)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, self.geometry.value_bytes)
                    load_boxes(tiles.sV, stage, operands.args.v_map, where, ready, size)
            use = use + count
            more, item = board.take(turn)
            turn = turn + 1


class QueryRole:
    """One warp: TMA of Q and dO, in variants whose rows allow it."""

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
                    ready = pipes.query_ready.barrier(use)
                    pipes.query_free.producer_acquire(use)
                    where = (item.head, item.first_row + group * GROUP_ROWS)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(ready, self.geometry.row_bytes)
                        load_boxes(tiles.sQ, group, operands.args.q_map, where, ready)
                        load_boxes(tiles.sD, group, operands.args.dout_map, where, ready)
                done = done + 1
            more, item = board.take(turn)
            turn = turn + 1
