"""The matrix products of the SM100 kernel: the role that issues them, and their operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.dense_prefill import D_V
from ..attention.lengths import larger
from ..primitives import tcgen05
from ..sm100.boxes import ROW_BYTES
from .sm100_config import (
    BOX_BYTES,
    FIRST_KEYS,
    K_STEP,
    OUTPUT_COLUMN,
    QUERY_TILES,
    SLOT_BYTES,
    STEPS_PER_BOX,
    STEPS_PER_SLOT,
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

    def keys(self, uses: list[Use]) -> list[Any]:
        """K of a key tile as operands, 64 columns each."""
        return [tcgen05.k_major(self.tiles.sKv + use.slot * SLOT_BYTES) for use in uses]

    def values(self, uses: list[Use]) -> list[Any]:
        """V of a key tile as operands, 64 keys each."""
        return [tcgen05.mn_major(self.tiles.sKv + use.slot * SLOT_BYTES, BOX_BYTES) for use in uses]

    def scores(self, tile: int, keys: list[Any]) -> None:
        """S = Q K^T of a Q tile."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=TILE_KEYS)
        for box, operand in enumerate(keys):
            query = tcgen05.k_major(self.tiles.sQ + (tile * self.geometry.query_bytes + box * SLOT_BYTES))
            for step in range(STEPS_PER_BOX):
                tcgen05.multiply(
                    self.tmem + tile * TILE_KEYS,
                    query.advance_start_address(step * K_MAJOR_STEP),
                    operand.advance_start_address(step * K_MAJOR_STEP),
                    shape,
                    accumulate=box + step > 0,
                    group=tcgen05.OWN_GROUP,
                )

    def output(self, tile: int, values: list[Any], first: int, end: int, accumulate: bool | Boolean) -> None:
        """O += P V, or O = P V, for the keys first .. end - 1 of a key tile."""
        shape = tcgen05.instruction(self.dtype, rows=TILE_ROWS, columns=D_V, transpose_b=True)
        probs = self.tmem + tile * TILE_KEYS
        for step in range(first // K_STEP, end // K_STEP):
            slot, step_in_slot = divmod(step, STEPS_PER_SLOT)
            tcgen05.multiply(
                self.tmem + (OUTPUT_COLUMN + tile * D_V),
                tcgen05.a_in_tmem(probs + step * TMEM_STEP),
                values[slot].advance_start_address(step_in_slot * MN_MAJOR_STEP),
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
        """Waits item_ready, kv_ready, query_ready, probs_ready, rest_ready. Signals item_free, scores_ready, output_ready,
        query_free, kv_free.

        Goes from item to item without a break: P V of a Q tile's last key tile comes after S of the other Q tile, and before its
        own first S of the next item, if that has keys. After the last item comes one without."""
        geometry = self.geometry
        turn, more = Int32(0), Boolean(True)
        slot, parity = Int32(geometry.slots - VALUE_SLOTS), Int32(1)  # of the values in front of the first keys: there are none
        # of each Q tile: items with keys, key tiles multiplied to S, and which one of its item the last of them is, if it waits for P V
        queries, count, waiting = [Int32(0), Int32(0)], [Int32(0), Int32(0)], [Int32(-1), Int32(-1)]
        while more:
            more, item = board.take(turn)
            tiles = key_tiles(item.keys)
            parts = [Part.of(item, tile) for tile in range(QUERY_TILES)]
            # the last P V of the item before may not wait for keys to come
            for t in cutlass.range(larger(tiles, Int32(1)), unroll=1):
                uses = Use(slot, parity).following(geometry.tile_slots + 1, geometry.slots)
                values, keys = uses[:VALUE_SLOTS], uses[VALUE_SLOTS:-1]
                begun = (waiting[0] >= 0) | (waiting[1] >= 0)
                if begun:
                    self.await_slots(pipes, values)
                for tile in cutlass.range_constexpr(QUERY_TILES):
                    if waiting[tile] >= 0:
                        self.multiply_output(pipes, gemm, tile, count[tile] - 1, values, waiting[tile] > 0)
                        if t == 0:
                            self.commit(pipes.of_tile(tile).output_ready.barrier(queries[tile] - 1))
                    if cutlass.const_expr(tile == 0):
                        if tiles > 0:
                            self.await_slots(pipes, keys)
                    elif begun:
                        self.free_slots(pipes, values)
                    own = t - parts[tile].skipped
                    waiting[tile] = Int32(-1)
                    if own >= 0 and own < parts[tile].tiles:
                        if own == 0:
                            pipes.of_tile(tile).query_ready.wait_ready(queries[tile])
                            queries[tile] = queries[tile] + 1
                        self.multiply_scores(pipes, gemm, tile, count[tile], keys)
                        if t == tiles - 1:
                            self.commit(pipes.of_tile(tile).query_free.barrier(queries[tile] - 1))
                        count[tile] = count[tile] + 1
                        waiting[tile] = own
                if tiles > 0:
                    self.free_slots(pipes, keys)
                    slot, parity = uses[-1].slot, uses[-1].parity
            turn = turn + 1

    def multiply_scores(self, pipes: Pipes, gemm: TileGemm, tile: int, count: Int32, keys: list[Use]) -> None:
        """S of a Q tile's count-th key tile, whose keys are there."""
        # S may be overwritten: the product with P that lies over it is in front of this one in the tensor core's queue
        operands = gemm.keys(keys)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.scores(tile, operands)
            tcgen05.commit_alone(pipes.of_tile(tile).scores_ready.barrier(count))

    def multiply_output(self, pipes: Pipes, gemm: TileGemm, tile: int, count: Int32, values: list[Use], accumulate: Boolean) -> None:
        """P V of a Q tile's count-th key tile, whose values are there."""
        own = pipes.of_tile(tile)
        operands = gemm.values(values)
        for ready, first, end in ((own.probs_ready, 0, FIRST_KEYS), (own.rest_ready, FIRST_KEYS, TILE_KEYS)):
            ready.wait_ready(count)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.output(tile, operands, first, end, accumulate)

    def await_slots(self, pipes: Pipes, uses: list[Use]) -> None:
        """Waits until slots are filled."""
        for use in uses:
            cute.arch.mbarrier_wait(pipes.kv_ready.base + use.slot, use.parity)

    def free_slots(self, pipes: Pipes, uses: list[Use]) -> None:
        """Slots may be loaded again when what has been issued is done."""
        with cute.arch.elect_one():
            for use in uses:
                tcgen05.commit_alone(pipes.kv_free.base + use.slot)

    def commit(self, barrier: cute.Pointer) -> None:
        """An arrival when what has been issued is done."""
        with cute.arch.elect_one():
            tcgen05.commit_alone(barrier)
