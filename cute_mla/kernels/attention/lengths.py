"""How many keys a request has: an int32 per request where the caller has told, a limit where not."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute


def smaller(a: Int32, b: Int32) -> Int32:
    """The lesser of two integers."""
    return cutlass.select_(a < b, a, b)


def larger(a: Int32, b: Int32) -> Int32:
    """The greater of two integers."""
    return cutlass.select_(a > b, a, b)


def clip(value: Int32, most: Int32) -> Int32:
    """The nearest integer from 0 to `most`, or `most` if that is negative."""
    return smaller(larger(value, Int32(0)), most)


@cute.jit
def entry_or(table: cute.Pointer, index: Int32, otherwise: Int32) -> Int32:
    """An entry of a table that may be null: then `otherwise`, and nothing is read."""
    value = otherwise
    if table.toint() != 0:
        value = (table + index).load()
    return value


@dataclass(frozen=True)
class Lengths:
    """The keys of every request: those of its first cache, followed by those of a second one.

    lengths, extra: int32 [batch], clipped to limit and extra_limit, whose sum is an int32 too. Either may be null at run
    time: then every request has as many keys of that cache as its limit says. extra None when compiling: there is no second
    cache, and `lengths` is not null.
    """

    lengths: cute.Pointer
    extra: cute.Pointer | None
    limit: Int32
    extra_limit: Int32

    def keys(self, req: Int32) -> Int32:
        """Keys of a request, in both caches."""
        first, second = self.parts(req)
        return first if self.extra is None else first + second

    def parts(self, req: Int32) -> tuple[Int32, Int32]:
        """Keys of a request in the first and in the second cache."""
        if self.extra is None:
            return clip((self.lengths + req).load(), self.limit), Int32(0)
        first = clip(entry_or(self.lengths, req, self.limit), self.limit)
        return first, clip(entry_or(self.extra, req, self.extra_limit), self.extra_limit)
