"""The roles of the SM100 kernel that fill shared memory: by TMA, or, where that cannot be, Q element by element."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ..attention.lengths import smaller
from ..primitives.fragments import load_pair, store_words
from ..primitives.pipeline import arrive
from ..primitives.tma import load_box
from ..sm100.boxes import PIECE, PIECES_PER_ROW, ROW_BYTES
from .operands import Item, Operands
from .sm100_config import (
    BOX_BYTES,
    BOXES_PER_SLOT,
    HALF_KEYS,
    QUERY_TILES,
    QUERY_WARP,
    QUERY_WARPS,
    SLOT_BYTES,
    TILE_KEYS,
    TILE_ROWS,
    VALUE_SLOTS,
    Geometry,
    Part,
    Pipes,
    Tiles,
    Use,
    key_tiles,
)
from .sm100_work_items import Board

PIECE_COLUMNS = BOX_COLUMNS // PIECES_PER_ROW
QUERY_THREADS = 32 * QUERY_WARPS


class LoadRole:
    """One warp. loads_queries: whether Q comes by TMA too."""

    def __init__(self, geometry: Geometry, loads_queries: bool) -> None:
        self.geometry = geometry
        self.loads_queries = loads_queries

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes):
        """Waits item_free, kv_free, query_free. Signals item_ready, kv_ready, query_ready."""
        items = operands.items
        slots = self.geometry.slots
        turn, more = Int32(0), Boolean(True)
        slot, parity, loads = Int32(0), Int32(0), [Int32(0), Int32(0)]
        while more:
            more = items.of_round(turn) < items.count()
            item = items.take(turn)
            board.post(turn, more, item)
            for t in cutlass.range(key_tiles(item.keys), unroll=1):
                uses = Use(slot, parity).following(self.geometry.tile_slots + 1, slots)
                row = item.first_key + (key_tiles(item.keys) - 1 - t) * TILE_KEYS
                self.load_keys(operands, tiles, pipes, item, row, uses)
                if cutlass.const_expr(self.loads_queries) and t == 0:
                    loads = self.load_query_tiles(operands, tiles, pipes, item, loads)
                self.load_values(operands, tiles, pipes, item, row, uses[self.geometry.key_slots :])
                slot, parity = uses[-1].slot, uses[-1].parity
            turn = turn + 1
        cute.arch.griddepcontrol_launch_dependents()
        # no signal may reach a CTA that is gone
        for i in cutlass.range(slots, unroll=1):
            wraps = slot + i >= slots
            free = pipes.kv_free.base + cutlass.select_(wraps, slot + i - slots, slot + i)
            cute.arch.mbarrier_wait(free, cutlass.select_(wraps, parity, parity ^ 1))

    @cute.jit
    def load_keys(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: Item, row: Int32, uses: list[Use]):
        """Keys from a row on, 64 columns a slot."""
        for i in cutlass.range_constexpr(self.geometry.key_slots):
            ready, target = self.next_slot(tiles, pipes, uses[i])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, SLOT_BYTES)
                for box in cutlass.range_constexpr(BOXES_PER_SLOT):
                    where = (i * BOX_COLUMNS, item.kv_head, row + box * BOX_ROWS)
                    load_box(target + box * BOX_BYTES, operands.k_map, where, ready)

    @cute.jit
    def load_values(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: Item, row: Int32, uses: list[Use]):
        """Values from a row on, 64 rows a slot."""
        for i in cutlass.range_constexpr(VALUE_SLOTS):
            ready, target = self.next_slot(tiles, pipes, uses[i])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, SLOT_BYTES)
                for box in cutlass.range_constexpr(BOXES_PER_SLOT):
                    where = (box * BOX_COLUMNS, item.kv_head, row + i * HALF_KEYS)
                    load_box(target + box * BOX_BYTES, operands.v_map, where, ready)

    def next_slot(self, tiles: Tiles, pipes: Pipes, use: Use) -> tuple[cute.Pointer, cute.Pointer]:
        """(barrier, first byte) of a slot, when it is free."""
        cute.arch.mbarrier_wait(pipes.kv_free.base + use.slot, use.parity ^ 1)
        return pipes.kv_ready.base + use.slot, tiles.sKv + use.slot * SLOT_BYTES

    @cute.jit
    def load_query_tiles(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: Item, loads: list[Int32]):
        """Q of an item, of the tiles that have keys. Rows past the sequence's end are another's, or zeros: their results go
        nowhere. Returns the loads of each tile so far."""
        done = list(loads)
        for tile in cutlass.range_constexpr(QUERY_TILES):
            if Part.of(item, tile).tiles > 0:
                ready = pipes.of_tile(tile).query_ready.barrier(done[tile])
                pipes.of_tile(tile).query_free.wait_free(done[tile])
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, self.geometry.query_bytes)
                    for i in cutlass.range_constexpr(self.geometry.key_slots * BOXES_PER_SLOT):
                        columns, rows = divmod(i, BOXES_PER_SLOT)
                        where = (columns * BOX_COLUMNS, item.head, item.first_row + (tile * TILE_ROWS + rows * BOX_ROWS))
                        target = tiles.sQ + (tile * self.geometry.query_bytes + i * BOX_BYTES)
                        load_box(target, operands.q_map, where, ready)
                done[tile] = done[tile] + 1
        return done


class QueryRole:
    """Two warps, in variants without TMA for Q."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, operands: Operands, board: Board, tiles: Tiles, pipes: Pipes):
        """Waits item_ready, query_free. Signals item_free, query_ready."""
        turn, more, loads = Int32(0), Boolean(True), [Int32(0), Int32(0)]
        thread = cute.arch.thread_idx()[0] - QUERY_WARP * 32
        while more:
            more, item = board.take(turn)
            for tile in cutlass.range_constexpr(QUERY_TILES):
                part = Part.of(item, tile)
                if part.tiles > 0:
                    pipes.of_tile(tile).query_free.wait_free(loads[tile])
                    target = tiles.sQ + tile * self.geometry.query_bytes
                    self.load_tile(operands, item, tile * TILE_ROWS, target, thread)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive(pipes.of_tile(tile).query_ready.barrier(loads[tile]))
                    loads[tile] = loads[tile] + 1
            turn = turn + 1

    @cute.jit
    def load_tile(self, operands: Operands, item: Item, first: int, target: cute.Pointer, thread: Int32):
        """Q of the item's rows first .. first + 127, from any strides, as boxes of 128 rows x 128 swizzled bytes.

        Rows past the sequence's end repeat the last one: their results go nowhere."""
        rows_per_pass = QUERY_THREADS // PIECES_PER_ROW
        piece = thread % PIECES_PER_ROW
        for step in cutlass.range(TILE_ROWS // rows_per_pass, unroll=1):
            row = step * rows_per_pass + thread // PIECES_PER_ROW
            source = operands.q_row(item, smaller(first + row, item.rows - 1)) + piece * PIECE_COLUMNS
            place = target + (row * ROW_BYTES + (piece ^ (row % PIECES_PER_ROW)) * PIECE)
            for box in cutlass.range_constexpr(self.geometry.key_slots):
                words = [load_pair(source + (box * BOX_COLUMNS + 2 * i), False) for i in range(PIECE // 4)]
                store_words(place + box * SLOT_BYTES, words)
