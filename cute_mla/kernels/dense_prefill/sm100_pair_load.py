"""The role of the pair kernel that finds items and fills shared memory, by TMA."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ..primitives.elements import store_words
from ..primitives.pipeline import PipelineState, arrive_at
from ..primitives.tma import load_box, pair_box
from ..sm100.boxes import CHUNK, CHUNKS_PER_ROW, ROW_BYTES
from .board import Board
from .operands import Operands, WorkItem
from .sm100_config import BOX_BYTES, STAGE_BYTES, TILE_KEYS, TILE_ROWS, key_tiles
from .sm100_pair_config import (
    CTA_KEYS,
    EVEN_CTA,
    PAIR,
    PairGeometry,
    PairPipes,
    PairTiles,
    cta_rank,
)


class PairLoadRole:
    """One warp of each CTA."""

    def __init__(self, geometry: PairGeometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: PairTiles, pipes: PairPipes):
        """Wait item_free, kv_free, query_free, value_landed. Signal item_ready, kv_ready, query_ready.

        K of a key tile comes before V of the item's tile before it, as they are multiplied.
        """
        items = operands.items
        turn, more, loads, cleared = Int32(0), Boolean(True), Int32(0), Int32(0)
        state = PipelineState(Int32(0), Int32(0))
        while more:
            more = items.of_round(turn) < items.count()
            item = items.take(turn)
            board.post(turn, more, item)
            count = key_tiles(item.keys)
            for t in cutlass.range(count, unroll=1):
                self.load_keys(operands, tiles, pipes, item, (count - 1 - t) * TILE_KEYS, state)
                state = pipes.kv_ready.advance(state)
                if t == 0:
                    self.load_queries(operands, tiles, pipes, item, loads)
                    loads = loads + 1
                if t > 0:
                    cleared = self.load_values(operands, tiles, pipes, item, (count - t) * TILE_KEYS, state, cleared)
                    state = pipes.kv_ready.advance(state)
            if count > 0:
                cleared = self.load_values(operands, tiles, pipes, item, Int32(0), state, cleared)
                state = pipes.kv_ready.advance(state)
            turn = turn + 1
        cute.arch.griddepcontrol_launch_dependents()
        # no signal may reach a CTA that is gone
        pipes.kv_free.drain(state)
        pipes.query_free.producer_acquire(loads)

    @cute.jit
    def load_keys(self, operands: Operands, tiles: PairTiles, pipes: PairPipes, item: WorkItem, first: Int32, state: PipelineState):
        """Load this CTA's half of the keys of a tile. first: of the sequence, the tile's first key."""
        pipes.kv_free.producer_acquire(state)
        ready, target = pipes.kv_ready.barrier(state), tiles.sKv + state.stage * self.geometry.stage_bytes
        self.expect(ready, self.geometry.stage_bytes)
        with cute.arch.elect_one():
            for box in cutlass.range_constexpr(self.geometry.key_boxes):
                where = (box * BOX_COLUMNS, item.kv_head, item.first_key + first + cta_rank() * CTA_KEYS)
                pair_box(target + box * BOX_BYTES, operands.args.k_map, where, ready)

    @cute.jit
    def load_values(
        self, operands: Operands, tiles: PairTiles, pipes: PairPipes, item: WorkItem, first: Int32, state: PipelineState, cleared: Int32
    ) -> Int32:
        """Load this CTA's half of the columns of the values of a tile. Return how many tiles were cleared so far.

        Values behind the sequence's end are zeroed before the tile is ready: P is 0 there, but 0 times a NaN of an unused row is NaN.
        """
        pipes.kv_free.producer_acquire(state)
        ready, target = pipes.kv_ready.barrier(state), tiles.sKv + state.stage * self.geometry.stage_bytes
        where = (item.kv_head, item.first_key + first)
        if first + TILE_KEYS <= item.keys:
            self.expect(ready, self.geometry.stage_bytes)
            self.load_value_boxes(operands, target, where, ready, pair_box)
        else:
            landed = pipes.value_landed.barrier(Int32(0))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(landed, self.geometry.stage_bytes)
            self.load_value_boxes(operands, target, where, landed, load_box)
            pipes.value_landed.consumer_wait(cleared)
            self.clear_values(target, item.keys - first)
            cute.arch.fence_proxy("async.shared", space="cta")
            arrive_at(ready, EVEN_CTA)
            cleared = cleared + 1
        return cleared

    @cute.jit
    def expect(self, ready: cute.Pointer, nbytes: int):
        """Arrive on the even CTA's barrier, which then waits for the bytes of both CTAs."""
        if cta_rank() == EVEN_CTA:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, PAIR * nbytes)
        else:
            arrive_at(ready, EVEN_CTA)

    def load_value_boxes(
        self, operands: Operands, target: cute.Pointer, where: tuple[Int32, Int32], ready: cute.Pointer, load: Any
    ) -> None:
        """Start the copies of 128 values from (head, row) on, 64 columns a box of 128 rows."""
        head, first = where
        with cute.arch.elect_one():
            for box in range(self.geometry.value_boxes):
                column = (cta_rank() * self.geometry.value_boxes + box) * BOX_COLUMNS
                for row in range(0, TILE_KEYS, BOX_ROWS):
                    place = target + (box * STAGE_BYTES + row * ROW_BYTES)
                    load(place, operands.args.v_map, (column, head, first + row), ready)

    @cute.jit
    def clear_values(self, target: cute.Pointer, left: Int32):
        """Zero the values from row `left` on, 1 to 127. Whole rows, so the swizzle does not matter."""
        rows_per_pass = cute.arch.WARP_SIZE // CHUNKS_PER_ROW
        lane = cute.arch.lane_idx()
        row = left + lane // CHUNKS_PER_ROW
        while row < TILE_KEYS:
            for box in cutlass.range_constexpr(self.geometry.value_boxes):
                place = target + (box * STAGE_BYTES + row * ROW_BYTES + lane % CHUNKS_PER_ROW * CHUNK)
                store_words(place, [Int32(0)] * 4)
            row = row + rows_per_pass

    @cute.jit
    def load_queries(self, operands: Operands, tiles: PairTiles, pipes: PairPipes, item: WorkItem, loads: Int32):
        """Load this CTA's rows of Q. Those past the sequence's end are another sequence's, or zeros: their results go nowhere."""
        ready = pipes.query_ready.barrier(Int32(0))
        pipes.query_free.producer_acquire(loads)
        self.expect(ready, self.geometry.query_bytes)
        with cute.arch.elect_one():
            for box in cutlass.range_constexpr(self.geometry.key_boxes):
                for row in cutlass.range_constexpr(0, TILE_ROWS, BOX_ROWS):
                    where = (box * BOX_COLUMNS, item.head, item.first_row + cta_rank() * TILE_ROWS + row)
                    pair_box(tiles.sQ + (box * STAGE_BYTES + row * ROW_BYTES), operands.args.q_map, where, ready)
