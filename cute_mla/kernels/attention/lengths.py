"""Keys per request: an int32 per request where the caller passes lengths, a limit where not."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from ..primitives.integers import clip
from ..primitives.nullable import load_or


@dataclass(frozen=True)
class Lengths:
    """The keys of every request: those of its first cache, followed by those of a second one.

    lengths, extra: int32 [batch], clipped to limit and extra_limit, whose sum is an int32 too. Either may be null at run
    time: then every request has as many keys of that cache as its limit. extra None when compiling: there is no second
    cache, and `lengths` is not null.
    """

    lengths: cute.Pointer
    extra: cute.Pointer | None
    limit: Int32
    extra_limit: Int32

    def keys(self, req: Int32) -> Int32:
        """Return the keys of a request, in both caches."""
        first, second = self.keys_by_cache(req)
        return first if self.extra is None else first + second

    def keys_by_cache(self, req: Int32) -> tuple[Int32, Int32]:
        """Return the keys of a request in the first and in the second cache."""
        if self.extra is None:
            return clip((self.lengths + req).load(), self.limit), Int32(0)
        first = clip(load_or(self.lengths, req, self.limit), self.limit)
        return first, clip(load_or(self.extra, req, self.extra_limit), self.extra_limit)
