"""What a suite says of each of its cases, and how the simulated device's full suites are cut to what it can bear."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from .case import BaseCase
from .pairwise import pairwise_cover

SMOKE_TILES = 200  # most tiles of a smoke case
REDUCED_TILES = 400  # tiles to which the simulated device's full suite cuts a large case

Fate = Literal["whole", "reduced", "skipped"]
C = TypeVar("C", bound=BaseCase)


@dataclass(frozen=True)
class Planned(Generic[C]):
    """A case of a suite. reason says why it was reduced, or is not run."""

    case: C
    fate: Fate = "whole"
    reason: str = ""


@dataclass(frozen=True)
class Bearable(Generic[C]):
    """What the simulated device runs of a suite.

    whole: the cases that it runs as they are. factors: of a case; of all the others every pair of them is run.
    why: in a word, why a case is not run whole.
    """

    whole: Callable[[C], bool]
    factors: Callable[[C], Sequence[Hashable]]
    why: Callable[[C], str]

    def plan(self, cases: Sequence[C]) -> list[Planned[C]]:
        """The cases as the simulated device can bear them; every one is in it once."""
        whole = {case for case in cases if self.whole(case)}
        rest = [case for case in cases if case not in whole]
        covering = {rest[index] for index in pairwise_cover([self.factors(case) for case in rest])}
        return _without_repeats([self._planned(case, case in whole, case in covering) for case in cases])

    def _planned(self, case: C, whole: bool, covering: bool) -> Planned[C]:
        if whole:
            return Planned(case)
        if not covering:
            return Planned(case, "skipped", f"{self.why(case)}: the simulated device runs a cover of all pairs of factor values")
        reduced = _reduce(case)
        if reduced == case:
            return Planned(case)
        cut = f"{case.cut_by} {getattr(case, case.cut_by)} cut to {getattr(reduced, case.cut_by)}"
        return Planned(reduced, "reduced", f"{cut}: budget of {REDUCED_TILES} tiles on the simulated device")


def _without_repeats(planned: list[Planned[C]]) -> list[Planned[C]]:
    """Skips what, once reduced, is the same as another case that runs."""
    running = {item.case for item in planned if item.fate == "whole"}
    result = []
    for item in planned:
        if item.fate == "reduced" and item.case in running:
            item = replace(item, fate="skipped", reason="large: cut to the budget, it is another case that runs")
        elif item.fate == "reduced":
            running.add(item.case)
        result.append(item)
    return result


def _reduce(case: C) -> C:
    """The case with as large a batch, or whatever it is cut by, as the budget of tiles allows, at least 1."""
    while case.tiles > REDUCED_TILES and (size := getattr(case, case.cut_by)) > 1:
        fitting = size * REDUCED_TILES // case.tiles
        case = replace(case, **{case.cut_by: min(max(fitting, 1), size - 1)})
    return case
