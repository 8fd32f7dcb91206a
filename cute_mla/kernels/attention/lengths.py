"""Work units, which a plan cuts, and the keys of each: an int32 per request where the caller passes lengths, a limit where not.

A unit is a request or some query tokens of one. Where all requests have equally many query tokens, unit r is request r. Else the plan has
a table of units (spec.split_plan): up to `most` query tokens of one request each, of which the kernels take the keys that its last token
sees.

The trick: a unit with fewer than `most` tokens lacks the first ones. So its last token is the last one of every unit, and the causal mask
is that of a request with `most` query tokens; only what reads or writes query rows knows which there are.

Callers may hand in any numbers as a table, so what is read of it is clipped here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint32, cute

from ...spec.dense_decode import CAUSAL
from ...spec.split_plan import (
    NO_LIMIT,
    TILE_KEYS,
    UNIT_ALL_TOKENS,
    UNIT_BASE,
    UNIT_COLUMNS,
    UNIT_FIRST_TOKEN,
    UNIT_LATER,
    UNIT_REQUEST,
    UNIT_TOKENS,
)
from ..primitives.arithmetic import clip, larger, pin_register, smaller
from ..primitives.rows import load_or


@dataclass(frozen=True)
class RowRange:
    """The query rows of a unit that exist, from `first` up to, not including, `end`, and where they lie.

    operands: as in LatentOperands. first: None if it is 0 for all units of the op. token: arguments of the operands' pointers beside unit
    and row, where an op has more.
    """

    operands: Any
    unit: Int32
    end: Int32
    first: Int32 | None = None
    token: tuple[Int32, ...] = ()

    def holds(self, row: Int32) -> Boolean:
        """Return whether a row exists."""
        return row < self.end if self.first is None else (row < self.end) & (row >= self.first)

    def nearest(self, row: Int32) -> Int32:
        """Return the row itself, or the nearest one that exists."""
        row = row if self.first is None else larger(row, self.first)
        return cutlass.select_(row < self.end, row, self.end - 1)

    def q_row(self, row: Int32) -> cute.Pointer:
        """Return element 0 of a query row."""
        return self.operands.q_row(self.unit, row, *self.token)

    def out_row(self, row: Int32) -> cute.Pointer:
        """Return element 0 of an output row."""
        return self.operands.out_row(self.unit, row, *self.token)

    def lse_of(self, row: Int32) -> cute.Pointer:
        """Return the lse of a query row."""
        return self.operands.lse_of(self.unit, row, *self.token)


@dataclass(frozen=True)
class Units:
    """The units of a call.

    table: int32 [units, 8], or null at run time: unit r is request r with `most` query tokens. requests, tokens: numbers that bound what
    the table may say. causal: 1 if a unit has no keys that only later tokens of its request see.
    """

    table: cute.Pointer
    requests: Int32
    tokens: Int32
    most: Int32
    causal: Int32

    @cute.jit
    def request(self, unit: Int32) -> Int32:
        """Return the request of a unit."""
        request = unit
        if self.table.toint() != 0:
            request = clip((self.table + (unit * UNIT_COLUMNS + UNIT_REQUEST)).load(), self.requests - 1)
        return request

    @cute.jit
    def request_and_later(self, unit: Int32) -> tuple[Int32, Int32]:
        """Return the request of a unit, and how many of the request's last keys no token of the unit sees."""
        request, later = unit, Int32(0)
        if self.table.toint() != 0:
            row = self.table + unit * UNIT_COLUMNS
            request = clip((row + UNIT_REQUEST).load(), self.requests - 1)
            later = cutlass.select_(self.causal != 0, larger((row + UNIT_LATER).load(), Int32(0)), Int32(0))
        return request, later

    @cute.jit
    def new_tokens_and_base(self, unit: Int32, limit: Int32) -> tuple[Int32, Int32]:
        """Return the query tokens of a unit's request, at most `limit`, and where the unit's `most` tokens begin among packed tokens.

        The latter is not clipped. (`most`, 0) without a table.
        """
        tokens, base = self.most, Int32(0)
        if self.table.toint() != 0:
            row = self.table + unit * UNIT_COLUMNS
            tokens, base = clip((row + UNIT_ALL_TOKENS).load(), limit), (row + UNIT_BASE).load()
        return tokens, base

    @cute.jit
    def missing_and_first(self, unit: Int32) -> tuple[Int32, Int32]:
        """Return how many of the `most` tokens a unit lacks, and where these `most` tokens begin in tensors of packed tokens.

        A unit lacks its first tokens; all of them if it is none. Those that it has lie inside the tensors. (0, 0) without a table.
        """
        missing, first = Int32(0), Int32(0)
        if self.table.toint() != 0:
            row = self.table + unit * UNIT_COLUMNS
            tokens = clip((row + UNIT_TOKENS).load(), smaller(self.most, self.tokens))
            missing = self.most - tokens
            tokens = larger(tokens, Int32(1))
            first = clip((row + UNIT_FIRST_TOKEN).load(), self.tokens - tokens) + tokens - self.most
        return missing, first


@dataclass(frozen=True)
class VisibleTiles:
    """The tiles of a request of which some query token sees a key: spec.split_plan.KeyWindow, at run time.

    sinks: what is seen at the beginning in spite of the reach, in tiles; in keys if in_keys.
    """

    reach: Int32
    sinks: Int32
    in_keys: bool = False

    def sink_tiles(self) -> Int32:
        """Return the tiles seen at the beginning. Computed at every call, lest their number lives in a register from the start on."""
        return tiles_of(pin_register(self.sinks)) if self.in_keys else self.sinks

    def skipped(self, length: Int32) -> Int32:
        """Return the number of tiles without such a key, of a request of `length` keys. They follow the sink tiles."""
        return larger((larger(length - self.reach, Int32(0)) >> (TILE_KEYS.bit_length() - 1)) - self.sink_tiles(), Int32(0))


@dataclass(frozen=True)
class RowTile:
    """The query rows of a CTA, or of a cluster whose CTAs share keys, under a causal mask: how many of the last keys they do not see.

    mask, s_q, heads_per_kv, reach: spec.dense_decode. ctas: of the cluster. rows: of the cluster. With a window nothing is skipped here.
    pinned: whether x of the CTA passes an opaque move. In one form or the other, ptxas 13.4 leaves out waits of uniform registers on SM100
    (gate control_codes): with the move in kernels of 576 16-bit columns, without it in those of 320.
    """

    mask: Int32
    s_q: Int32
    heads_per_kv: Int32
    reach: Int32
    ctas: int
    rows: int
    pinned: bool = True

    def hides_tiles(self) -> Boolean:
        """Return whether rows may not see the last keys. The same for all CTAs of a launch."""
        return (self.mask == CAUSAL) & (self.reach == NO_LIMIT)

    @cute.jit
    def seen_tiles(self, tiles: Int32, length: Int32) -> Int32:
        """Return how many of a request's first tiles hold a key that one of the rows sees, out of `tiles`. length: keys of the request.

        A CTA alone does not divide where nothing is hidden. Of a pair, whose Q is twice as long, keys would come the sooner and delay it.
        """
        hidden = Int32(0)
        if cutlass.const_expr(self.ctas > 1):
            hidden = cutlass.select_(self.hides_tiles(), self._hidden_keys(), Int32(0))
        else:
            if self.hides_tiles():
                hidden = self._hidden_keys()
        return smaller(tiles, tiles_of(larger(length - hidden, Int32(0))))

    def _hidden_keys(self) -> Int32:
        """Return how many of the last keys none of the rows sees under a causal mask."""
        x = cute.arch.block_idx()[0]
        row_end = ((pin_register(x) if self.pinned else x) // self.ctas + 1) * self.rows
        last_token = Int32(Uint32(row_end - 1) // Uint32(self.heads_per_kv))
        return larger(self.s_q - 1 - last_token, Int32(0))


def tiles_of(keys: Int32) -> Int32:
    """Return the tiles that hold so many keys."""
    return (keys + (TILE_KEYS - 1)) >> (TILE_KEYS.bit_length() - 1)


@dataclass(frozen=True)
class Lengths:
    """The keys of every request: those of its first cache, followed by those of a second one.

    lengths, extra: int32 [batch], clipped to limit and extra_limit, whose sum is an int32 too. Either may be null at run
    time: then every request has as many keys of that cache as its limit. extra None when compiling: there is no second
    cache, and `lengths` is not null. units: where they are given, `req` is a unit, which has the keys of its request that its
    last query token sees; None when compiling: every request is a unit. window: None when compiling: all tiles are visible.
    """

    lengths: cute.Pointer
    extra: cute.Pointer | None
    limit: Int32
    extra_limit: Int32
    units: Units | None = None
    window: VisibleTiles | None = None

    def keys(self, req: Int32) -> Int32:
        """Return the keys of a request, in both caches, without those of skipped tiles."""
        keys, skipped = self.keys_and_skipped(req)
        return keys if self.window is None else keys - skipped * TILE_KEYS

    def keys_and_skipped(self, req: Int32) -> tuple[Int32, Int32]:
        """Return the keys of a request, in both caches, and the number of its tiles that are skipped."""
        if self.units is None:
            keys = self._keys_of_request(req)
        else:
            request, later = self.units.request_and_later(req)
            keys = larger(self._keys_of_request(request) - later, Int32(0))
        return keys, Int32(0) if self.window is None else self.window.skipped(keys)

    def _keys_of_request(self, req: Int32) -> Int32:
        first, second = self.keys_by_cache(req)
        return first if self.extra is None else first + second

    def keys_by_cache(self, req: Int32) -> tuple[Int32, Int32]:
        """Return the keys of a request in the first and in the second cache."""
        if self.extra is None:
            return clip((self.lengths + req).load(), self.limit), Int32(0)
        first = clip(load_or(self.lengths, req, self.limit), self.limit)
        return first, clip(load_or(self.extra, req, self.extra_limit), self.extra_limit)
