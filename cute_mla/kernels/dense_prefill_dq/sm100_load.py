"""The roles of the SM100 dQ kernel that fill shared memory by TMA: one warp each, ahead of the products by their pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS
from ...spec.dense_prefill_dq import TILE_ROWS
from ..dense_prefill.operands import DensePrefillItem, ItemQueue
from ..dense_prefill.sm100_config import BOX_BYTES
from ..primitives.copies import load_box
from ..primitives.pipeline import PipelineState, StageBarriers
from .operands import DqOperands
from .sm100_config import ROW_BOX_BYTES, DqSm100Geometry, DqSm100Smem


@dataclass(frozen=True)
class DqSm100KeyRole:
    """One warp: finds the items, loads K and Q."""

    geometry: DqSm100Geometry

    @cute.jit
    def run(self, operands: DqOperands, queue: ItemQueue, smem: DqSm100Smem):
        """Wait item_free, key_free, query_free. Signal item_ready, key_ready, query_ready."""
        items = operands.items
        boxes, stages = self.geometry.key_boxes, self.geometry.key_stages
        turn, more, loads = Int32(0), Boolean(True), Int32(0)
        stage, phase = Int32(0), Int32(0)
        while more:
            more = items.of_round(turn) < items.count()
            item = items.take(turn)
            queue.post(turn, more, item)
            for t in cutlass.range(self.geometry.key_tiles(item.keys), unroll=1):
                uses = PipelineState(stage, phase).following(boxes, stages)
                load_tile(self.geometry, smem.sK, operands.args.k_map, (smem.key_ready, smem.key_free), uses, item, t)
                if t == 0:
                    # the keys are on their way while the last S of the item before still reads Q
                    smem.query_free.producer_acquire(loads)
                    load_rows(smem.sQ, operands.args.q_map, smem.query_ready.barrier(loads), item, boxes)
                    loads = loads + 1
                following = smem.key_free.advance(uses[-1])
                stage, phase = following.stage, following.phase
            turn = turn + 1
        cute.arch.griddepcontrol_launch_dependents()
        smem.key_free.drain(PipelineState(stage, phase))


@dataclass(frozen=True)
class DqSm100ValueRole:
    """One warp: loads V and dO."""

    geometry: DqSm100Geometry

    @cute.jit
    def run(self, operands: DqOperands, queue: ItemQueue, smem: DqSm100Smem):
        """Wait item_ready, value_free, dout_free. Signal item_free, value_ready, dout_ready.

        Values past the last key reach columns of dP that are not used.
        """
        turn, more, loads = Int32(0), Boolean(True), Int32(0)
        stage, phase = Int32(0), Int32(0)
        while more:
            more, item = queue.take(turn)
            for t in cutlass.range(self.geometry.key_tiles(item.keys), unroll=1):
                uses = PipelineState(stage, phase).following(self.geometry.value_boxes, self.geometry.value_stages)
                load_tile(self.geometry, smem.sV, operands.args.v_map, (smem.value_ready, smem.value_free), uses, item, t)
                if t == 0:
                    smem.dout_free.producer_acquire(loads)
                    load_rows(smem.sD, operands.args.dout_map, smem.dout_ready.barrier(loads), item, self.geometry.value_boxes)
                    loads = loads + 1
                following = smem.value_free.advance(uses[-1])
                stage, phase = following.stage, following.phase
            turn = turn + 1
        smem.value_free.drain(PipelineState(stage, phase))


def load_tile(
    geometry: DqSm100Geometry,
    stages: cute.Pointer,
    tensor_map: Any,
    pipe: tuple[StageBarriers, StageBarriers],
    uses: list[PipelineState],
    item: DensePrefillItem,
    t: Int32,
) -> None:
    """Load the t-th tile of an item, the last tile of keys first, 64 columns a stage. pipe: ready, free."""
    ready, free = pipe
    row = item.first_key + (geometry.key_tiles(item.keys) - 1 - t) * geometry.tile_keys
    for box, use in enumerate(uses):
        free.producer_acquire(use)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ready.barrier(use), geometry.stage_bytes)
            load_box(stages + use.stage * geometry.stage_bytes, tensor_map, (box * BOX_COLUMNS, item.kv_head, row), ready.barrier(use))


def load_rows(target: cute.Pointer, tensor_map: Any, ready: cute.Pointer, item: DensePrefillItem, boxes: int) -> None:
    """Load the item's rows of Q or dO. Rows past the sequence's end are another sequence's, or zeros: their results go nowhere."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ready, boxes * ROW_BOX_BYTES)
        for box in range(boxes):
            for half in range(TILE_ROWS // BOX_ROWS):
                where = (box * BOX_COLUMNS, item.head, item.first_row + half * BOX_ROWS)
                load_box(target + (box * ROW_BOX_BYTES + half * BOX_BYTES), tensor_map, where, ready)
