"""The mma role of the SM100 logits kernel: scores of the keys of a tile, a lane each, for the columns of one or two row blocks.

sm100.py describes tiles and pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float8E4M3FN, Int32, Uint32, cute

from ...spec.mqa_logits import BLOCK_COLUMNS, TILE_KEYS
from ..primitives import tcgen05
from .items import WorkItem
from .sm100_config import BLOCK_BYTES, GROUPS, ITEM_COLUMNS, K_STEPS, QUERY_BYTES, SCORE_STAGES, STEP_BYTES, TILE_BYTES
from .sm100_item import Items


@dataclass(frozen=True)
class MqaLogitsMmaRoleSm100:
    """One warp. tmem: address of the tensor memory."""

    tmem: Int32

    @cute.jit
    def run(self, items: Items):
        """Wait item_ready, query_ready, key_ready, scores_free. Signal item_free, query_free, key_free, scores_ready."""
        turn, more = Int32(0), Boolean(True)
        queries, tile, first_round = Int32(0), Int32(0), Int32(0)
        while more:
            more, item = items.wait(turn)
            items.release(turn)
            if item.begin < item.end:
                items.smem.query_ready.consumer_wait(queries)
                query = tcgen05.k_major(items.smem.sQ + items.smem.query_ready.stage(queries) * QUERY_BYTES)
                rounds = items.rounds(item)
                if items.is_wide(item):
                    for r in cutlass.range(rounds, unroll=1):
                        self.multiply_wide(items, query, tile + r, first_round + r)
                else:
                    for r in cutlass.range(rounds, unroll=1):
                        self.multiply_narrow(items, query, item, tile, r, first_round + r)
                with cute.arch.elect_one():
                    tcgen05.commit_alone(items.smem.query_free.barrier(queries))
                queries, tile, first_round = queries + 1, tile + (item.end - item.begin), first_round + rounds
            turn = turn + 1

    @cute.jit
    def multiply_wide(self, items: Items, query: Any, tile: Int32, number: Int32):
        """Multiply a tile with both row blocks. number: of the round."""
        smem = items.smem
        smem.key_ready.consumer_wait(tile)
        smem.scale_ready.consumer_wait(tile)
        for group in cutlass.range_constexpr(GROUPS):
            smem.scores_of(group)[1].producer_acquire(number)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                block = query.advance_start_address(group * BLOCK_BYTES)
                self.multiply(items, block, tile, self.accumulator(items, number, group), BLOCK_COLUMNS)
                if cutlass.const_expr(group + 1 == GROUPS):
                    tcgen05.commit_alone(smem.key_free.barrier(tile))
                self.hand_over(smem.scores_of(group)[0].barrier(number))

    @cute.jit
    def multiply_narrow(self, items: Items, query: Any, item: WorkItem, first_tile: Int32, in_item: Int32, number: Int32):
        """Multiply a tile for each score group with the only row block. The last round may have one tile: a group passes it on."""
        smem = items.smem
        for group in cutlass.range_constexpr(GROUPS):
            place = in_item * GROUPS + group
            there = place < item.end - item.begin
            if there:
                smem.key_ready.consumer_wait(first_tile + place)
                smem.scale_ready.consumer_wait(first_tile + place)
            smem.scores_of(group)[1].producer_acquire(number)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                if there:
                    self.multiply(items, query, first_tile + place, self.accumulator(items, number, group), BLOCK_COLUMNS)
                    tcgen05.commit_alone(smem.key_free.barrier(first_tile + place))
                self.hand_over(smem.scores_of(group)[0].barrier(number))

    def hand_over(self, ready: cute.Pointer) -> None:
        """Arrive at scores_ready, for the scales that have landed and, once the products are done, for the scores. One thread."""
        cute.arch.mbarrier_arrive(ready)
        tcgen05.commit_alone(ready)

    def accumulator(self, items: Items, number: Int32, group: int) -> Int32:
        """Return the tensor memory of a score group in a round."""
        return self.tmem + Int32(Uint32(number) % SCORE_STAGES) * ITEM_COLUMNS + group * BLOCK_COLUMNS

    def multiply(self, items: Items, query: Any, tile: Int32, accumulator: Int32, columns: int) -> None:
        """Issue the scores of a tile. columns: rows of Q."""
        keys = tcgen05.k_major(items.smem.sKeys + items.smem.key_ready.stage(tile) * TILE_BYTES)
        product = tcgen05.instruction(Float8E4M3FN, rows=TILE_KEYS, columns=columns)
        for step in range(K_STEPS):
            tcgen05.multiply(
                accumulator,
                keys.advance_start_address(step * STEP_BYTES),
                query.advance_start_address(step * STEP_BYTES),
                product,
                accumulate=step > 0,
                group=tcgen05.OWN_GROUP,
            )
