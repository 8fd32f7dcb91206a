"""The matrix products of the SM100 kernel: the role that issues them, and their operands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ..primitives import tcgen05
from ..primitives.pipeline import PipelineState
from ..sm100.boxes import ROW_BYTES
from .board import Board
from .operands import WorkItem
from .sm100_config import (
    BOX_BYTES,
    D_V,
    FIRST_KEYS,
    K_STEP,
    OUTPUT_COLUMN,
    QUERY_TILES,
    STAGE_BYTES,
    STEPS_PER_BOX,
    STEPS_PER_STAGE,
    TILE_KEYS,
    TILE_ROWS,
    VALUE_STAGES,
    Geometry,
    Pipes,
    QueryTileWork,
    Tiles,
    key_tiles,
)

K_MAJOR_STEP = K_STEP * 2  # bytes of 16 elements
MN_MAJOR_STEP = K_STEP * ROW_BYTES  # bytes of 16 rows
TMEM_STEP = K_STEP // 2  # columns of 16 elements


@dataclass(frozen=True)
class TileGemm:
    """Operands and products. One thread multiplies."""

    dtype: type[cutlass.Numeric]
    geometry: Geometry
    tiles: Tiles
    tmem: Int32

    def keys(self, uses: list[PipelineState]) -> list[Any]:
        """Return K of a key tile as operands, 64 columns each."""
        return [tcgen05.k_major(self.tiles.sKv + use.stage * STAGE_BYTES) for use in uses]

    def values(self, uses: list[PipelineState]) -> list[Any]:
        """Return V of a key tile as operands, 64 keys each."""
        return [tcgen05.mn_major(self.tiles.sKv + use.stage * STAGE_BYTES, BOX_BYTES) for use in uses]

    def scores(self, tile: int, keys: list[Any], boxes: range) -> None:
        """Issue S = Q K^T of a Q tile over the columns of some boxes."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=TILE_KEYS)
        for box in boxes:
            query = tcgen05.k_major(self.tiles.sQ + (tile * self.geometry.query_bytes + box * STAGE_BYTES))
            for step in range(STEPS_PER_BOX):
                tcgen05.multiply(
                    self.tmem + tile * TILE_KEYS,
                    query.advance_start_address(step * K_MAJOR_STEP),
                    keys[box].advance_start_address(step * K_MAJOR_STEP),
                    shape,
                    accumulate=box + step > 0,
                    group=tcgen05.OWN_GROUP,
                )

    def output(self, tile: int, values: list[Any], first: int, end: int, accumulate: bool | Boolean) -> None:
        """Issue O += P V, or O = P V, for the keys first .. end - 1 of a key tile."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=D_V, transpose_b=True)
        probs = self.tmem + tile * TILE_KEYS
        for step in range(first // K_STEP, end // K_STEP):
            stage, step_in_stage = divmod(step, STEPS_PER_STAGE)
            tcgen05.multiply(
                self.tmem + (OUTPUT_COLUMN + tile * D_V),
                tcgen05.a_in_tmem(probs + step * TMEM_STEP),
                values[stage].advance_start_address(step_in_stage * MN_MAJOR_STEP),
                shape,
                accumulate=accumulate if step == 0 else True,
                group=tcgen05.OWN_GROUP,
            )


class MmaRole:
    """One warp."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry

    @cute.jit
    def run(self, board: Board, pipes: Pipes, gemm: TileGemm):
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
            more, item = board.take(turn)
            tiles = item.walk(key_tiles(item.keys)).count
            works = [QueryTileWork.create(item, tile) for tile in range(QUERY_TILES)]
            # the last P V of the item before may not wait for keys to come
            for t in cutlass.range(item.rounds(tiles), unroll=1):
                uses = PipelineState(stage, phase).following(geometry.tile_stages + 1, geometry.stages)
                values, keys = uses[:VALUE_STAGES], uses[VALUE_STAGES:-1]
                begun = (waiting[0] >= 0) | (waiting[1] >= 0)
                if begun:
                    self.await_stages(pipes, values)
                for tile in cutlass.range_constexpr(QUERY_TILES):
                    if waiting[tile] >= 0:
                        self.multiply_output(pipes, gemm, tile, count[tile] - 1, values, waiting[tile] > 0)
                        if item.opens(t):
                            self.commit(pipes.of_tile(tile).output_ready.barrier(queries[tile] - 1))
                    if cutlass.const_expr(tile == 0):
                        if tiles > 0:
                            self.await_stages(pipes, keys[:-1])
                    elif begun:
                        self.free_stages(pipes, values)
                    own = t - works[tile].skipped
                    waiting[tile] = Int32(-1)
                    if own >= 0 and own < works[tile].tiles:
                        if item.opens(own):
                            pipes.of_tile(tile).query_ready.consumer_wait(queries[tile])
                            queries[tile] = queries[tile] + 1
                        self.multiply_scores(pipes, gemm, tile, count[tile], keys)
                        if item.closes(t, tiles):
                            self.commit(pipes.of_tile(tile).query_free.barrier(queries[tile] - 1))
                        count[tile] = count[tile] + 1
                        waiting[tile] = item.number(own)
                if tiles > 0:
                    self.free_stages(pipes, keys)
                    stage, phase = uses[-1].stage, uses[-1].phase
            if cutlass.const_expr(item.in_parts):
                self.close_item(pipes, item, works, queries)
            turn = turn + 1

    @cute.jit
    def close_item(self, pipes: Pipes, item: WorkItem, works: list[QueryTileWork], queries: list[Int32]):
        """Release Q behind an item whose last part has no tile. queries: items with keys of each Q tile, this one included."""
        if item.closes_late():
            for tile in cutlass.range_constexpr(QUERY_TILES):
                if works[tile].rows > 0:
                    self.commit(pipes.of_tile(tile).query_free.barrier(queries[tile] - 1))

    @cute.jit
    def multiply_scores(self, pipes: Pipes, gemm: TileGemm, tile: int, count: Int32, keys: list[PipelineState]):
        """Issue S of a Q tile's count-th key tile, whose keys have come, but for the last columns."""
        # S may be overwritten: the product with P that lies over it is in front of this one in the tensor core's queue
        operands = gemm.keys(keys)
        tcgen05.fence_after_wait()
        last = len(keys) - 1
        with cute.arch.elect_one():
            gemm.scores(tile, operands, range(last))
        self.await_stages(pipes, keys[last:])
        with cute.arch.elect_one():
            gemm.scores(tile, operands, range(last, last + 1))
            tcgen05.commit_alone(pipes.of_tile(tile).scores_ready.barrier(count))

    def multiply_output(
        self, pipes: Pipes, gemm: TileGemm, tile: int, count: Int32, values: list[PipelineState], accumulate: Boolean
    ) -> None:
        """Issue P V of a Q tile's count-th key tile, whose values have come."""
        own = pipes.of_tile(tile)
        operands = gemm.values(values)
        for ready, first, end in ((own.probs_ready, 0, FIRST_KEYS), (own.rest_ready, FIRST_KEYS, TILE_KEYS)):
            ready.consumer_wait(count)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.output(tile, operands, first, end, accumulate)

    @cute.jit
    def await_stages(self, pipes: Pipes, uses: list[PipelineState]):
        """Wait until stages are filled. All are asked before an answer is looked at: one takes 35 clocks."""
        filled = [cute.arch.mbarrier_try_wait(pipes.kv_ready.base + use.stage, use.phase) for use in uses]
        if not reduce(and_, filled):
            for i in cutlass.range_constexpr(len(uses)):
                cute.arch.mbarrier_wait(pipes.kv_ready.base + uses[i].stage, uses[i].phase)

    def free_stages(self, pipes: Pipes, uses: list[PipelineState]) -> None:
        """Release stages when everything issued so far is done."""
        with cute.arch.elect_one():
            for use in uses:
                tcgen05.commit_alone(pipes.kv_free.base + use.stage)

    def commit(self, barrier: cute.Pointer) -> None:
        """Arrive when everything issued so far is done."""
        with cute.arch.elect_one():
            tcgen05.commit_alone(barrier)
