"""The roles of the SM90 kernels that fill shared memory by TMA: one warp each, which runs ahead of the warpgroups that compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ..primitives.copies import load_box
from ..primitives.pipeline import StageBarriers, arrive
from ..sm90.cta import clear_rows, set_registers
from .operands import DensePrefillOperands, ItemQueue
from .sm90_config import (
    GROUP_ROWS,
    GROUPS,
    ITEM_WARP,
    KEY_WARP,
    QUERY_WARP,
    VALUE_WARP,
    DensePrefillSm90Geometry,
    DensePrefillSm90Smem,
)
from .sm90_items import DensePrefillSm90ItemRole

Landed = StageBarriers | None  # the barrier of a tile whose rows past the last key are cleared before it is ready; None: of none
Sources = tuple[tuple[Any, cute.Tensor], ...]  # tensor maps, and the places of their rows in shared memory


@cute.jit
def run_loads(
    warp: Int32,
    geometry: DensePrefillSm90Geometry,
    operands: DensePrefillOperands,
    queue: ItemQueue,
    smem: DensePrefillSm90Smem,
    rows: Sources,
    landed: tuple[Landed, Landed],
):
    """Give the roles of the first warpgroup their warps. rows: of an item. landed: of tiles of K, and of V."""
    set_registers(geometry.registers[0])
    tile = (geometry.tile_keys, geometry.box_keys)
    if warp == KEY_WARP:
        keys = DensePrefillTileRole(*tile, geometry.key_bytes, (smem.key_ready, smem.key_free), landed[0])
        keys.run(operands.args.k_map, queue, smem.sK)
        # the next kernel waits for the end of this one before it reads or writes anything
        cute.arch.griddepcontrol_launch_dependents()
    if warp == VALUE_WARP:
        values = DensePrefillTileRole(*tile, geometry.value_bytes, (smem.value_ready, smem.value_free), landed[1])
        values.run(operands.args.v_map, queue, smem.sV)
    if warp == ITEM_WARP:
        DensePrefillSm90ItemRole().run(operands.items, queue)
    if warp == QUERY_WARP:
        DensePrefillQueryRole(geometry.row_bytes).run(rows, queue, smem)


class DensePrefillTileRole:
    """One warp: TMA of tiles of K or V, the last tile of an item first. keys, nbytes: of a tile. box_rows: of a box. pipe: ready, free."""

    def __init__(self, keys: int, box_rows: int, nbytes: int, pipe: tuple[StageBarriers, StageBarriers], landed: Landed) -> None:
        self.keys = keys
        self.box_rows = box_rows
        self.nbytes = nbytes
        self.ready, self.free = pipe
        self.landed = landed

    @cute.jit
    def run(self, tensor_map: Any, queue: ItemQueue, target: cute.Tensor):
        """Wait item_ready and the free barriers. Signal item_free and the ready barriers.

        Where a product sums over the keys, its other factor is 0 past the last one, but 0 times a NaN of an unused row is NaN.
        """
        use, cleared, turn = Int32(0), Int32(0), Int32(1)
        more, item = queue.take(Int32(0))
        while more:
            walk = item.walk((item.keys + (self.keys - 1)) // self.keys)
            for i in cutlass.range(walk.count, unroll=1):
                walk.advance()
                stage, ready = self.ready.stage(use + i), self.ready.barrier(use + i)
                self.free.producer_acquire(use + i)
                first = walk.tile(i) * self.keys
                where = (item.kv_head, item.first_key + first)
                if cutlass.const_expr(self.landed is None):
                    load_tile(target, stage, tensor_map, where, ready, self.nbytes, self.box_rows)
                else:
                    whole = first + self.keys <= item.keys
                    landed = cutlass.select_(whole, ready, self.landed.barrier(cleared))
                    load_tile(target, stage, tensor_map, where, landed, self.nbytes, self.box_rows)
                    if not whole:
                        self.landed.consumer_wait(cleared)
                        clear_rows(target, stage, item.keys - first, cute.arch.lane_idx(), cute.arch.WARP_SIZE)
                        cute.arch.fence_proxy("async.shared", space="cta")
                        arrive(ready)
                        cleared = cleared + 1
            use = use + walk.count
            more, item = queue.take(turn)
            turn = turn + 1


@dataclass(frozen=True)
class DensePrefillQueryRole:
    """One warp: TMA of the rows of an item. nbytes: of one warpgroup's rows."""

    nbytes: int

    @cute.jit
    def run(self, sources: Sources, queue: ItemQueue, smem: DensePrefillSm90Smem):
        """Wait item_ready, query_free. Signal item_free, query_ready. Rows past the sequence's end are the next one's, or zeros."""
        done, turn = Int32(0), Int32(1)
        more, item = queue.take(Int32(0))
        while more:
            if item.has_queries():
                for group in cutlass.range_constexpr(GROUPS):
                    use = done * GROUPS + group
                    ready = smem.query_ready.barrier(use)
                    smem.query_free.producer_acquire(use)
                    where = (item.head, item.first_row + group * GROUP_ROWS)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(ready, self.nbytes)
                        for tensor_map, target in sources:
                            load_boxes(target, group, tensor_map, where, ready)
                done = done + 1
            more, item = queue.take(turn)
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
