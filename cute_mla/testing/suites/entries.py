"""Entries of a suite, and how the simulated device's full suite is reduced to what it can run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

from ...spec.kernel_ops import ARCHS_OF
from ..cases.base import BaseCase
from ..pairwise import Row, pairs, pairwise_cover
from .cover import Variant

REDUCED_TILES = 200  # tiles to which the simulated device's full suite cuts a large case: about 10 CPU seconds

RunMode = Literal["whole", "reduced", "skipped"]
C = TypeVar("C", bound=BaseCase)


@dataclass(frozen=True)
class SuiteEntry(Generic[C]):
    """A case of a suite. reason says why the case is reduced or skipped; it is empty for a whole case."""

    case: C
    mode: RunMode = "whole"
    reason: str = ""


@dataclass(frozen=True)
class SimulatorReduction(Generic[C]):
    """The part of a full suite that the simulated device runs.

    runs_whole: True for cases that run as they are. factors: the factor values of a case. is_short: True for a case that needs no cut. The
    remaining cases are replaced by a pairwise cover of their factor values and kernel variants: of short cases, then of others, which add
    the pairs that no short case has.
    """

    runs_whole: Callable[[C], bool]
    factors: Callable[[C], Sequence[Hashable]] = lambda case: ()
    is_short: Callable[[C], bool] = lambda case: False

    def entries(self, cases: Sequence[C]) -> list[SuiteEntry[C]]:
        """Return one entry per case: whole, reduced to the budget of tiles, or skipped."""
        whole = {case for case in cases if self.runs_whole(case)}
        rest = [case for case in cases if case not in whole]
        covering: dict[C, Row] = {}
        for short in (True, False):
            covering |= self._cover([case for case in rest if self.is_short(case) == short], covering)
        return _without_repeats([self._entry(case, case in whole, case in covering) for case in cases])

    def _cover(self, cases: Sequence[C], others: Mapping[C, Row]) -> dict[C, Row]:
        """Return cases, with their factor values, that have all pairs that the others lack; the cheaper ones in a tie."""
        ordered = sorted(cases, key=lambda case: case.tiles)
        rows = [(tuple(case.problem(arch).config.name for arch in ARCHS_OF[case.op]), *self.factors(case)) for case in ordered]
        return {ordered[index]: rows[index] for index in pairwise_cover(rows, set().union(*map(pairs, others.values())))}

    def _entry(self, case: C, whole: bool, covering: bool) -> SuiteEntry[C]:
        if whole:
            return SuiteEntry(case)
        if not covering:
            size = "short" if self.is_short(case) else "large"
            return SuiteEntry(case, "skipped", f"{size}: the simulated device runs a cover of all pairs of factor values")
        reduced = _reduce(case)
        if reduced == case:
            return SuiteEntry(case)
        cut = f"{case.cut_by} {getattr(case, case.cut_by)} cut to {getattr(reduced, case.cut_by)}"
        return SuiteEntry(reduced, "reduced", f"{cut}: budget of {REDUCED_TILES} tiles on the simulated device")


@dataclass(frozen=True)
class OpSuites(Generic[C]):
    """The suites of an op: its variants with their factors, smoke cases, the grid and corner cases that the full suite adds.

    simulated: the part of the full suite that the simulated device runs; by default all of it, where cases are small.
    """

    variants: Sequence[Variant]
    smoke: Sequence[C]
    more: Callable[[], Iterable[C]]
    simulated: SimulatorReduction[C] = field(default_factory=lambda: SimulatorReduction(lambda case: True))

    def full(self) -> list[C]:
        """Return every case of the full suite once."""
        return list(dict.fromkeys([*self.smoke, *self.more()]))


def _without_repeats(entries: list[SuiteEntry[C]]) -> list[SuiteEntry[C]]:
    """Skip each reduced case that equals another case that runs."""
    running = {entry.case for entry in entries if entry.mode == "whole"}
    result = []
    for entry in entries:
        if entry.mode == "reduced" and entry.case in running:
            result.append(replace(entry, mode="skipped", reason="large: cut to the budget, it is another case that runs"))
            continue
        if entry.mode == "reduced":
            running.add(entry.case)
        result.append(entry)
    return result


def _reduce(case: C) -> C:
    """Lower the field that the case is cut by, to no less than 1, until the case fits the budget of tiles."""
    while case.tiles > REDUCED_TILES and (size := getattr(case, case.cut_by)) > 1:
        fitting = size * REDUCED_TILES // case.tiles
        case = replace(case, **{case.cut_by: min(max(fitting, 1), size - 1)})
    return case
