"""The roles of the SM100 kernel that find items and fill shared memory, by TMA."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ..primitives.pipeline import PipelineState
from ..primitives.tma import load_box
from .board import Board
from .operands import Operands, WorkItem, WorkItems
from .sm100_config import (
    BOX_BYTES,
    BOXES_PER_STAGE,
    HALF_KEYS,
    QUERY_TILES,
    STAGE_BYTES,
    TILE_KEYS,
    TILE_ROWS,
    VALUE_STAGES,
    Geometry,
    Pipes,
    QueryTileWork,
    Tiles,
    key_tiles,
)


class LoadRole:
    """One warp. finds_items: whether it finds the items, and posts them; else it takes them."""

    def __init__(self, geometry: Geometry, finds_items: bool = True) -> None:
        self.geometry = geometry
        self.finds_items = finds_items

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes):
        """Wait item_free or item_ready, kv_free, query_free. Signal item_ready or item_free, kv_ready, query_ready."""
        stages = self.geometry.stages
        turn, more = Int32(0), Boolean(True)
        stage, phase, loads = Int32(0), Int32(0), [Int32(0), Int32(0)]
        while more:
            more, item = find(operands.items, board, turn) if self.finds_items else board.take(turn)
            walk = item.walk(key_tiles(item.keys))
            for t in cutlass.range(walk.count, unroll=1):
                walk.advance()
                uses = PipelineState(stage, phase).following(self.geometry.tile_stages + 1, stages)
                row = item.first_key + walk.tile(t) * TILE_KEYS
                self.load_keys(operands, tiles, pipes, item, row, uses)
                if item.opens(t):
                    loads = self.load_query_tiles(operands, tiles, pipes, item, loads)
                self.load_values(operands, tiles, pipes, item, row, uses[self.geometry.key_stages :])
                stage, phase = uses[-1].stage, uses[-1].phase
            turn = turn + 1
        cute.arch.griddepcontrol_launch_dependents()
        pipes.kv_free.drain(PipelineState(stage, phase))

    @cute.jit
    def load_keys(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: WorkItem, row: Int32, uses: list[PipelineState]):
        """Load keys from a row on, 64 columns a stage."""
        for i in cutlass.range_constexpr(self.geometry.key_stages):
            ready, target = self.next_stage(tiles, pipes, uses[i])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, STAGE_BYTES)
                for box in cutlass.range_constexpr(BOXES_PER_STAGE):
                    where = (i * BOX_COLUMNS, item.kv_head, row + box * BOX_ROWS)
                    load_box(target + box * BOX_BYTES, operands.args.k_map, where, ready)

    @cute.jit
    def load_values(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: WorkItem, row: Int32, uses: list[PipelineState]):
        """Load values from a row on, 64 rows a stage."""
        for i in cutlass.range_constexpr(VALUE_STAGES):
            ready, target = self.next_stage(tiles, pipes, uses[i])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, STAGE_BYTES)
                for box in cutlass.range_constexpr(BOXES_PER_STAGE):
                    where = (box * BOX_COLUMNS, item.kv_head, row + i * HALF_KEYS)
                    load_box(target + box * BOX_BYTES, operands.args.v_map, where, ready)

    def next_stage(self, tiles: Tiles, pipes: Pipes, use: PipelineState) -> tuple[cute.Pointer, cute.Pointer]:
        """Return (barrier, first byte) of a stage, when it is free."""
        cute.arch.mbarrier_wait(pipes.kv_free.base + use.stage, use.phase ^ 1)
        return pipes.kv_ready.base + use.stage, tiles.sKv + use.stage * STAGE_BYTES

    @cute.jit
    def load_query_tiles(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: WorkItem, loads: list[Int32]):
        """Load Q of an item, for the Q tiles that have keys. Return the loads of each Q tile so far.

        Rows past the sequence's end are another sequence's, or zeros: their results go nowhere.
        """
        done = list(loads)
        for tile in cutlass.range_constexpr(QUERY_TILES):
            if QueryTileWork.create(item, tile).tiles > 0:
                ready = pipes.of_tile(tile).query_ready.barrier(done[tile])
                pipes.of_tile(tile).query_free.producer_acquire(done[tile])
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, self.geometry.query_bytes)
                    for i in cutlass.range_constexpr(self.geometry.key_stages * BOXES_PER_STAGE):
                        columns, rows = divmod(i, BOXES_PER_STAGE)
                        where = (columns * BOX_COLUMNS, item.head, item.first_row + (tile * TILE_ROWS + rows * BOX_ROWS))
                        target = tiles.sQ + (tile * self.geometry.query_bytes + i * BOX_BYTES)
                        load_box(target, operands.args.q_map, where, ready)
                done[tile] = done[tile] + 1
        return done


def find(items: WorkItems, board: Board, turn: Int32) -> tuple[Boolean, WorkItem]:
    """Find this CTA's item of a round and post it. Return (whether there is one in this round, the item, without rows if not)."""
    more = items.of_round(turn) < items.count()
    item = items.take(turn)
    board.post(turn, more, item)
    return more, item


class ItemRole:
    """One warp, where the board looks further into items than the load role has time for."""

    @cute.jit
    def run(self, items: WorkItems, board: Board):
        """Wait item_free. Signal item_ready."""
        turn, posted = Int32(0), Int32(0)
        while items.of_round(turn) < items.count():
            posted = board.post_item(posted, items.take(turn))
            turn = turn + 1
        board.post_end(posted)
