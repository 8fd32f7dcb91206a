"""The mma role of the SM100 kernels over a latent: S = Q K^T and O += P V of a pair of CTAs, issued by the even one.

dense_decode/sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import SplitKvSchedule, TokenSchedule
from ..primitives import tcgen05
from ..primitives.arithmetic import smaller
from ..primitives.tcgen05 import Keep
from .config import (
    BOX_BYTES,
    CHUNK_COLUMNS,
    OUTPUT_COLUMN,
    PAIR,
    PAIR_ROWS,
    QUERY_COLUMN,
    ROW_BYTES,
    SCORE_COLUMN,
    STEP_BYTES,
    STEP_COLUMNS,
    STEPS_PER_BOX,
    SUM_COLUMN,
    SUM_COLUMNS,
    Geometry,
    Pipes,
    Tiles,
)


class TileValidity(Protocol):
    """The tiles without keys, for kernels whose roles then pass them on."""

    def wait(self, pipes: Any, tile: Int32) -> None:
        """Block until a tile's bits are there."""

    def has_keys(self, pipes: Any, tile: Int32) -> Boolean:
        """Return whether a key of a tile counts. Until the tile's kv_free is signalled."""


@dataclass(frozen=True)
class PairGemm:
    """The operands in both CTAs, which lie at the same addresses in each. One thread multiplies.

    dtype: of Q, K, V and P. has_rope: whether keys have columns that are not values.
    """

    dtype: type[cutlass.Numeric]
    has_rope: bool
    tiles: Tiles
    tmem: Int32

    @property
    def geometry(self) -> Geometry:
        """Return the geometry of the elements."""
        return self.tiles.geometry

    def keys(self, stage: Int32) -> Any:
        """Return K of a tile as operand."""
        return tcgen05.k_major(self.tiles.stage(stage))

    def probs_and_values(self, stage: Int32) -> tuple[Any, Any]:
        """Return P and V of a tile as operands."""
        base = self.tiles.stage(stage)
        return tcgen05.k_major(base + self.geometry.probs_offset), tcgen05.mn_major(base, BOX_BYTES)

    def scores(self, keys: Any, part: int, buffer: int | Int32 = 0) -> None:
        """Issue a part of S = Q K^T over the columns that each CTA holds, to one of the buffers for S.

        The lanes 0..63 and 64..127 get the two partial sums, since the even CTA's keys meet the Q in the lower lanes and the odd
        CTA's keys the Q in the upper ones.
        """
        part_keys = self.geometry.part_keys
        shape = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * part_keys)
        for step in range(self.geometry.latent_steps + (self.geometry.rope_steps if self.has_rope else 0)):
            # the box after the latent ones holds the RoPE columns, so the steps run through without a seam
            box, step_in_box = divmod(step, STEPS_PER_BOX)
            tcgen05.multiply(
                self.tmem + (SCORE_COLUMN + part * part_keys - buffer * TILE_KEYS),
                tcgen05.a_in_tmem(self.tmem + (QUERY_COLUMN + step * STEP_COLUMNS)),
                keys.advance_start_address(part * part_keys * ROW_BYTES + box * BOX_BYTES + step_in_box * STEP_BYTES),
                shape,
                accumulate=step > 0,
            )

    def output(self, probs: Any, values: Any, accumulate: Boolean) -> None:
        """Issue O += P V, or O = P V, for the 256 value columns of each CTA; and so the sum of P, where it is asked for."""
        wide = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * CHUNK_COLUMNS, transpose_b=True)
        narrow = tcgen05.instruction(self.dtype, rows=PAIR_ROWS, columns=PAIR * SUM_COLUMNS)
        chunks = self.geometry.output_chunks
        chunk_bytes = self.geometry.latent_boxes // chunks * BOX_BYTES
        for step in range(self.geometry.key_steps):
            row = step * self.geometry.step_keys * ROW_BYTES
            products = [(OUTPUT_COLUMN + chunk * CHUNK_COLUMNS, values, row + chunk * chunk_bytes, wide) for chunk in range(chunks)]
            if self.geometry.sums_probs:
                products.append((SUM_COLUMN, tcgen05.k_major(self.tiles.sOnes), 0, narrow))
            for i, (column, b, offset, product) in enumerate(products):
                # all multiply the same keys of P, which the tensor core may keep: that much less for the port of smem
                keep = Keep.FILL if i == 0 else Keep.LASTUSE if i == len(products) - 1 else Keep.USE
                tcgen05.multiply(
                    self.tmem + column,
                    probs.advance_start_address(step * STEP_BYTES),
                    b.advance_start_address(offset),
                    product,
                    accumulate=accumulate if step == 0 else True,
                    keep_a=keep,
                )


@dataclass(frozen=True)
class MmaRole:
    """One warp of the even CTA.

    validity: None where every tile has keys. Else Q of a work tile comes once the last S of the one before is there.
    """

    geometry: Geometry
    validity: TileValidity | None = None

    @cute.jit
    def run(self, schedule: SplitKvSchedule | TokenSchedule, pipes: Pipes, gemm: PairGemm):
        """Wait kv_ready, query_ready, scores_free, probs_ready, output_ready. Signal scores_ready, kv_free.

        S of a tile is issued before P V of the tile before it, so that the tensor cores work during every softmax.
        """
        if cutlass.const_expr(self.validity is None):
            tile = self.multiply_work_tiles(schedule, pipes, gemm)
        else:
            tile = self.multiply_valid_work_tiles(schedule, pipes, gemm)
        for i in cutlass.range_constexpr(self.geometry.scores):
            # the peer's last arrival must not reach a CTA that is gone
            pipes.scores_free.producer_acquire(tile * self.geometry.score_parts + i)

    @cute.jit
    def multiply_work_tiles(self, schedule: SplitKvSchedule | TokenSchedule, pipes: Pipes, gemm: PairGemm):
        """Multiply all work tiles. Return the number of tiles."""
        req, begin_tile = schedule.first_work_tile()
        tile, queries = Int32(0), Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            if tile_range.tiles > 0:
                pipes.query_ready.consumer_wait(queries)
                queries = queries + 1
                self.multiply_tiles(pipes, gemm, tile_range.tiles, tile)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile(req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        return tile

    @cute.jit
    def multiply_tiles(self, pipes: Pipes, gemm: PairGemm, tiles: Int32, tile: Int32):
        """Multiply a work tile that begins with the tile-th tile."""
        ahead = self.geometry.score_groups
        for t in cutlass.range(tiles + ahead, unroll=1):
            if t < tiles:
                self.multiply_scores(pipes, gemm, tile + t)
            if t > ahead - 1:
                self.multiply_output(pipes, gemm, tile + t - ahead, t > ahead)

    def multiply_scores(self, pipes: Pipes, gemm: PairGemm, tile: Int32) -> None:
        """Issue S of one tile."""
        keys = gemm.keys(pipes.kv_ready.stage(tile))
        pipes.kv_ready.consumer_wait(tile)
        buffer = pipes.scores_ready.stage(tile) if self.geometry.score_groups > 1 else 0
        for part in range(self.geometry.score_parts):
            use = tile * self.geometry.score_parts + part
            pipes.scores_free.producer_acquire(use)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                gemm.scores(keys, part, buffer)
                tcgen05.commit(pipes.scores_ready.barrier(use))

    def multiply_output(self, pipes: Pipes, gemm: PairGemm, tile: Int32, accumulate: Boolean) -> None:
        """Issue P V of one tile."""
        probs, values = gemm.probs_and_values(pipes.kv_ready.stage(tile))
        pipes.probs_ready.consumer_wait(tile)
        pipes.output_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            gemm.output(probs, values, accumulate)
            tcgen05.commit(pipes.kv_free.barrier(tile))

    # ---- tiles that may have no keys --------------------------------------------------------------------------------

    @cute.jit
    def multiply_valid_work_tiles(self, schedule: SplitKvSchedule | TokenSchedule, pipes: Pipes, gemm: PairGemm):
        """Multiply all work tiles, some of whose tiles may have no keys. Return the number of tiles.

        The first tile with keys begins O anew. The first S of a work tile is issued before the last P V of the one before. It is not if
        either has no tiles: Q then comes when that P V has been read out.
        """
        req, begin_tile = schedule.first_work_tile()
        tile, queries, issued, filled = Int32(0), Int32(0), Int32(0), Boolean(False)
        tiles = self.tiles_of(schedule, req, begin_tile)
        while req <= schedule.last_request():
            work_tile = schedule.work_tile(req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
            next_tiles = self.tiles_of(schedule, req, begin_tile)
            ahead = smaller(smaller(tiles, next_tiles), Int32(1))
            begun = Boolean(False)
            for t in cutlass.range(issued, smaller(tiles, Int32(1)) + tiles, unroll=1):
                next_filled = Boolean(False)
                if t < tiles + ahead:
                    if t == 0 or t == tiles:
                        pipes.query_ready.consumer_wait(queries)
                        queries = queries + 1
                    next_filled = self.multiply_valid_scores(pipes, gemm, tile + t)
                if t > 0:
                    self.multiply_valid_output(pipes, gemm, tile + t - 1, begun, filled)
                    begun = begun | filled
                filled = next_filled
            tile, tiles, issued = tile + tiles, next_tiles, ahead
        return tile

    @cute.jit
    def tiles_of(self, schedule: SplitKvSchedule | TokenSchedule, req: Int32, begin_tile: Int32):
        """Return the tiles of a work tile, 0 behind the last one."""
        last = schedule.last_request()
        return cutlass.select_(req <= last, schedule.tile_range(smaller(req, last), begin_tile).tiles, Int32(0))

    @cute.jit
    def multiply_valid_scores(self, pipes: Pipes, gemm: PairGemm, tile: Int32):
        """Issue S of one tile. Return whether it has keys."""
        keys = gemm.keys(pipes.kv_ready.stage(tile))
        pipes.kv_ready.consumer_wait(tile)
        filled = self.validity.has_keys(pipes, tile)
        pipes.kv_free.consumer_release(tile)  # the bits have been read
        for part in cutlass.range_constexpr(self.geometry.score_parts):
            use = tile * self.geometry.score_parts + part
            pipes.scores_free.producer_acquire(use)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                if filled:
                    gemm.scores(keys, part)
                tcgen05.commit(pipes.scores_ready.barrier(use))
        return filled

    @cute.jit
    def multiply_valid_output(self, pipes: Pipes, gemm: PairGemm, tile: Int32, begun: Boolean, filled: Boolean):
        """Issue P V of one tile, if it has keys."""
        probs, values = gemm.probs_and_values(pipes.kv_ready.stage(tile))
        pipes.probs_ready.consumer_wait(tile)
        pipes.output_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.output(probs, values, begun)
            tcgen05.commit(pipes.kv_free.barrier(tile))
