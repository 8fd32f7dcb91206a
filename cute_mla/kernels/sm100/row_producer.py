"""The role of the SM100 kernels over a latent that brings keys row by row: four warps of each CTA.

Each CTA of a pair brings its half of the columns of every key, and puts it where the TMA of the dense kernel would: the other
roles see no difference.

Roles of a CTA (512 threads):
  score   warps 0..3: Q to tensor memory, softmax, P to shared memory, lse
  output  warps 4..7: rescale of O, epilogue
  gather  warps 8..11: where the keys lie, this CTA's columns of them, 16 keys a warp
  mma     warp 12, of the even CTA: S = Q K^T and O += P V for both

Pipelines beside those of dense_decode/sm100.py (producer -> consumer; arrivals per phase):
  kv_ready[5]      gather -> mma           8: the columns of both CTAs are in the stage
  kv_free[5]       mma -> gather, output   1
  seen_ready[5]    gather -> score         4: a bit per key of the stage, whether it counts; of indexed keys (indexed_keys.py)

Bytes come by cp.async, as they are, two tiles ahead of their conversion or, if they need none, of their hand-over: no load holds
a register or a warp. Of keys that do not count nothing is read: they are zeros in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Int32, cute

from ...manifest import Role
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import QueryOperands, TileRange
from ..primitives.arithmetic import smaller
from .config import EVEN_CTA, GROUP_WARPS, PAIR, SCORE_WARP, SIXTEEN_BIT, Pipes, Tiles
from .row_copy import ROW_BYTES, WARP_KEYS, LaneKeys, WarpRows

OUTPUT_WARP, PRODUCER_WARP = SIXTEEN_BIT.output_warp, SIXTEEN_BIT.load_warp
MMA_WARP = PRODUCER_WARP + GROUP_WARPS
THREADS = 32 * (MMA_WARP + GROUP_WARPS)  # the last three warps idle: registers are dealt out to four at a time
SCORE_REGISTERS, OUTPUT_REGISTERS, PRODUCER_REGISTERS, MMA_REGISTERS = 152, 160, 136, 64
assert SCORE_REGISTERS + OUTPUT_REGISTERS + PRODUCER_REGISTERS + MMA_REGISTERS <= 512, "of a lane in four warps"

KV_STAGES = SIXTEEN_BIT.kv_stages
LAG = 2  # tiles whose copies are under way
KV_ARRIVALS = PAIR * GROUP_WARPS  # that fill a stage
NO_POSITION = (1 << 31) - 1  # behind every list of keys


class KeySource(Protocol):
    """The positions of keys in memory. The types of list and look-up are the source's own."""

    def key_list(self, operands: Any, req: Int32) -> Any:
        """Return the list of one request's keys."""

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """Return the position of the lane's key in that list, of a work tile's first tile."""

    def look_up(self, keys: Any, position: Int32) -> Any:
        """Return what the list holds at a position; nothing is read past its end."""

    def locate(self, operands: Any, keys: Any, found: Any, position: Int32) -> LaneKeys:
        """Return the where the rows lie that a look-up has found."""


class ColumnMover(Protocol):
    """The way of a warp's share of a tile to shared memory."""

    def copy(self, rows: WarpRows, keys: Any) -> None:
        """Start the copies of a tile to the warp's rows of a stage."""

    def finish(self, rows: WarpRows) -> None:
        """Make columns of what this warp's copies have brought."""


class KeyBits(Protocol):
    """The bits by which warps tell which keys count."""

    def store(self, pipes: Any, stage: Int32, warp: Int32, keys: Any) -> None:
        """Write the bits of a warp's keys in a stage."""

    def commit(self, pipes: Any, tile: Int32) -> None:
        """Signal that the bits of a tile may be read."""


def first_lane_key(begin_tile: Int32, warp: Int32) -> Int32:
    """Return the position of the lane's key: lane l of a warp has the warp's key l % 16."""
    return begin_tile * TILE_KEYS + warp * WARP_KEYS + cute.arch.lane_idx() % WARP_KEYS


@dataclass(frozen=True)
class RowProducer:
    """Four warps.

    columns: the mover of the columns that the CTA of a rank holds. bits: None where all keys of a request count. early: whether a tile is
    handed over ahead of the wait for the stage of the tile LAG behind it. Behind that wait, S of a tile follows P V of the tile
    three before.
    """

    columns: Callable[[Int32], ColumnMover]
    source: KeySource
    bits: KeyBits | None = None
    early: bool = False

    @cute.jit
    def run(self, operands: QueryOperands, tiles: Tiles, pipes: Pipes, warp: Int32):
        """Wait kv_free. Signal kv_ready, seen_ready."""
        schedule = operands.schedule
        columns = self.columns(cute.arch.block_idx_in_cluster())
        req, begin_tile = schedule.first_work_tile()
        tile = Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            first_key = self.source.first_key(begin_tile, warp)
            self.fill_tiles(operands, tiles, pipes, columns, tile_range, req, first_key, tile, warp)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile(req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cp_async_wait_group(0)
        for late in cutlass.range(smaller(tile, Int32(LAG)), unroll=1):
            self.finish(tiles, pipes, columns, tile - smaller(tile, Int32(LAG)) + late, warp)
        # no signal may reach a CTA that is gone
        for i in cutlass.range(KV_STAGES, unroll=1):
            pipes.kv_free.producer_acquire(tile + i)

    @cute.jit
    def fill_tiles(
        self, operands: QueryOperands, tiles: Tiles, pipes: Pipes, columns: ColumnMover, tile_range: TileRange,
        req: Int32, first_key: Int32, first_tile: Int32, warp: Int32,
    ):  # fmt: skip
        """Start the copies of one work tile, and finish tiles LAG behind. Of this lane's key, the list is asked a tile ahead.

        first_key: the position of the lane's key in the list. first_tile: number of the work tile's first tile.
        """
        keys_of_request = self.source.key_list(operands, req)
        position = first_key
        found = self.source.look_up(keys_of_request, cutlass.select_(tile_range.tiles > 0, position, Int32(NO_POSITION)))
        for t in cutlass.range(tile_range.tiles, unroll=1):
            if cutlass.const_expr(self.early):
                cute.arch.cp_async_wait_group(LAG - 1)
                if first_tile + t >= LAG:
                    self.finish(tiles, pipes, columns, first_tile + t - LAG, warp)
            keys = self.source.locate(operands, keys_of_request, found, position)
            position = position + TILE_KEYS
            # nothing is fetched for the work tile that follows: its tiles may be another partition's
            found = self.source.look_up(keys_of_request, cutlass.select_(t + 1 < tile_range.tiles, position, Int32(NO_POSITION)))
            use = first_tile + t
            pipes.kv_free.producer_acquire(use)
            columns.copy(warp_rows(tiles, pipes, use, warp), keys)
            cute.arch.cp_async_commit_group()
            if cutlass.const_expr(self.bits is not None):
                self.bits.store(pipes, pipes.kv_ready.stage(use), warp, keys)
            if cutlass.const_expr(not self.early):
                cute.arch.cp_async_wait_group(LAG)
                if use >= LAG:
                    self.finish(tiles, pipes, columns, use - LAG, warp)

    def finish(self, tiles: Tiles, pipes: Pipes, columns: ColumnMover, tile: Int32, warp: Int32) -> None:
        """Make columns of a tile whose copies have landed, and hand them over."""
        columns.finish(warp_rows(tiles, pipes, tile, warp))
        self.commit(pipes, tile)

    def commit(self, pipes: Any, tile: Int32) -> None:
        """Signal that the warp's share of a tile is in its stage."""
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.kv_ready.producer_commit(tile, cta=EVEN_CTA)
        if self.bits is not None:
            self.bits.commit(pipes, tile)


def warp_rows(tiles: Tiles, pipes: Pipes, tile: Int32, warp: Int32) -> WarpRows:
    """Return a warp's rows of a tile's stage."""
    stage = pipes.kv_ready.stage(tile)
    return WarpRows(tiles.stage(stage) + warp * (WARP_KEYS * ROW_BYTES), stage * GROUP_WARPS + warp)


def role_table(producer: str) -> tuple[Role, ...]:
    """Return the roles of a CTA. producer: name of the role that brings the keys."""
    return (
        Role("score", SCORE_WARP, GROUP_WARPS),
        Role("output", OUTPUT_WARP, GROUP_WARPS),
        Role(producer, PRODUCER_WARP, GROUP_WARPS),
        Role("mma", MMA_WARP, 1),
    )
