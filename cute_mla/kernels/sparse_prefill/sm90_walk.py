"""What the gather role of the SM90 kernel knows of the tiles to come: a walk over all tiles of all tokens of this CTA, without
a seam between tokens, and for each tile where its keys lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.typing import AddressSpace
from cutlass.experimental import primitives

from ...spec.split_plan import TILE_KEYS
from ..parts.lengths import smaller
from ..parts.sm90_copied import CopiedKeys, CopyLane, source_lanes
from ..parts.sm90_shares import HALF_KEYS, Half
from ..parts.tiles import ELEMENT_BYTES, first_query_row
from ..parts.tokens import TokenSchedule
from .operands import IndexList, Operands

LINE_BYTES = 128  # of L2, which a prefetch brings


@dataclass(frozen=True)
class Cursor:
    """A tile: the indices from `position` on in the list of a token. Past the last tile, the token is past the last one and
    the list empty."""

    token: Int32
    position: Int32
    indices: IndexList

    def entries(self) -> tuple[Int32, Int32]:
        """Starts the loads of the indices of this lane's keys, l and l + 32, unchecked."""
        lane = cute.arch.lane_idx()
        return self.indices.entry(self.position + lane), self.indices.entry(self.position + (lane + HALF_KEYS))


@dataclass(frozen=True)
class Found:
    """A tile whose indices are known: where this thread's keys lie, and which of the keys 0..31 and 32..63 are there."""

    keys: CopiedKeys
    low: Int32
    high: Int32

    @property
    def any(self) -> cutlass.Boolean:
        """Whether any key is there. The same for all threads."""
        return (self.low | self.high) != 0


def find_keys(indices: IndexList, entries: tuple[Int32, Int32], lane: CopyLane, thread: Int32) -> Found:
    """Every warp checks the indices of all keys of a tile, a lane those of l and l + 32, and hands them round."""
    low, high = (indices.checked(entry) for entry in entries)

    def of_half(half: Half) -> Int32:
        if isinstance(half, int):
            return (low, high)[half]
        return cutlass.select_(half == 0, low, high)

    rows = (
        indices.row_address(cute.arch.shuffle_sync(of_half(half), source))
        for half in lane.halves
        for source in source_lanes(thread)
    )
    return Found(CopiedKeys(*rows), cute.arch.vote_ballot_sync(low >= 0), cute.arch.vote_ballot_sync(high >= 0))


@cute.jit
def keys_of(schedule: TokenSchedule, token: Int32) -> Int32:
    """Keys of a token, none past the last one."""
    keys = Int32(0)
    if token <= schedule.last_request():
        keys = schedule.keys(token)
    return keys


@cute.jit
def token_with_keys(schedule: TokenSchedule, token: Int32) -> Int32:
    """The first of this CTA's tokens that has keys, from one on; past the last one if none has."""
    keys = keys_of(schedule, token)
    while token <= schedule.last_request() and keys == 0:
        token = schedule.piece(token, Int32(0)).next_req
        keys = keys_of(schedule, token)
    return token


def indices_of(operands: Operands, token: Int32) -> IndexList:
    """The indices of a token, none past the last one."""
    last = operands.schedule.last_request()
    indices = operands.index_list(smaller(token, last))
    return replace(indices, count=cutlass.select_(token <= last, indices.count, Int32(0)))


def first_tile(operands: Operands) -> Cursor:
    """This CTA's first tile."""
    token = token_with_keys(operands.schedule, operands.schedule.first_piece()[0])
    return Cursor(token, Int32(0), indices_of(operands, token))


@cute.jit
def next_tile(operands: Operands, cursor: Cursor, d_qk: cutlass.Constexpr[int], thread: Int32) -> Cursor:
    """The tile after one that there is. Asks L2 for the next token's rows of Q, which the score role will need."""
    token, position, indices = cursor.token, cursor.position + TILE_KEYS, cursor.indices
    if position >= indices.count:
        token = token_with_keys(operands.schedule, operands.schedule.piece(token, Int32(0)).next_req)
        position = Int32(0)
        indices = indices_of(operands, token)
        prefetch_queries(operands, token, d_qk, thread)
    return Cursor(token, position, indices)


@cute.jit
def prefetch_queries(operands: Operands, token: Int32, d_qk: cutlass.Constexpr[int], thread: Int32):
    """Brings this CTA's rows of Q to L2: two threads have a row."""
    row = first_query_row() + thread // 2
    if token <= operands.schedule.last_request() and row < operands.rows():
        half_bytes = d_qk * ELEMENT_BYTES // 2
        first = Int64(operands.q_row(token, row).toint()) + thread % 2 * half_bytes
        for line in cutlass.range_constexpr(0, half_bytes, LINE_BYTES):
            primitives.prefetch_l2(cute.make_ptr(Int32, first + line, AddressSpace.gmem).raw_ptr())
