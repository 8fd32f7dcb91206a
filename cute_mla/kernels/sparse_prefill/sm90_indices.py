"""The role `indices` of sparse prefill on Hopper: one warp that looks ahead from tile to tile, over the end of a token.

It also brings Q by cp.async, since it has time to spare. A lane copies 16 bytes, or 4 where an address or a stride is no multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.typing import AddressSpace

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import TokenSchedule, first_query_row
from ..primitives.arithmetic import smaller
from ..primitives.copies import LINE_BYTES, arrive_landed, prefetch_line
from ..sm90.cta import BOX_BYTES, LatentSm90Queries
from ..sm90.rows import CHUNK, HALF_KEYS, HALVES, ROW_BYTES, copy_chunk
from .operands import SparsePrefillIndices, SparsePrefillOperands
from .sm90_copy import KEYS_AT_ONCE, LANES_PER_KEY, SWIZZLE_KEYS, SparsePrefillSm90Smem

LANES = 32
WORD = 4  # bytes of the smaller copy


class SparsePrefillSm90IndexRole:
    """One warp: indices, checks, which keys are present; Q."""

    def __init__(self, queries: LatentSm90Queries) -> None:
        self.queries = queries

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: SparsePrefillSm90Smem):
        """Wait rope_free, queries_free. Signal valid_ready, queries_landed. Indices are asked for a tile ahead."""
        cursor = first_tile(operands)
        entries = cursor.entries()
        tile, token = Int32(0), Int32(0)
        while cursor.token <= operands.schedule.last_request():
            # The tile whose RoPE stage it gets has been worked off. To wait for an older one would be to be overtaken: this stage's next
            # phase must not end before this role has announced the tile.
            smem.rope_free.producer_acquire(tile)
            self.announce(smem, cursor.indices, entries, tile)
            following = next_tile(operands, cursor, self.queries.d_qk)
            entries = following.entries()
            if cursor.position == 0:
                self.load_queries(operands, smem, cursor.token, token)
                token = token + 1
            cursor = following
            tile = tile + 1

    @cute.jit
    def load_queries(self, operands: SparsePrefillOperands, smem: SparsePrefillSm90Smem, token: Int32, number: Int32):
        """Bring Q of a token, the number-th that has keys. Wait queries_free. Signal queries_landed.

        Rows past the last one repeat it; their results go nowhere.
        """
        base, pitch = operands.q_rows(token)
        boxes = smem.sQ.iterator.toint()
        phases = self.queries.phases
        for i in cutlass.range_constexpr(len(phases)):
            use = number * len(phases) + i
            smem.queries_free.producer_acquire(use)
            if (base | pitch) % CHUNK == 0:
                self.copy_chunks(operands, base, pitch, boxes, phases[i])
            else:
                self.copy_words(operands, base, pitch, boxes, phases[i])
            arrive_landed(smem.queries_landed.barrier(use))

    @cute.jit
    def copy_chunks(self, operands: SparsePrefillOperands, base: Int64, pitch: Int64, boxes: Int32, phase: cutlass.Constexpr[list[int]]):
        """Start the copies of some column tiles, 16 bytes a lane: 128 bytes of each of four rows."""
        lane = cute.arch.lane_idx()
        chunk, own = lane % LANES_PER_KEY, lane // LANES_PER_KEY
        for first in cutlass.range(0, TILE_ROWS, SWIZZLE_KEYS, unroll=1):
            for above in cutlass.range_constexpr(0, SWIZZLE_KEYS, KEYS_AT_ONCE):
                source = row_address(operands, base, pitch, first + (above + own)) + chunk * CHUNK
                target = boxes + (first + (above + own)) * ROW_BYTES + (chunk ^ (above + own)) * CHUNK
                for box in cutlass.range_constexpr(len(phase)):
                    copy_chunk(target + box * BOX_BYTES, source + phase[box] * ROW_BYTES)

    @cute.jit
    def copy_words(self, operands: SparsePrefillOperands, base: Int64, pitch: Int64, boxes: Int32, phase: cutlass.Constexpr[list[int]]):
        """Start the copies of some column tiles, 4 bytes a lane: 128 bytes of a row."""
        lane = cute.arch.lane_idx()
        for row in cutlass.range(TILE_ROWS, unroll=1):
            source = row_address(operands, base, pitch, row) + lane * WORD
            place = (lane * WORD) ^ (row % SWIZZLE_KEYS * CHUNK)
            for box in cutlass.range_constexpr(len(phase)):
                copy_chunk(boxes + (row * ROW_BYTES + place) + box * BOX_BYTES, source + phase[box] * ROW_BYTES, nbytes=WORD)

    @cute.jit
    def announce(self, smem: SparsePrefillSm90Smem, indices: SparsePrefillIndices, entries: tuple[Int32, Int32], tile: Int32):
        """Publish which rows a tile has, from the indices of this lane's keys."""
        low, high = (indices.checked(entry) for entry in entries)
        stage, lane = smem.valid_ready.stage(tile), cute.arch.lane_idx()
        rows = smem.sRows + (stage * TILE_KEYS + lane)
        rows.store(low)
        (rows + HALF_KEYS).store(high)
        bits = [cute.arch.vote_ballot_sync(row >= 0) for row in (low, high)]
        if lane == 0:
            (smem.sBases + stage).store(indices.base)
            words = cute.recast_ptr(smem.sValid, dtype=Int32) + stage * HALVES
            words.store(bits[0])
            (words + 1).store(bits[1])
        smem.valid_ready.producer_commit(tile)


def row_address(operands: SparsePrefillOperands, base: Int64, pitch: Int64, row: Int32) -> Int64:
    """Return the address of one of this CTA's query rows."""
    return base + Int64(smaller(first_query_row() + row, operands.rows() - 1)) * pitch


@dataclass(frozen=True)
class SparsePrefillCursor:
    """A tile: the indices from `position` on in the list of a token.

    Past the last tile, the token is past the last one and the list empty.
    """

    token: Int32
    position: Int32
    indices: SparsePrefillIndices

    def entries(self) -> tuple[Int32, Int32]:
        """Start the loads of the indices of this lane's keys, l and l + 32, unchecked."""
        lane = cute.arch.lane_idx()
        return self.indices.entry(self.position + lane), self.indices.entry(self.position + (lane + HALF_KEYS))


@cute.jit
def keys_of(schedule: TokenSchedule, token: Int32) -> Int32:
    """Return the keys of a token, none past the last one."""
    keys = Int32(0)
    if token <= schedule.last_request():
        keys = schedule.keys(token)
    return keys


@cute.jit
def token_with_keys(schedule: TokenSchedule, token: Int32) -> Int32:
    """Return the first of this CTA's tokens that has keys, from one on; past the last one if none has."""
    keys = keys_of(schedule, token)
    while token <= schedule.last_request() and keys == 0:
        token = schedule.work_tile(token, Int32(0)).next_req
        keys = keys_of(schedule, token)
    return token


def indices_of(operands: SparsePrefillOperands, token: Int32) -> SparsePrefillIndices:
    """Return the indices of a token, none past the last one."""
    last = operands.schedule.last_request()
    indices = operands.index_list(smaller(token, last))
    return replace(indices, count=cutlass.select_(token <= last, indices.count, Int32(0)))


def first_tile(operands: SparsePrefillOperands) -> SparsePrefillCursor:
    """Return this CTA's first tile."""
    token = token_with_keys(operands.schedule, operands.schedule.first_work_tile()[0])
    return SparsePrefillCursor(token, Int32(0), indices_of(operands, token))


@cute.jit
def next_tile(operands: SparsePrefillOperands, cursor: SparsePrefillCursor, d_qk: cutlass.Constexpr[int]) -> SparsePrefillCursor:
    """Return the tile after one. Ask L2 for the next token's rows of Q, which the score role will need, unless d_qk is 0."""
    token, position, indices = cursor.token, cursor.position + TILE_KEYS, cursor.indices
    if position >= indices.count:
        token = token_with_keys(operands.schedule, operands.schedule.work_tile(token, Int32(0)).next_req)
        position = Int32(0)
        indices = indices_of(operands, token)
        if cutlass.const_expr(d_qk > 0):
            prefetch_queries(operands, token, d_qk)
    return SparsePrefillCursor(token, position, indices)


@cute.jit
def prefetch_queries(operands: SparsePrefillOperands, token: Int32, d_qk: cutlass.Constexpr[int]):
    """Bring this CTA's rows of Q to L2. One warp: a lane has every 32nd."""
    for rows_before in cutlass.range_constexpr(0, TILE_ROWS, LANES):
        row = first_query_row() + (rows_before + cute.arch.lane_idx())
        if token <= operands.schedule.last_request() and row < operands.rows():
            first = operands.q_row(token, row).toint()
            for byte in cutlass.range_constexpr(0, d_qk * ELEMENT_BYTES, LINE_BYTES):
                prefetch_line(cute.make_ptr(Int32, first + byte, AddressSpace.gmem))
