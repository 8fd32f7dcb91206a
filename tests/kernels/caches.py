"""The keys of a batch as kernels are told: a table or null, and a limit, for each of two caches."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from cute_mla.spec.split_plan import NO_WINDOW

INT_MAX = (1 << 31) - 1
WITHOUT_WINDOW = (NO_WINDOW.reach, NO_WINDOW.sink_tiles)  # the last arguments of kernels that know windows, without one


@dataclass(frozen=True)
class Keys:
    """Keys of `batch` requests. lengths, extra: None for a null pointer."""

    batch: int
    lengths: list[int] | None
    extra: list[int] | None
    limit: int = INT_MAX
    extra_limit: int = 0

    @staticmethod
    def of(lengths: list[int], limit: int = INT_MAX) -> Keys:
        """Return one cache with all lengths given."""
        return Keys(len(lengths), lengths, None, limit)

    @staticmethod
    def draw(draw: random.Random, most: int) -> Keys:
        """Any of what sparse decode allows, of up to 8 requests of up to `most` keys in each cache."""
        batch, limit, extra_limit = draw.randrange(1, 9), draw.randrange(1, most), draw.choice([0, draw.randrange(1, most)])

        def table(limit: int) -> list[int] | None:
            told = [draw.choice([0, 1, -5, limit, limit + 1, INT_MAX, draw.randrange(limit + 1)]) for _ in range(batch)]
            return draw.choice([None, told])

        return Keys(batch, table(limit), table(extra_limit), limit, extra_limit)

    @property
    def counts(self) -> list[int]:
        """The keys of each request, of both caches."""
        first = [min(max(keys, 0), self.limit) for keys in self.lengths or [self.limit] * self.batch]
        second = [min(max(keys, 0), self.extra_limit) for keys in self.extra or [self.extra_limit] * self.batch]
        return [a + b for a, b in zip(first, second, strict=True)]

    @property
    def most(self) -> int:
        """No request has more keys."""
        return self.limit + self.extra_limit

    def tables(self) -> tuple[torch.Tensor | int, torch.Tensor | int]:
        """Return the two pointers: tensors, or 0 for null."""
        first, second = (0 if table is None else torch.tensor(table or [0], dtype=torch.int32) for table in (self.lengths, self.extra))
        return first, second
