"""Declared bugs: which sites of a kernel's PTX are edited, and which cases must notice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.testing.cases.base import BaseCase
from tests.mutation.sites import Edit, Mutation, apply_all

EVERY = slice(None)  # of the ways in which a bug breaks a kernel

Group = Sequence[Mutation]  # sites that are broken at once
Site = tuple[str, BaseCase | None]  # name of a site, and the case that notices when it breaks; None: nothing does
Pick = Callable[[str, Group], list[Group]]  # from a PTX text and all sites of an edit


def each(ptx: str, sites: Group) -> list[Group]:
    """Break every site by itself."""
    return [[site] for site in sites]


def together(ptx: str, sites: Group) -> list[Group]:
    """Break all sites at once."""
    return [sites]


def alone(*numbers: int) -> Pick:
    """Break the sites of these numbers, each by itself. Negative numbers count from the end."""
    return lambda ptx, sites: [[sites[number]] for number in numbers]


def each_in(first: int | None, stop: int | None = None) -> Pick:
    """Break the sites [first:stop], each by itself."""
    return lambda ptx, sites: [[site] for site in sites[first:stop]]


def together_in(first: int | None, stop: int | None = None) -> Pick:
    """Break the sites [first:stop] at once."""
    return lambda ptx, sites: [sites[first:stop]]


def between(landmark: str, first: int, second: int) -> Pick:
    """Break the only site between two matches of a landmark."""

    def pick(ptx: str, sites: Group) -> list[Group]:
        marks = list(re.finditer(landmark, ptx))
        (site,) = (site for site in sites if marks[first].end() < site.start < marks[second].start())
        return [[site]]

    return pick


def each_but_around_dealloc(ptx: str, sites: Group) -> list[Group]:
    """Break every site but the last by itself. The last one, in front of tcgen05.dealloc, has no effect."""
    assert ptx[sites[-1].stop :].count("tcgen05.dealloc") == 1, "the planted bug is out of date"
    return each(ptx, sites[:-1])


@dataclass(frozen=True)
class Bug:
    """A bug to plant in a kernel's PTX.

    pattern, replacement: the edit, as in re.sub; an empty replacement deletes. pick: which sites break, alone or at once.
    count: how many sites the shipped PTX has, where the order of sites carries meaning.
    """

    name: str
    pattern: str
    replacement: str = ""
    pick: Pick = each
    count: int | None = None

    def groups(self, ptx: str) -> list[Group]:
        """Return the groups of sites that break at once. AssertionError if the pattern no longer fits."""
        sites = Edit(self.name, re.compile(self.pattern), self.replacement).sites(ptx)
        assert sites, f"{self.pattern!r} does not occur in the PTX: the planted bug is out of date"
        assert self.count in (None, len(sites)), f"{self.pattern!r} occurs {len(sites)} times: the planted bug is out of date"
        groups = self.pick(ptx, sites)
        assert all(groups), f"no site of {self.pattern!r} is picked: the planted bug is out of date"
        return groups

    def broken(self, ptx: str) -> list[tuple[str, str]]:
        """Return (what is broken, broken text) for every group of sites. AssertionError if the pattern no longer fits."""
        return [
            (", ".join(f"line {site.line}: {ptx[site.start : site.stop]}" for site in group), apply_all(ptx, group))
            for group in self.groups(ptx)
        ]


def survivors(bug: Bug, ptx: str, is_noticed: Callable[[str], bool]) -> list[str]:
    """Break a PTX text in every way that a bug says; return what nothing noticed, by its lines."""
    return [label for label, broken in bug.broken(ptx) if not is_noticed(broken)]


@dataclass(frozen=True)
class Planted:
    """A bug in the kernel that serves some cases. One of the cases must notice, under one of the schedules."""

    bug: Bug
    cases: tuple[BaseCase, ...]


def planted(
    name: str,
    case: BaseCase,
    pattern: str,
    replacement: str = "",
    pick: Pick = each,
    *,
    count: int | None = None,
    or_case: BaseCase | None = None,
) -> Planted:
    """Declare a bug in the kernel that serves a case. or_case: another case that may notice in its stead."""
    return Planted(Bug(name, pattern, replacement, pick, count), (case,) if or_case is None else (case, or_case))


def in_case(case: BaseCase, names: Sequence[str | None], others: Mapping[str, BaseCase] = MappingProxyType({})) -> list[Site]:
    """Return sites of these names that one case notices, but for those that others notice. None: a site that nothing notices."""
    return [(name or "", others.get(name, case) if name else None) for name in names]


def one_by_one(what: str, sites: Sequence[Site], pattern: str, replacement: str = "") -> list[Planted]:
    """Declare a bug at each site of a pattern that a case notices. sites: all of them, in the order of the PTX."""
    return [
        planted(f"{what}{name}", case, pattern, replacement, alone(index), count=len(sites))
        for index, (name, case) in enumerate(sites)
        if case is not None
    ]


@dataclass(frozen=True)
class Suite:
    """The bugs that are planted in a family of kernels.

    unbroken: cases that must pass, by name, since what they notice would else prove nothing.
    """

    arch: Arch
    unbroken: Mapping[str, BaseCase]
    bugs: tuple[Planted, ...]


def in_turn(op: str, unbroken: Sequence[Mapping[str, BaseCase]], bugs: Sequence[Planted]) -> dict[str, Suite]:
    """Return the suites of a source that serves all architectures: each bug is planted in the kernel of one of them, in turn.

    unbroken: of as many architectures as take a turn.
    """
    turns = zip(ARCHS.values(), unbroken, strict=False)
    return {f"{op}_{arch.name}": Suite(arch, cases, tuple(bugs[index :: len(unbroken)])) for index, (arch, cases) in enumerate(turns)}
