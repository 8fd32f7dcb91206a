"""The roles of the SM100 kernel that find items and fill shared memory, by TMA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ..primitives.copies import load_box, pair_box
from ..primitives.pipeline import PipelineState, arrive_at
from ..primitives.rows import store_vector
from ..primitives.smem import CHUNK, CHUNKS_PER_ROW, ROW_BYTES
from .operands import DensePrefillItem, DensePrefillItems, DensePrefillOperands, ItemQueue
from .sm100_config import (
    BOX_BYTES,
    BOXES_PER_STAGE,
    CTA_KEYS,
    EVEN_CTA,
    HALF_KEYS,
    PAIR,
    QUERY_TILES,
    STAGE_BYTES,
    TILE_KEYS,
    TILE_ROWS,
    VALUE_STAGES,
    DensePrefillPairGeometry,
    DensePrefillPairSmem,
    DensePrefillSm100Geometry,
    DensePrefillSm100Smem,
    QueryTileWork,
    cta_rank,
    key_tiles,
)

Place = tuple[int, Int32, Int32]  # column, head, row


@dataclass(frozen=True)
class DensePrefillSm100LoadRole:
    """One warp. finds_items: whether it finds the items, and posts them; else it takes them."""

    geometry: DensePrefillSm100Geometry
    finds_items: bool = True

    @cute.jit
    def run(self, operands: DensePrefillOperands, queue: ItemQueue, smem: DensePrefillSm100Smem):
        """Wait item_free or item_ready, kv_free, query_free. Signal item_ready or item_free, kv_ready, query_ready."""
        stages = self.geometry.stages
        turn, more = Int32(0), Boolean(True)
        stage, phase, loads = Int32(0), Int32(0), [Int32(0), Int32(0)]
        while more:
            more, item = find(operands.items, queue, turn) if self.finds_items else queue.take(turn)
            walk = item.walk(key_tiles(item.keys))
            for t in cutlass.range(walk.count, unroll=1):
                walk.advance()
                uses = PipelineState(stage, phase).following(self.geometry.tile_stages + 1, stages)
                row = item.first_key + walk.tile(t) * TILE_KEYS
                self.load_keys(operands, smem, item, row, uses)
                if item.opens(t):
                    loads = self.load_query_tiles(operands, smem, item, loads)
                self.load_values(operands, smem, item, row, uses[self.geometry.key_stages :])
                stage, phase = uses[-1].stage, uses[-1].phase
            turn = turn + 1
        cute.arch.griddepcontrol_launch_dependents()
        smem.kv_free.drain(PipelineState(stage, phase))

    def load_keys(
        self, operands: DensePrefillOperands, smem: DensePrefillSm100Smem, item: DensePrefillItem, row: Int32, uses: list[PipelineState]
    ) -> None:
        """Load keys from a row on, 64 columns a stage."""
        for i in range(self.geometry.key_stages):
            place = partial(key_box, item, row, i)
            self.load_stage(smem, uses[i], operands.args.k_map, place)

    def load_values(
        self, operands: DensePrefillOperands, smem: DensePrefillSm100Smem, item: DensePrefillItem, row: Int32, uses: list[PipelineState]
    ) -> None:
        """Load values from a row on, 64 rows a stage."""
        for i in range(VALUE_STAGES):
            place = partial(value_box, item, row, i)
            self.load_stage(smem, uses[i], operands.args.v_map, place)

    def load_stage(self, smem: DensePrefillSm100Smem, use: PipelineState, tensor_map: Any, place: Callable[[int], Place]) -> None:
        """Load the boxes of a stage when it is free. place: of a box in k or v."""
        cute.arch.mbarrier_wait(smem.kv_free.base + use.stage, use.phase ^ 1)
        ready, target = smem.kv_ready.base + use.stage, smem.sKv + use.stage * STAGE_BYTES
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ready, STAGE_BYTES)
            for box in range(BOXES_PER_STAGE):
                where = place(box)
                load_box(target + box * BOX_BYTES, tensor_map, where, ready)

    @cute.jit
    def load_query_tiles(
        self,
        operands: DensePrefillOperands,
        smem: DensePrefillSm100Smem,
        item: DensePrefillItem,
        loads: list[Int32],
    ):
        """Load Q of an item, for the Q tiles that have keys. Return the loads of each Q tile so far.

        Rows past the sequence's end are another sequence's, or zeros: their results go nowhere.
        """
        done = list(loads)
        for tile in cutlass.range_constexpr(QUERY_TILES):
            if QueryTileWork.create(item, tile).tiles > 0:
                ready = smem.of_tile(tile).query_ready.barrier(done[tile])
                smem.of_tile(tile).query_free.producer_acquire(done[tile])
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, self.geometry.query_bytes)
                    for i in cutlass.range_constexpr(self.geometry.key_stages * BOXES_PER_STAGE):
                        columns, rows = divmod(i, BOXES_PER_STAGE)
                        where = (columns * BOX_COLUMNS, item.head, item.first_row + (tile * TILE_ROWS + rows * BOX_ROWS))
                        target = smem.sQ + (tile * self.geometry.query_bytes + i * BOX_BYTES)
                        load_box(target, operands.args.q_map, where, ready)
                done[tile] = done[tile] + 1
        return done


def key_box(item: DensePrefillItem, row: Int32, stage: int, box: int) -> Place:
    """Return the place of a box of keys. row: of the tile's first key."""
    return stage * BOX_COLUMNS, item.kv_head, row + box * BOX_ROWS


def value_box(item: DensePrefillItem, row: Int32, stage: int, box: int) -> Place:
    """Return the place of a box of values, likewise."""
    return box * BOX_COLUMNS, item.kv_head, row + stage * HALF_KEYS


def find(items: DensePrefillItems, queue: ItemQueue, turn: Int32) -> tuple[Boolean, DensePrefillItem]:
    """Find this CTA's item of a round and post it. Return (whether there is one in this round, the item, without rows if not)."""
    more = items.of_round(turn) < items.count()
    item = items.take(turn)
    queue.post(turn, more, item)
    return more, item


class DensePrefillSm100ItemRole:
    """One warp, where the queue looks further into items than the load role has time for."""

    @cute.jit
    def run(self, items: DensePrefillItems, queue: ItemQueue):
        """Wait item_free. Signal item_ready."""
        turn, posted = Int32(0), Int32(0)
        while items.of_round(turn) < items.count():
            posted = queue.post_item(posted, items.take(turn))
            turn = turn + 1
        queue.post_end(posted)


@dataclass(frozen=True)
class DensePrefillPairLoadRole:
    """One warp of each CTA."""

    geometry: DensePrefillPairGeometry

    @cute.jit
    def run(self, operands: DensePrefillOperands, queue: ItemQueue, smem: DensePrefillPairSmem):
        """Wait item_free, kv_free, query_free, value_landed. Signal item_ready, kv_ready, query_ready.

        K of a key tile comes before V of the item's tile before it, as they are multiplied.
        """
        items = operands.items
        turn, more, loads, cleared = Int32(0), Boolean(True), Int32(0), Int32(0)
        state = PipelineState(Int32(0), Int32(0))
        while more:
            more = items.of_round(turn) < items.count()
            item = items.take(turn)
            queue.post(turn, more, item)
            count = key_tiles(item.keys)
            for t in cutlass.range(count, unroll=1):
                self.load_keys(operands, smem, item, (count - 1 - t) * TILE_KEYS, state)
                state = smem.kv_ready.advance(state)
                if t == 0:
                    self.load_queries(operands, smem, item, loads)
                    loads = loads + 1
                if t > 0:
                    cleared = self.load_values(operands, smem, item, (count - t) * TILE_KEYS, state, cleared)
                    state = smem.kv_ready.advance(state)
            if count > 0:
                cleared = self.load_values(operands, smem, item, Int32(0), state, cleared)
                state = smem.kv_ready.advance(state)
            turn = turn + 1
        cute.arch.griddepcontrol_launch_dependents()
        # no signal may reach a CTA that is gone
        smem.kv_free.drain(state)
        smem.query_free.producer_acquire(loads)

    @cute.jit
    def load_keys(
        self,
        operands: DensePrefillOperands,
        smem: DensePrefillPairSmem,
        item: DensePrefillItem,
        first: Int32,
        state: PipelineState,
    ):
        """Load this CTA's half of the keys of a tile. first: of the sequence, the tile's first key."""
        smem.kv_free.producer_acquire(state)
        ready, target = smem.kv_ready.barrier(state), smem.sKv + state.stage * self.geometry.stage_bytes
        self.expect(ready, self.geometry.stage_bytes)
        with cute.arch.elect_one():
            for box in cutlass.range_constexpr(self.geometry.key_boxes):
                where = (box * BOX_COLUMNS, item.kv_head, item.first_key + first + cta_rank() * CTA_KEYS)
                pair_box(target + box * BOX_BYTES, operands.args.k_map, where, ready)

    @cute.jit
    def load_values(
        self,
        operands: DensePrefillOperands,
        smem: DensePrefillPairSmem,
        item: DensePrefillItem,
        first: Int32,
        state: PipelineState,
        cleared: Int32,
    ) -> Int32:
        """Load this CTA's half of the columns of the values of a tile. Return how many tiles were cleared so far.

        Values past the sequence's end are zeroed before the tile is ready: P is 0 there, but 0 times a NaN of an unused row is NaN.
        """
        smem.kv_free.producer_acquire(state)
        ready, target = smem.kv_ready.barrier(state), smem.sKv + state.stage * self.geometry.stage_bytes
        where = (item.kv_head, item.first_key + first)
        if first + TILE_KEYS <= item.keys:
            self.expect(ready, self.geometry.stage_bytes)
            self.load_value_boxes(operands, target, where, ready, pair_box)
        else:
            landed = smem.value_landed.barrier(Int32(0))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(landed, self.geometry.stage_bytes)
            self.load_value_boxes(operands, target, where, landed, load_box)
            smem.value_landed.consumer_wait(cleared)
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
        self, operands: DensePrefillOperands, target: cute.Pointer, where: tuple[Int32, Int32], ready: cute.Pointer, load: Any
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
    def clear_values(self, target: cute.Pointer, first_row: Int32):
        """Zero the values from `first_row` on, 1 to 127. Whole rows, so the swizzle does not matter."""
        rows_per_pass = cute.arch.WARP_SIZE // CHUNKS_PER_ROW
        lane = cute.arch.lane_idx()
        row = first_row + lane // CHUNKS_PER_ROW
        while row < TILE_KEYS:
            for box in cutlass.range_constexpr(self.geometry.value_boxes):
                place = target + (box * STAGE_BYTES + row * ROW_BYTES + lane % CHUNKS_PER_ROW * CHUNK)
                store_vector(place, [Int32(0)] * 4)
            row = row + rows_per_pass

    @cute.jit
    def load_queries(self, operands: DensePrefillOperands, smem: DensePrefillPairSmem, item: DensePrefillItem, loads: Int32):
        """Load this CTA's rows of Q. Those past the sequence's end are another sequence's, or zeros: their results go nowhere."""
        ready = smem.query_ready.barrier(Int32(0))
        smem.query_free.producer_acquire(loads)
        self.expect(ready, self.geometry.query_bytes)
        with cute.arch.elect_one():
            for box in cutlass.range_constexpr(self.geometry.key_boxes):
                for row in cutlass.range_constexpr(0, TILE_ROWS, BOX_ROWS):
                    where = (box * BOX_COLUMNS, item.head, item.first_row + cta_rank() * TILE_ROWS + row)
                    pair_box(smem.sQ + (box * STAGE_BYTES + row * ROW_BYTES), operands.args.q_map, where, ready)
