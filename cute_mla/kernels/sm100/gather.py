"""The role of the SM100 kernels over a latent that brings keys row by row: four warps of each CTA.

Each CTA of a pair brings its half of the columns of every key, and puts it where the TMA of the dense kernel would: the other
roles see no difference.

Roles of a CTA (512 threads):
  score   warps 0..3: Q to tensor memory, softmax, P to shared memory, lse
  output  warps 4..7: rescale of O, epilogue
  gather  warps 8..11: where the keys lie, this CTA's columns of them, 16 keys a warp
  mma     warp 12, of the even CTA: S = Q K^T and O += P V for both

Pipelines besides those of dense_decode/sm100.py (producer -> consumer; arrivals per phase):
  kv_ready[5]      gather -> mma           8: the columns of both CTAs are in the stage
  kv_free[5]       mma -> gather, output   1
  seen_ready[5]    gather -> score         4: a bit per key of the stage, whether it counts; of keys that indices name

Lane l of a warp knows where key l % 16 lies. Bytes come by cp.async, as they are, in passes of 16 bytes a lane, two tiles ahead of
their conversion or, if they need none, of their hand-over: no load holds a register or a warp. Of keys that do not count nothing is
read: they are zeros in shared memory, and get scores of -inf in tiles that have any.

What arrives in shared memory are rows of 128 swizzled bytes: chunk c of row r lies at place c ^ (r % 8). Lanes are dealt out so that
the eight lanes which store at the same time meet eight different places.

e4m3 columns are converted in their stage to 16-bit columns. A lane copies 16 bytes to where the first of the two chunks belongs that
they become. Two tiles later the same lane reads them back and writes both chunks: nobody else touches that place, so a wait for the
lane's own copies is all the order it takes. The chunks lie side by side but for the swizzle: a lane stores one after the other, and
its neighbours in a quad of lanes those two further. So that eight lanes which store at the same time meet eight places, they have keys
whose rows differ in the other bits of the swizzle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import cutlass
from cutlass import Boolean, Int32, Int64, Uint16, cute

from ...spec.mla import ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS, LatentOperands, TileRange
from ..primitives.arithmetic import from_lane, smaller
from ..primitives.copies import start_copy
from ..primitives.rows import aligned
from .config import (
    BOX_BYTES,
    CTA_COLUMNS,
    CTA_ROPE,
    EVEN_CTA,
    GROUP_WARPS,
    ROW_BYTES,
    SEEN_WORDS,
    SIXTEEN_BIT,
    VECTOR,
    LatentSmemSm100,
)

WARP_KEYS = 16  # of a tile, for one of the four gather warps
CHUNK = 16  # bytes of one access
CHUNKS_PER_ROW = ROW_BYTES // CHUNK
LANES = 32
BOX_LANES = BOX_COLUMNS // CHUNK  # that fetch the e4m3 columns of one box and key
KEYS_AT_ONCE = LANES // (BOX_LANES * SIXTEEN_BIT.latent_boxes)  # of one pass over latent columns

LAG = 2  # tiles whose copies are under way
NO_POSITION = (1 << 31) - 1  # after every list of keys


# ---- the role -----------------------------------------------------------------------------------------------------------


class LatentKeySourceSm100(Protocol):
    """The positions of keys in memory. The types of list and look-up are the source's own."""

    def key_list(self, operands: Any, req: Int32) -> Any:
        """Return the list of one request's keys."""

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """Return the position of the lane's key in that list, of a work tile's first tile."""
        return begin_tile * TILE_KEYS + warp * WARP_KEYS + cute.arch.lane_idx() % WARP_KEYS

    def look_up(self, keys: Any, position: Int32) -> Any:
        """Return the entry of the list at a position; nothing is read past its end."""

    def locate(self, operands: Any, keys: Any, found: Any, position: Int32) -> LaneKeys:
        """Return the addresses of the rows that a look-up has found."""


class LatentColumnsSm100(Protocol):
    """The way of a warp's share of a tile to shared memory."""

    def copy(self, rows: WarpRows, keys: Any) -> None:
        """Start the copies of a tile to the warp's rows of a stage."""

    def finish(self, rows: WarpRows) -> None:
        """Make columns of what this warp's copies have brought."""


@dataclass(frozen=True)
class LatentGatherRoleSm100:
    """Four warps.

    columns: the mover of the columns that the CTA of a rank holds. early: whether a tile is handed over before the wait for the stage of
    the tile LAG after it. After that wait, S of a tile follows P V of the tile three before.
    """

    columns: Callable[[Int32], LatentColumnsSm100]
    source: LatentKeySourceSm100
    early: bool = False

    @cute.jit
    def run(self, operands: LatentOperands, smem: LatentSmemSm100, warp: Int32):
        """Wait kv_free. Signal kv_ready, seen_ready."""
        schedule = operands.schedule
        columns = self.columns(cute.arch.block_idx_in_cluster())
        req, begin_tile = schedule.first_work_tile()
        tile = Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            first_key = self.source.first_key(begin_tile, warp)
            self.fill_tiles(operands, smem, columns, tile_range, req, first_key, tile, warp)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile(req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.cp_async_wait_group(0)
        for late in cutlass.range(smaller(tile, Int32(LAG)), unroll=1):
            self.finish(smem, columns, tile - smaller(tile, Int32(LAG)) + late, warp)
        # no signal may reach a CTA that is gone
        for i in cutlass.range(smem.geometry.kv_stages, unroll=1):
            smem.kv_free.producer_acquire(tile + i)

    @cute.jit
    def fill_tiles(
        self, operands: LatentOperands, smem: LatentSmemSm100, columns: LatentColumnsSm100, tile_range: TileRange,
        req: Int32, first_key: Int32, first_tile: Int32, warp: Int32,
    ):  # fmt: skip
        """Start the copies of one work tile, and finish tiles LAG before. Of this lane's key, the list is asked a tile ahead.

        first_key: the position of the lane's key in the list. first_tile: number of the work tile's first tile.
        """
        keys_of_request = self.source.key_list(operands, req)
        position = first_key
        found = self.source.look_up(keys_of_request, cutlass.select_(tile_range.tiles > 0, position, Int32(NO_POSITION)))
        for t in cutlass.range(tile_range.tiles, unroll=1):
            if cutlass.const_expr(self.early):
                cute.arch.cp_async_wait_group(LAG - 1)
                if first_tile + t >= LAG:
                    self.finish(smem, columns, first_tile + t - LAG, warp)
            keys = self.source.locate(operands, keys_of_request, found, position)
            position = position + TILE_KEYS
            # nothing is fetched for the work tile that follows: its tiles may be another partition's
            found = self.source.look_up(keys_of_request, cutlass.select_(t + 1 < tile_range.tiles, position, Int32(NO_POSITION)))
            use = first_tile + t
            smem.kv_free.producer_acquire(use)
            columns.copy(warp_rows(smem, use, warp), keys)
            cute.arch.cp_async_commit_group()
            if cutlass.const_expr(smem.seen_ready is not None):
                store_seen(smem, use, warp, keys)
            if cutlass.const_expr(not self.early):
                cute.arch.cp_async_wait_group(LAG)
                if use >= LAG:
                    self.finish(smem, columns, use - LAG, warp)

    def finish(self, smem: LatentSmemSm100, columns: LatentColumnsSm100, tile: Int32, warp: Int32) -> None:
        """Make columns of a tile whose copies have landed, and hand them over."""
        columns.finish(warp_rows(smem, tile, warp))
        cute.arch.fence_proxy("async.shared", space="cta")
        smem.kv_ready.producer_commit(tile, cta=EVEN_CTA)
        if smem.seen_ready is not None:
            smem.seen_ready.producer_commit(tile)


def warp_rows(smem: LatentSmemSm100, tile: Int32, warp: Int32) -> WarpRows:
    """Return a warp's rows of a tile's stage."""
    stage = smem.kv_ready.stage(tile)
    return WarpRows(smem.stage(stage) + warp * (WARP_KEYS * ROW_BYTES), stage * GROUP_WARPS + warp)


# ---- keys that count ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LaneKeys:
    """The keys of a warp: lane l has key l % 16. row: address in gmem, 0 for a key that does not count."""

    row: Int64

    def row_of(self, key: Int32) -> Int64:
        """Return the address of a key's row."""
        return from_lane(self.row, key)

    def seen(self) -> Int32:
        """Return a bit per key, from bit 0 on: whether it counts. The upper 16 bits are other keys'."""
        return cute.arch.vote_ballot_sync(self.row != 0)


@dataclass(frozen=True)
class WarpRows:
    """A warp's rows of a stage. first: first byte of the first row, in the first box. number: of those of all stages and warps."""

    first: cute.Pointer
    number: Int32


@cute.jit
def store_seen(smem: LatentSmemSm100, tile: Int32, warp: Int32, keys: LaneKeys):
    """Write the warp's half of a word of bits, a bit per key."""
    stage, seen = smem.kv_ready.stage(tile), keys.seen()
    if cute.arch.lane_idx() == 0:
        words = cute.recast_ptr(smem.sSeen + stage * SEEN_WORDS, dtype=Uint16)
        # in the word of the score threads that have these keys: two warps in a row, or, of two parts, every other one
        place = warp if smem.geometry.score_parts == 1 else warp % 2 * 2 + warp // 2
        (words + place).store(Uint16(seen & 0xFFFF))


# ---- columns of rows ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CopiedColumns:
    """16-bit columns, `chunks` 16-byte chunks of each key from byte `first` of its row on, to boxes from `box` on.

    held: whether this CTA holds them; None: always. Zeros are copied for columns that it does not hold. key: of those of a pass, this
    lane's. chunk: the lane's chunk of that key.
    """

    chunks: int
    box: int | Int32
    first: Int32
    held: Boolean | None
    key: Int32
    chunk: Int32

    @staticmethod
    def create(chunks: int, box: int | Int32, first: Int32, held: Boolean | None = None) -> CopiedColumns:
        """Return the mover of so many chunks. chunks: 4, or a multiple of 8."""
        lane = cute.arch.lane_idx()
        # half a row a key: the lanes that store together take keys j and j + 4, whose swizzled halves differ
        halves = (lane >> 3) | ((lane >> 2) & 1) << 2
        key = halves if chunks < CHUNKS_PER_ROW else lane // chunks
        return CopiedColumns(chunks, box, first, held, key, lane % chunks)

    @property
    def passes(self) -> int:
        """Return the copies of a lane and tile."""
        return WARP_KEYS * self.chunks // LANES

    def copy(self, step: int, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Start a copy of one pass to the warp's rows of a stage; zeros for keys that do not count."""
        key = self.key + step * max(LANES // self.chunks, 1)
        row = keys.row_of(key)
        box = self.box + self.chunk // CHUNKS_PER_ROW
        place = (self.chunk % CHUNKS_PER_ROW) ^ (key % CHUNKS_PER_ROW)
        target = rows + (box * BOX_BYTES + key * ROW_BYTES + place * CHUNK)
        start_copy(target, row + (self.first + self.chunk * CHUNK), both(row != 0, self.held), CHUNK)


@dataclass(frozen=True)
class E4m3Columns:
    """16 columns of a key a lane and pass.

    source: byte of a row at which this lane's columns begin. held: whether this CTA holds them; None: always. Zeros are copied for
    columns that it does not hold. passes: copies of a lane and tile. key: of those of a pass, this lane's. at_once: keys of a pass.
    box: of the stage. chunk: which 16 columns of the box.
    """

    source: Int32
    held: Boolean | None
    passes: int
    key: Int32
    at_once: int
    box: Int32
    chunk: Int32

    def key_of(self, step: int) -> Int32:
        """Return the lane's key of a pass."""
        return self.key + step * self.at_once

    def copy(self, step: int, rows: cute.Pointer, keys: LaneKeys) -> None:
        """Start a copy of one pass to the warp's rows of a stage; zeros for keys that do not count."""
        row = keys.row_of(self.key_of(step))
        start_copy(self._target(step, 0, rows), row + self.source, both(row != 0, self.held), CHUNK)

    def load(self, step: int, rows: cute.Pointer) -> cute.Tensor:
        """Return the bytes that this lane has copied in one pass."""
        words = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
        cute.autovec_copy(_chunk(self._target(step, 0, rows), words), words)
        return words

    def write(self, step: int, rows: cute.Pointer, words: cute.Tensor) -> None:
        """Write the lane's columns of one pass, by now 16-bit, to the warp's rows of a stage."""
        for half in range(ELEMENT_BYTES):
            part = cute.make_tensor(words.iterator + half * VECTOR, cute.make_layout(VECTOR))
            cute.autovec_copy(part, _chunk(self._target(step, half, rows), part))

    def _target(self, step: int, half: int, rows: cute.Pointer) -> cute.Pointer:
        key = self.key_of(step)
        place = (ELEMENT_BYTES * self.chunk + half) ^ (key % CHUNKS_PER_ROW)
        return rows + (self.box * BOX_BYTES + key * ROW_BYTES + place * CHUNK)


def _chunk(place: cute.Pointer, words: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(aligned(place, CHUNK), dtype=Int32), words.layout)


@dataclass(frozen=True)
class TileColumns:
    """A warp's share of a tile.

    copied: runs of columns of which nothing is left to do once they are copied. converted: runs of columns that are converted in their
    stage, each with copy, load and store of a pass.
    """

    copied: tuple[CopiedColumns, ...]
    converted: tuple[Any, ...] = ()

    def copy(self, rows: WarpRows, keys: LaneKeys) -> None:
        """Start the copies of a tile."""
        copy_runs(self.converted + self.copied, rows, keys)

    def finish(self, rows: WarpRows) -> None:
        """Convert a tile that this warp's copies have brought. All loads come first: ptxas moves none ahead of a store."""
        passes = [(run, step) for run in self.converted for step in range(run.passes)]
        loaded = [run.load(step, rows.first) for run, step in passes]
        for (run, step), words in zip(passes, loaded, strict=True):
            run.store(step, rows.first, words)


def copy_runs(runs: tuple[Any, ...], rows: WarpRows, keys: LaneKeys) -> None:
    """Start the copies of a tile. runs: of columns, each with the copy of a pass."""
    for run in runs:
        for step in range(run.passes):
            run.copy(step, rows.first, keys)


def latent_columns(rank: int | Int32) -> CopiedColumns:
    """Return the mover of half of the latent columns, where a row begins with them."""
    return CopiedColumns.create(CTA_COLUMNS * ELEMENT_BYTES // CHUNK, 0, Int32(rank * (CTA_COLUMNS * ELEMENT_BYTES)))


def rope_columns(first: int, rank: Int32) -> CopiedColumns:
    """Return the mover of a CTA's half of the RoPE columns that lie from byte `first` of a row on, in the box after the values."""
    return CopiedColumns.create(CTA_ROPE * ELEMENT_BYTES // CHUNK, SIXTEEN_BIT.latent_boxes, first + rank * (CTA_ROPE * ELEMENT_BYTES))


def both(first: Boolean, second: Boolean | None) -> Boolean:
    """Return whether two conditions hold, of which the second may be missing."""
    return first if second is None else first & second


def latent_e4m3_columns(rank: int | Int32) -> E4m3Columns:
    """Return the mover of half of the latent columns, where a row begins with them, one byte each.

    A pass has two keys, even and odd, in alternating quads of lanes.
    """
    lane = cute.arch.lane_idx()
    box, chunk = lane // (BOX_LANES * KEYS_AT_ONCE), lane % BOX_LANES
    source = rank * CTA_COLUMNS + box * BOX_COLUMNS + chunk * CHUNK
    return E4m3Columns(source, None, WARP_KEYS // KEYS_AT_ONCE, lane // BOX_LANES % KEYS_AT_ONCE, KEYS_AT_ONCE, box, chunk)
