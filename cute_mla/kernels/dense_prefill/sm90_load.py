"""The roles of the SM90 kernel that fill shared memory by TMA: one warp each, which runs ahead of the warpgroups that compute."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ..primitives.pipeline import arrive
from ..primitives.tma import load_box
from ..sm90.gemm import clear_rows
from .operands import Operands
from .sm90_config import GROUP_ROWS, GROUPS, TILE_KEYS, Geometry, Pipes, Tiles, key_tiles


class LoadRoles:
    """One method each. queries: whether Q comes by TMA too."""

    def __init__(self, geometry: Geometry, queries: bool) -> None:
        self.geometry = geometry
        self.queries = queries

    @cute.jit
    def load_keys(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits key_free. Signals key_ready."""
        use = Int32(0)
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            count = key_tiles(item.keys)
            for i in cutlass.range(count, unroll=1):
                slot, ready = pipes.key_ready.slot(use + i), pipes.key_ready.barrier(use + i)
                pipes.key_free.wait_free(use + i)
                where = (item.kv_head, item.first_key + (count - 1 - i) * TILE_KEYS)
                load_tile(tiles.sK, slot, operands.k_map, where, ready, self.geometry.key_bytes)
            use = use + count
        # the kernel behind this one waits for the end of it before it reads or writes anything
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def load_values(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits value_free. Signals value_ready.

        P is 0 behind the last key, but 0 times a NaN that may lie there is NaN."""
        use, cleared = Int32(0), Int32(0)
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            count = key_tiles(item.keys)
            for i in cutlass.range(count, unroll=1):
                slot, ready = pipes.value_ready.slot(use + i), pipes.value_ready.barrier(use + i)
                pipes.value_free.wait_free(use + i)
                first = (count - 1 - i) * TILE_KEYS
                where = (item.kv_head, item.first_key + first)
                whole = first + TILE_KEYS <= item.keys
                landed = cutlass.select_(whole, ready, pipes.value_landed.barrier(cleared))
                load_tile(tiles.sV, slot, operands.v_map, where, landed, self.geometry.value_bytes)
                if not whole:
                    pipes.value_landed.wait_ready(cleared)
                    clear_rows(tiles.sV, slot, item.keys - first, cute.arch.lane_idx(), cute.arch.WARP_SIZE)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive(ready)
                    cleared = cleared + 1
            use = use + count

    @cute.jit
    def load_queries(self, operands: Operands, tiles: Tiles, pipes: Pipes):
        """Waits query_free. Signals query_ready. Rows behind the sequence's are those of the next one, or zeros."""
        if cutlass.const_expr(self.queries):
            done = Int32(0)
            for turn in cutlass.range(operands.items.rounds(), unroll=1):
                item = operands.items.take(turn)
                if item.keys > 0:
                    for group in cutlass.range_constexpr(GROUPS):
                        use = done * GROUPS + group
                        pipes.query_free.wait_free(use)
                        where = (item.head, item.first_row + group * GROUP_ROWS)
                        load_tile(tiles.sQ, group, operands.q_map, where, pipes.query_ready.barrier(use), self.geometry.query_bytes)
                    done = done + 1


@cute.jit
def load_tile(target: cute.Tensor, slot: Any, tensor_map: Any, where: tuple[Int32, Int32], ready: cute.Pointer, nbytes: int):
    """One warp starts the copy of a slot of (rows, columns, slots), from (head, first row) on; its bytes count on `ready`."""
    rows, columns = cute.size(target, mode=[0]), cute.size(target, mode=[1])
    head, first = where
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ready, nbytes)
        for column in cutlass.range_constexpr(0, columns, BOX_COLUMNS):
            for row in cutlass.range_constexpr(0, rows, BOX_ROWS):
                box = target.iterator + (slot * (rows * columns) + column * rows + row * BOX_COLUMNS)
                load_box(box, tensor_map, (column, head, first + row), ready)
