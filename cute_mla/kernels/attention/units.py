"""Work units: what a plan cuts, a request or some query tokens of one.

Where all requests have equally many query tokens, unit r is request r. Else the plan has a table of units (spec.split_plan): up to `most`
query tokens of one request each, of which the kernels take the keys that its last token sees.

The trick: a unit with fewer than `most` tokens lacks the first ones. So its last token is the last one of every unit, and the causal mask
is that of a request with `most` query tokens; only what reads or writes query rows knows which there are.

Callers may hand in any numbers as a table, so what is read of it is clipped here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.split_plan import UNIT_ALL_TOKENS, UNIT_BASE, UNIT_COLUMNS, UNIT_FIRST_TOKEN, UNIT_LATER, UNIT_REQUEST, UNIT_TOKENS
from ..primitives.arithmetic import clip, larger, smaller


@dataclass(frozen=True)
class RowRange:
    """The query rows of a unit that exist, from `first` up to, not including, `end`, and where they lie.

    operands: as in QueryOperands. first: None if it is 0 for all units of the op. token: arguments of the operands' pointers beside unit
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
