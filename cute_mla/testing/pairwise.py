"""Pairwise covers: a few rows of a table that contain every pair of values, from two columns, that occurs in the table."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations

Row = Sequence[Hashable]
Pair = tuple[tuple[int, Hashable], tuple[int, Hashable]]


def pairs(row: Row) -> frozenset[Pair]:
    """Return all pairs of values of a row, each value with its column."""
    return frozenset(combinations(enumerate(row), 2))


def pairwise_cover(rows: Sequence[Row], covered: AbstractSet[Pair] = frozenset()) -> list[int]:
    """Return ascending indices of rows that together contain every pair of values that occurs in `rows`, but for those of `covered`.

    Greedy: the next row is the one with the most uncovered pairs, the first of these in a tie.
    """
    uncovered = set().union(*map(pairs, rows)) - covered
    queue = [(-len(pairs(row)), index) for index, row in enumerate(rows)]
    heapq.heapify(queue)
    chosen = []
    while uncovered:
        _, index = heapq.heappop(queue)
        gain = len(pairs(rows[index]) & uncovered)
        # Gains only shrink: a row whose current gain is at least the bound of the next row is the best.
        if queue and (-gain, index) > queue[0]:
            heapq.heappush(queue, (-gain, index))
            continue
        chosen.append(index)
        uncovered -= pairs(rows[index])
    return sorted(chosen)
