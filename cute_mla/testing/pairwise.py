"""Pairwise covers: a few rows of a table in which every two values of different columns that ever meet still meet."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import combinations

Row = Sequence[Hashable]


def pairs(row: Row) -> frozenset[tuple[tuple[int, Hashable], tuple[int, Hashable]]]:
    """Every two values of a row, each with its column."""
    return frozenset(combinations(enumerate(row), 2))


def pairwise_cover(rows: Sequence[Row]) -> list[int]:
    """Indices, ascending, of rows that together hold every pair of values that occurs in `rows`.

    Greedy: the row with the most pairs not yet covered comes next, the first of them when several tie.
    """
    uncovered = set().union(*map(pairs, rows))
    queue = [(-len(pairs(row)), index) for index, row in enumerate(rows)]
    heapq.heapify(queue)
    chosen = []
    while uncovered:
        _, index = heapq.heappop(queue)
        gain = len(pairs(rows[index]) & uncovered)
        # Gains only shrink, so a row whose gain is up to date and still beats the next row's bound is the best.
        if queue and (-gain, index) > queue[0]:
            heapq.heappush(queue, (-gain, index))
            continue
        chosen.append(index)
        uncovered -= pairs(rows[index])
    return sorted(chosen)
