"""The matrix products of the SM100 kernel: the role that issues them, and their operands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ..primitives import tcgen05
from ..primitives.pipeline import PipelineState
from ..primitives.smem import ROW_BYTES
from .operands import DensePrefillItem, ItemQueue
from .sm100_config import (
    BOX_BYTES,
    D_V,
    FIRST_KEYS,
    K_STEP,
    OUTPUT_COLUMN,
    PAIR,
    QUERY_TILES,
    STAGE_BYTES,
    STEPS_PER_BOX,
    STEPS_PER_STAGE,
    TILE_KEYS,
    TILE_ROWS,
    VALUE_STAGES,
    DensePrefillPairGeometry,
    DensePrefillPairSmem,
    DensePrefillSm100Geometry,
    DensePrefillSm100Smem,
    QueryTileWork,
    key_tiles,
)

K_MAJOR_STEP = K_STEP * 2  # bytes of 16 elements
MN_MAJOR_STEP = K_STEP * ROW_BYTES  # bytes of 16 rows
TMEM_STEP = K_STEP // 2  # columns of 16 elements


Operands = Iterable[tuple[Any, Any]]  # A and B of each step of a product


def multiply(place: Int32, operands: Operands, shape: tcgen05.Product, accumulate: bool | Boolean, group: Any = tcgen05.OWN_GROUP) -> None:
    """Issue D = A B, or D += A B, step by step. place: of D in tensor memory."""
    for step, (a, b) in enumerate(operands):
        tcgen05.multiply(place, a, b, shape, accumulate=accumulate if step == 0 else True, group=group)


def commit(barrier: cute.Pointer) -> None:
    """Arrive when everything issued so far is done."""
    with cute.arch.elect_one():
        tcgen05.commit_alone(barrier)


def box_steps(a: Any, b: Any, first_a: int = 0, first_b: int = 0) -> Operands:
    """Return the steps of a product over the 64 columns of a box of A's rows, and of B's. first_a, first_b: bytes before the boxes."""
    for step in range(STEPS_PER_BOX):
        yield a.advance_start_address(first_a + step * K_MAJOR_STEP), b.advance_start_address(first_b + step * K_MAJOR_STEP)


def row_steps(tmem: Int32, b: Any, steps: range, column: int = 0, first_b: int = 0) -> Operands:
    """Return steps of a product over the rows of B. column: of A in tensor memory, two elements a column. first_b: bytes before B."""
    for step in steps:
        yield tcgen05.a_in_tmem(tmem + (column + step * TMEM_STEP)), b.advance_start_address(first_b + step * MN_MAJOR_STEP)


@dataclass(frozen=True)
class DensePrefillTileGemm:
    """DensePrefillOperands and products. One thread multiplies."""

    dtype: type[cutlass.Numeric]
    geometry: DensePrefillSm100Geometry
    smem: DensePrefillSm100Smem
    tmem: Int32

    def keys(self, uses: list[PipelineState]) -> list[Any]:
        """Return K of a key tile as operands, 64 columns each."""
        return [tcgen05.k_major(self.smem.sKv + use.stage * STAGE_BYTES) for use in uses]

    def values(self, uses: list[PipelineState]) -> list[Any]:
        """Return V of a key tile as operands, 64 keys each."""
        return [tcgen05.mn_major(self.smem.sKv + use.stage * STAGE_BYTES, BOX_BYTES) for use in uses]

    def scores(self, tile: int, keys: list[Any], boxes: range) -> None:
        """Issue S = Q K^T of a Q tile over the columns of some boxes."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=TILE_KEYS)
        for box in boxes:
            query = tcgen05.k_major(self.smem.sQ + (tile * self.geometry.query_bytes + box * STAGE_BYTES))
            multiply(self.tmem + tile * TILE_KEYS, box_steps(query, keys[box]), shape, accumulate=box > 0)

    def output(self, tile: int, values: list[Any], first: int, end: int, accumulate: bool | Boolean) -> None:
        """Issue O += P V, or O = P V, for the keys first .. end - 1 of a key tile."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=D_V, transpose_b=True)
        probs, place = self.tmem + tile * TILE_KEYS, self.tmem + (OUTPUT_COLUMN + tile * D_V)
        for step in range(first // K_STEP, end // K_STEP):
            stage, step_in_stage = divmod(step, STEPS_PER_STAGE)
            b = values[stage].advance_start_address(step_in_stage * MN_MAJOR_STEP)
            multiply(place, [(tcgen05.a_in_tmem(probs + step * TMEM_STEP), b)], shape, accumulate if step == 0 else True)


@dataclass(frozen=True)
class DensePrefillSm100MmaRole:
    """One warp."""

    geometry: DensePrefillSm100Geometry

    @cute.jit
    def run(self, queue: ItemQueue, smem: DensePrefillSm100Smem, gemm: DensePrefillTileGemm):
        """Wait item_ready, kv_ready, query_ready, probs_ready, rest_ready.

        Signal item_free, scores_ready, output_ready, query_free, kv_free.

        Goes from item to item without a break: P V of a Q tile's last key tile comes after S of the other Q tile, and before its
        own first S of the next item, if that has keys. After the last item comes one without.
        """
        geometry = self.geometry
        turn, more = Int32(0), Boolean(True)
        stage, phase = Int32(geometry.stages - VALUE_STAGES), Int32(1)  # of the values in front of the first keys: there are none
        # of each Q tile: items with keys, key tiles multiplied to S, and which one of its item the last of them is, if it waits for P V
        queries, count, waiting = [Int32(0), Int32(0)], [Int32(0), Int32(0)], [Int32(-1), Int32(-1)]
        while more:
            more, item = queue.take(turn)
            tiles = item.walk(key_tiles(item.keys)).count
            works = [QueryTileWork.create(item, tile) for tile in range(QUERY_TILES)]
            # the last P V of the item before may not wait for keys to come
            for t in cutlass.range(item.rounds(tiles), unroll=1):
                uses = PipelineState(stage, phase).following(geometry.tile_stages + 1, geometry.stages)
                values, keys = uses[:VALUE_STAGES], uses[VALUE_STAGES:-1]
                begun = (waiting[0] >= 0) | (waiting[1] >= 0)
                if begun:
                    self.await_stages(smem, values)
                for tile in cutlass.range_constexpr(QUERY_TILES):
                    if waiting[tile] >= 0:
                        self.multiply_output(smem, gemm, tile, count[tile] - 1, values, waiting[tile] > 0)
                        if item.opens(t):
                            commit(smem.of_tile(tile).output_ready.barrier(queries[tile] - 1))
                    if cutlass.const_expr(tile == 0):
                        if tiles > 0:
                            self.await_stages(smem, keys[:-1])
                    elif begun:
                        self.free_stages(smem, values)
                    own = t - works[tile].skipped
                    waiting[tile] = Int32(-1)
                    if own >= 0 and own < works[tile].tiles:
                        if item.opens(own):
                            smem.of_tile(tile).query_ready.consumer_wait(queries[tile])
                            queries[tile] = queries[tile] + 1
                        self.multiply_scores(smem, gemm, tile, count[tile], keys)
                        if item.closes(t, tiles):
                            commit(smem.of_tile(tile).query_free.barrier(queries[tile] - 1))
                        count[tile] = count[tile] + 1
                        waiting[tile] = item.number(own)
                if tiles > 0:
                    self.free_stages(smem, keys)
                    stage, phase = uses[-1].stage, uses[-1].phase
            if cutlass.const_expr(item.in_parts):
                self.close_item(smem, item, works, queries)
            turn = turn + 1

    @cute.jit
    def close_item(self, smem: DensePrefillSm100Smem, item: DensePrefillItem, works: list[QueryTileWork], queries: list[Int32]):
        """Release Q after an item whose last part has no tile. queries: items with keys of each Q tile, this one included."""
        if item.closes_late():
            for tile in cutlass.range_constexpr(QUERY_TILES):
                if works[tile].rows > 0:
                    commit(smem.of_tile(tile).query_free.barrier(queries[tile] - 1))

    @cute.jit
    def multiply_scores(self, smem: DensePrefillSm100Smem, gemm: DensePrefillTileGemm, tile: int, count: Int32, keys: list[PipelineState]):
        """Issue S of a Q tile's count-th key tile, whose keys have come, but for the last columns."""
        # S may be overwritten: the product with P that lies over it is in front of this one in the tensor core's queue
        operands = gemm.keys(keys)
        tcgen05.fence_after_wait()
        last = len(keys) - 1
        with cute.arch.elect_one():
            gemm.scores(tile, operands, range(last))
        self.await_stages(smem, keys[last:])
        with cute.arch.elect_one():
            gemm.scores(tile, operands, range(last, last + 1))
            tcgen05.commit_alone(smem.of_tile(tile).scores_ready.barrier(count))

    def multiply_output(
        self,
        smem: DensePrefillSm100Smem,
        gemm: DensePrefillTileGemm,
        tile: int,
        count: Int32,
        values: list[PipelineState],
        accumulate: Boolean,
    ) -> None:
        """Issue P V of a Q tile's count-th key tile, whose values have come."""
        own = smem.of_tile(tile)
        operands = gemm.values(values)
        for ready, first, end in ((own.probs_ready, 0, FIRST_KEYS), (own.rest_ready, FIRST_KEYS, TILE_KEYS)):
            ready.consumer_wait(count)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.output(tile, operands, first, end, accumulate)

    @cute.jit
    def await_stages(self, smem: DensePrefillSm100Smem, uses: list[PipelineState]):
        """Wait until stages are filled. All are asked before an answer is looked at: one takes 35 clocks."""
        filled = [cute.arch.mbarrier_try_wait(smem.kv_ready.base + use.stage, use.phase) for use in uses]
        if not reduce(and_, filled):
            for i in cutlass.range_constexpr(len(uses)):
                cute.arch.mbarrier_wait(smem.kv_ready.base + uses[i].stage, uses[i].phase)

    def free_stages(self, smem: DensePrefillSm100Smem, uses: list[PipelineState]) -> None:
        """Release stages when everything issued so far is done."""
        with cute.arch.elect_one():
            for use in uses:
                tcgen05.commit_alone(smem.kv_free.base + use.stage)


@dataclass(frozen=True)
class DensePrefillPairTileGemm:
    """The operands in both CTAs, which lie at the same addresses in each. One thread multiplies."""

    dtype: type[cutlass.Numeric]
    geometry: DensePrefillPairGeometry
    smem: DensePrefillPairSmem
    tmem: Int32

    def scores(self, buffer: Int32, stage: Int32) -> None:
        """Issue S = Q K^T to one of the buffers."""
        shape = tcgen05.instruction(self.dtype, rows=PAIR * TILE_ROWS, columns=TILE_KEYS)
        keys = tcgen05.k_major(self.smem.sKv + stage * self.geometry.stage_bytes)
        queries = tcgen05.k_major(self.smem.sQ)
        for box in range(self.geometry.key_boxes):
            operands = box_steps(queries, keys, box * STAGE_BYTES, box * BOX_BYTES)
            multiply(self.tmem + buffer * TILE_KEYS, operands, shape, box > 0, tcgen05.PAIR_GROUP)

    def output(self, buffer: Int32, stage: Int32, first: int, end: int, accumulate: bool | Boolean) -> None:
        """Issue O += P V, or O = P V, for the keys first .. end - 1 of a key tile."""
        shape = tcgen05.instruction(self.dtype, rows=PAIR * TILE_ROWS, columns=self.geometry.config.d_v, transpose_b=True)
        values = tcgen05.mn_major(self.smem.sKv + stage * self.geometry.stage_bytes, STAGE_BYTES)
        operands = row_steps(self.tmem + buffer * TILE_KEYS, values, range(first // K_STEP, end // K_STEP))
        multiply(self.tmem + OUTPUT_COLUMN, operands, shape, accumulate if first == 0 else True, tcgen05.PAIR_GROUP)


class DensePrefillPairMmaRole:
    """One warp of the even CTA."""

    @cute.jit
    def run(self, queue: ItemQueue, smem: DensePrefillPairSmem, gemm: DensePrefillPairTileGemm):
        """Wait item_ready, kv_ready, query_ready, probs_ready, rest_ready.

        Signal item_free, scores_ready, output_ready, query_free, kv_free.

        S of a key tile is issued in front of P V of the item's tile before: so the tensor cores have work during every softmax but an
        item's last. That waits for less than Q of the next item, whose place the last S leaves.
        """
        turn, more, queries, count = Int32(0), Boolean(True), Int32(0), Int32(0)
        state = PipelineState(Int32(0), Int32(0))
        while more:
            more, item = queue.take(turn)
            tiles = key_tiles(item.keys)
            for t in cutlass.range(tiles, unroll=1):
                if t == 0:
                    smem.query_ready.consumer_wait(queries)
                    queries = queries + 1
                self.multiply_scores(smem, gemm, count, state)
                if t == tiles - 1:
                    self.commit(smem.query_free.barrier(Int32(0)))
                state = smem.kv_ready.advance(state)
                if t > 0:
                    self.multiply_output(smem, gemm, count - 1, state, t > 1)
                    state = smem.kv_ready.advance(state)
                count = count + 1
            if tiles > 0:
                self.multiply_output(smem, gemm, count - 1, state, tiles > 1)
                state = smem.kv_ready.advance(state)
            turn = turn + 1

    def multiply_scores(self, smem: DensePrefillPairSmem, gemm: DensePrefillPairTileGemm, count: Int32, state: PipelineState) -> None:
        """Issue S of the count-th key tile.

        Its buffer may be overwritten: the product with P that lies there is in front of this one in the tensor cores' queue.
        """
        smem.kv_ready.consumer_wait(state)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.scores(smem.scores_ready.stage(count), state.stage)
            tcgen05.commit(smem.kv_free.barrier(state))
            tcgen05.commit(smem.scores_ready.barrier(count))

    def multiply_output(
        self, smem: DensePrefillPairSmem, gemm: DensePrefillPairTileGemm, count: Int32, state: PipelineState, accumulate: Boolean
    ) -> None:
        """Issue P V of the count-th key tile."""
        smem.kv_ready.consumer_wait(state)
        for ready, first, end in ((smem.probs_ready, 0, FIRST_KEYS), (smem.rest_ready, FIRST_KEYS, TILE_KEYS)):
            ready.consumer_wait(count)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.output(smem.probs_ready.stage(count), state.stage, first, end, accumulate)
        with cute.arch.elect_one():
            tcgen05.commit(smem.kv_free.barrier(state))
            tcgen05.commit(smem.output_ready.barrier(count))

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive in both CTAs when everything issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit(barrier)
