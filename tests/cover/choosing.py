"""Choice of the tests of `make test`: a greedy cover, most new elements per CPU second first."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping

from tests.cover.records import CoverRecord, Element

LEAST_SECONDS = 0.02  # of a test: collection, set-up and report
CHEAP_SECONDS = 0.15  # tests below stay: they cost little together, and their combinations of values notice more than their elements tell


def cost(record: CoverRecord) -> float:
    """Return the CPU seconds of a test without translation, which the first test of a kernel pays for the others."""
    return max(record.seconds - record.translation, 0.0) + LEAST_SECONDS


def cover(candidates: Mapping[str, CoverRecord], always: Collection[str] = ()) -> set[str]:
    """Return tests that together reach every element of all candidates, with these tests and all cheap ones always among them."""
    always = {test for test, record in candidates.items() if test in always or cost(record) < CHEAP_SECONDS}
    chosen = set(always)
    known: set[Element] = set()
    for test in chosen:
        known |= candidates[test].elements
    elements = {test: record.elements for test, record in sorted(candidates.items()) if test not in chosen}
    queue = [(-len(items - known) / cost(candidates[test]), test) for test, items in elements.items()]
    heapq.heapify(queue)
    while queue:
        bound, test = heapq.heappop(queue)
        gain = len(elements[test] - known) / cost(candidates[test])
        if gain and queue and gain < -queue[0][0] and gain < -bound:
            heapq.heappush(queue, (-gain, test))
        elif gain:
            chosen.add(test)
            known |= elements[test]
    return _without_redundant({test: candidates[test] for test in chosen}, always)


def _without_redundant(chosen: Mapping[str, CoverRecord], always: Collection[str]) -> set[str]:
    """Drop tests, dearest first, whose elements the others reach."""
    times = Counter(element for record in chosen.values() for element in record.elements)
    kept = set(chosen)
    for test, record in sorted(chosen.items(), key=lambda item: -cost(item[1])):
        if test not in always and all(times[element] > 1 for element in record.elements):
            kept.remove(test)
            times.subtract(record.elements)
    return kept


def missing(kept: Collection[CoverRecord], others: Collection[CoverRecord]) -> dict[str, set[Element]]:
    """Return the elements that others reach and none of the kept tests does, by test."""
    known = {element for record in kept for element in record.elements}
    return {record.test: record.elements - known for record in others if record.elements - known}
