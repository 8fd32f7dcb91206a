"""Walks of the SM90 kernel's gathering warps over the tiles of this CTA.

The scout looks ahead from tile to tile without a seam between tokens, and the others follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, cute
from cutlass.cute.typing import AddressSpace

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import TokenSchedule, first_query_row
from ..primitives.arithmetic import smaller
from ..primitives.copies import LINE_BYTES, prefetch_line
from ..sm90.gather_split import HALF_KEYS
from .operands import IndexList, Operands

LANES = 32


@dataclass(frozen=True)
class Cursor:
    """A tile: the indices from `position` on in the list of a token.

    Past the last tile, the token is past the last one and the list empty.
    """

    token: Int32
    position: Int32
    indices: IndexList

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


def indices_of(operands: Operands, token: Int32) -> IndexList:
    """Return the indices of a token, none past the last one."""
    last = operands.schedule.last_request()
    indices = operands.index_list(smaller(token, last))
    return replace(indices, count=cutlass.select_(token <= last, indices.count, Int32(0)))


def first_tile(operands: Operands) -> Cursor:
    """Return this CTA's first tile."""
    token = token_with_keys(operands.schedule, operands.schedule.first_work_tile()[0])
    return Cursor(token, Int32(0), indices_of(operands, token))


@cute.jit
def next_tile(operands: Operands, cursor: Cursor, d_qk: cutlass.Constexpr[int]) -> Cursor:
    """Return the tile after one. Ask L2 for the next token's rows of Q, which the score role will need."""
    token, position, indices = cursor.token, cursor.position + TILE_KEYS, cursor.indices
    if position >= indices.count:
        token = token_with_keys(operands.schedule, operands.schedule.work_tile(token, Int32(0)).next_req)
        position = Int32(0)
        indices = indices_of(operands, token)
        prefetch_queries(operands, token, d_qk)
    return Cursor(token, position, indices)


@cute.jit
def prefetch_queries(operands: Operands, token: Int32, d_qk: cutlass.Constexpr[int]):
    """Bring this CTA's rows of Q to L2. One warp: a lane has every 32nd."""
    for rows_before in cutlass.range_constexpr(0, TILE_ROWS, LANES):
        row = first_query_row() + (rows_before + cute.arch.lane_idx())
        if token <= operands.schedule.last_request() and row < operands.rows():
            first = operands.q_row(token, row).toint()
            for byte in cutlass.range_constexpr(0, d_qk * ELEMENT_BYTES, LINE_BYTES):
                prefetch_line(cute.make_ptr(Int32, first + byte, AddressSpace.gmem))


@cute.jit
def for_each_tile(schedule: TokenSchedule, body: cutlass.Constexpr[Callable[[Int32], None]]) -> Int32:
    """Call body(number of the tile) for every tile of every token of this CTA. Return how many there were."""
    token, first = schedule.first_work_tile()
    tile = Int32(0)
    while token <= schedule.last_request():
        tiles = schedule.tile_range(token, first).tiles
        for t in cutlass.range(tiles, unroll=1):
            body(tile + t)
        tile = tile + tiles
        token = schedule.work_tile(token, first).next_req
    return tile
