"""16-bit columns of keys on their way from rows of a cache to rows of shared memory, through registers of a warp or past them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import ELEMENT_BYTES
from ..attention.scheduler import LatentOperands
from ..primitives.arithmetic import from_lane
from ..primitives.copies import CHUNK, LINE_BYTES, prefetch_row, smem_pointer, start_copy
from ..primitives.pipeline import PipelineState
from ..primitives.rows import load_if, registers
from .attend import CHUNK_WORDS, chunk_at
from .cta import LANES, WARP_KEYS, WARPS, Sm120Thread

TAILS = (0, 4, 8)  # 16-byte chunks behind the last 32 of a key, of 64 columns: a warp has those of several keys at a time
LANE_COLUMNS = CHUNK // ELEMENT_BYTES  # of a key that a lane converts at a time
PASS_COLUMNS = LANES * LANE_COLUMNS


@dataclass(frozen=True)
class Sm120Columns:
    """16-bit columns of a key. source, target: their first byte in a row of the cache and of shared memory, whose rows are pitch apart."""

    source: int
    target: int
    columns: int
    pitch: int

    @property
    def whole(self) -> int:
        """Return the loads of 32 chunks of a key."""
        return self.columns * ELEMENT_BYTES // CHUNK // LANES

    @property
    def tail(self) -> int:
        """Return the chunks behind them."""
        tail = self.columns * ELEMENT_BYTES // CHUNK % LANES
        assert tail in TAILS
        return tail

    def load(self, thread: Sm120Thread, row: Int64, rows: list[Int64]) -> tuple[list[Any], list[Any]]:
        """Ask for the columns of the warp's keys. row: address of key lane % 8, 0 for a key that does not exist. rows: of all 8."""
        wide = [
            load_chunk(rows[key] + (self.source + (step * LANES + thread.lane) * CHUNK), rows[key] != 0)
            for key in range(WARP_KEYS)
            for step in range(self.whole)
        ]
        tails = []
        if self.tail:
            tail_byte = self.source + self.whole * LANES * CHUNK + thread.lane % self.tail * CHUNK
            for first in range(0, WARP_KEYS, LANES // self.tail):
                mine = from_lane(row, first + thread.lane // self.tail)
                tails.append(load_chunk(mine + tail_byte, mine != 0))
        return wide, tails

    def start(self, thread: Sm120Thread, place: Int32, row: Int64, lane: Int32) -> None:
        """Start copies of the columns of 8 keys, zeros for one that does not exist.

        place: the row of the first in shared memory. row: address of a lane's key, 0 for one that does not exist. lane: of the first key.
        """
        first = place + self.target
        for key in range(WARP_KEYS):
            source, target = from_lane(row, lane + key), first + key * self.pitch
            for step in range(self.whole):
                offset = (step * LANES + thread.lane) * CHUNK
                start_copy(smem_pointer(target + offset), source + (self.source + offset), source != 0, CHUNK)
        for number in range(0, WARP_KEYS, LANES // self.tail) if self.tail else ():
            key = number + thread.lane // self.tail
            source, offset = from_lane(row, lane + key), (self.whole * LANES + thread.lane % self.tail) * CHUNK
            start_copy(smem_pointer(first + key * self.pitch + offset), source + (self.source + offset), source != 0, CHUNK)

    def store(self, thread: Sm120Thread, place: Int32, loaded: tuple[list[Any], list[Any]]) -> None:
        """Write what `load` returned. place: the row of the warp's first key in shared memory."""
        wide, tails = loaded
        first = place + self.target
        for number, words in enumerate(wide):
            key, step = divmod(number, max(self.whole, 1))
            cute.autovec_copy(words, chunk_at(first + key * self.pitch + (step * LANES + thread.lane) * CHUNK))
        for number, words in enumerate(tails):
            key = number * (LANES // self.tail) + thread.lane // self.tail
            target = first + self.whole * LANES * CHUNK + key * self.pitch + thread.lane % self.tail * CHUNK
            cute.autovec_copy(words, chunk_at(target))


def query_parts(row_bytes: int) -> int:
    """Return the parts of a row of Q for which L2 is asked, a line or half of one."""
    return row_bytes // gcd(row_bytes, LINE_BYTES)


@cute.jit
def ask_for_queries(operands: LatentOperands, req: Int32, part: Int32, row_bytes: cutlass.Constexpr[int]):
    """Ask L2 for a part of each of the CTA's rows of Q of a request. Four warps."""
    place = cute.arch.thread_idx()[0] % (WARPS * LANES)
    if place < TILE_ROWS:
        stored = operands.row_range(req)
        part_bytes = row_bytes // query_parts(row_bytes)
        prefetch_row(stored.q_row(stored.nearest(operands.first_row() + place)).toint() + part * part_bytes, part_bytes)


def convert_in_place(
    place: Int32, thread: Sm120Thread, columns: int, load: Callable[[int], Any], convert: Callable[[Any], cute.Tensor]
) -> None:  # fmt: skip
    """Convert a key whose codes lie at the beginning of the row that it becomes. place: the row. columns: that have codes.

    load(column): what the 8 columns of a lane become their 16 bytes of, from the warp's first column on; convert does so.
    """
    passes = range(0, columns, PASS_COLUMNS)
    held = [load(first) for first in passes]
    cute.arch.sync_warp()
    for first, loaded in zip(passes, held, strict=True):
        store_chunk_if(first + thread.lane * LANE_COLUMNS < columns, place + first * ELEMENT_BYTES + thread.lane * CHUNK, convert(loaded))


def pair_at(address: Int32) -> cute.Tensor:
    """Return two words at a shared memory address."""
    return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=8), cute.make_layout(2))


@cute.jit
def store_chunk_if(wanted: Boolean, target: Int32, words: cute.Tensor):
    """Store 16 bytes, if wanted."""
    if wanted:
        cute.autovec_copy(words, chunk_at(target))


def next_tile(state: PipelineState) -> PipelineState:
    """Return the state of the same stage a tile later: warps that bring a stage bring it of every tile."""
    return PipelineState(state.stage, state.phase ^ 1)


def rows_of(row: Int64) -> list[Int64]:
    """Return the addresses of the warp's keys. row: that of key lane % 8."""
    return [from_lane(row, Int32(key)) for key in range(WARP_KEYS)]


def load_chunk(address: Int64, wanted: Boolean) -> Any:
    """Start the load of 16 bytes; zeros, and no access, unless wanted. Behind a branch ptxas would wait for it."""
    words = registers(CHUNK_WORDS)
    words.fill(0)
    load_if(wanted, words, address)
    return words
