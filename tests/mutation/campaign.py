"""Campaigns: which mutations are tried, and what is recorded of them."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import Artifacts, load_artifacts
from cute_mla.testing.operations import operation
from tests.mutation import machine, numeric
from tests.mutation.bench import UNNOTICED, Outcome, ShippedBits, Subject, call_of, first_notice, orders, prepare
from tests.mutation.equality import is_equal
from tests.mutation.places import NOT_RUN, structure
from tests.mutation.sites import Mutation, find
from tests.mutation.smoke import ROUND_ROBIN, SmokeSubject

SURVIVORS = Path(__file__).with_name("survivors.toml")


@dataclass(frozen=True)
class Line:
    """Record of one mutation.

    ptx: digest of the text that was broken, or of the cubin whose machine code was. place: from Places.of_all. line: of PTX, or the
    address in machine code. Other fields: see Mutation and Outcome.
    """

    kernel: str
    ptx: str
    kind: str
    number: int
    place: str
    line: int
    code: str
    noticed: str
    detail: str
    by: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Return the key that identifies the mutation."""
        return self.kernel, self.ptx, self.kind, self.number


def sampled(kernel: str, mutations: Sequence[Mutation], sample: int | None, seed: int) -> list[Mutation]:
    """Return all mutations, or so many of each kind; the same for the same seed."""
    if sample is None:
        return list(mutations)
    by_kind: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in mutations:
        by_kind[mutation.kind].append(mutation)
    chosen = []
    for kind, items in by_kind.items():
        chosen += random.Random(f"{seed} {kernel} {kind}").sample(items, min(sample, len(items)))
    return chosen


def judge_batch(kernel: str, mutations: Sequence[Mutation], seeds: int) -> list[Line]:
    """Break a kernel in these ways, one at a time."""
    subject, lines = _subject(kernel)
    return [_judged(subject, lines[mutation], mutation, seeds) for mutation in mutations]


def judge_sample(kernel: str, sample: int, seed: int, seeds: int) -> list[Line]:
    """Break a kernel in so many ways of each kind, drawn from those that survivors.toml does not explain.

    An explained survivor runs all trials under all schedules, and its outcome means nothing.
    """
    subject, lines = _subject(kernel)
    known = explanations()
    mutations = [mutation for mutation, line in lines.items() if not any(item.covers(line) for item in known)]
    return [_judged(subject, lines[mutation], mutation, seeds) for mutation in sampled(kernel, mutations, sample, seed)]


def _subject(kernel: str) -> tuple[Subject, dict[Mutation, Line]]:
    """Return a kernel with its trials, and the record of each of its mutations before it is judged."""
    prepare()
    entry = load_artifacts().manifest.kernels[kernel]
    subject = Subject(entry)
    lines = {}
    for mutation, place in subject.places.of_all(find(subject.text)).items():
        code = " ".join(subject.text[mutation.start : mutation.stop].split())
        where = (mutation.kind, mutation.number, place, mutation.line)
        lines[mutation] = Line(entry.name, entry.ptx_sha256[:12], *where, code, **asdict(UNNOTICED))
    return subject, lines


def _judged(subject: Subject, line: Line, mutation: Mutation, seeds: int) -> Line:
    """Return the record of a mutation with its outcome."""
    outcome = subject.judge(mutation, orders(seeds)) if subject.trials else Outcome("no case", "", "")
    return replace(line, **asdict(outcome))


@lru_cache(1)
def _suite_subject(kernel: str, suite: str) -> SmokeSubject:
    """Return a kernel with the cases that have run on it as it ships, for all batches of a process."""
    return SmokeSubject(load_artifacts().manifest.kernels[kernel], suite)


def judge_numbers(kernel: str, mutations: Sequence[Mutation], suite: str) -> list[Line]:
    """Break numbers of a kernel, one at a time, and run its cases of a suite. What is equal by proof is not run."""
    prepare()
    subject = _suite_subject(kernel, suite)
    entry = subject.kernel
    lines = []
    for mutation in mutations:
        outcome = UNNOTICED if is_equal(entry, mutation) else subject.judge(mutation)
        outcome = outcome if subject.known else Outcome("no case", "", "")
        code = " ".join(subject.ptx[mutation.start : mutation.stop].split())
        where = (mutation.kind, mutation.number, subject.places.of(mutation.line), mutation.line)
        lines.append(Line(entry.name, entry.ptx_sha256[:12], *where, code, **asdict(outcome)))
    return lines


@dataclass(frozen=True)
class _MachineSubject:
    """A kernel as machine code. found: mutations of what its trials run, or whose control codes are checked without."""

    subject: Subject
    found: list[Mutation]

    @cached_property
    def larger(self) -> list[ShippedBits]:
        """Return the smoke cases that launch the kernel, for edits of operands that the small trials do not notice."""
        kernel = self.subject.kernel
        known = []
        for case, _ in SmokeSubject(kernel).cases("smoke"):
            tensors = operation(case).make_tensors(case, "cpu")
            results, findings = call_of(kernel.arch, case, tensors, ROUND_ROBIN, "sass")
            if not findings:
                known.append(ShippedBits(kernel, case, tensors, results, "sass"))
        return sorted(known, key=lambda trial: trial.case.tiles)

    def judge(self, line: Line, mutation: Mutation, seeds: int) -> Line:
        """Return the record of a mutation with its outcome."""
        judged = _judged(self.subject, line, mutation, seeds)
        if judged.noticed or mutation.kind not in machine.OF_OPERANDS:
            return judged
        return replace(line, **asdict(first_notice(self.larger, mutation.apply(self.subject.text), (ROUND_ROBIN,))))


@lru_cache(1)
def _machine_subject(kernel: str) -> _MachineSubject:
    subject = Subject(load_artifacts().manifest.kernels[kernel], "sass")
    found = machine.find(subject.text)
    return _MachineSubject(subject, [item for item in found if item.kind in machine.STATIC or subject.places.of(item.line) != NOT_RUN])


def judge_machine_code(kernel: str, turns: Sequence[int], seed: int, seeds: int, done: frozenset[tuple[str, str, str, int]]) -> list[Line]:
    """Break a kernel's machine code, one mutation at a time. turns: which of those that the seed draws. done: keys of records to skip."""
    prepare()
    broken = _machine_subject(kernel)
    subject, entry = broken.subject, broken.subject.kernel
    chosen = numeric.drawn(kernel, broken.found, max(turns) + 1, seed)
    lines = []
    for mutation in [chosen[turn] for turn in turns if turn < len(chosen)]:
        where = (mutation.kind, mutation.number, subject.places.of(mutation.line), mutation.line)
        code = machine.describe(subject.text, mutation)
        line = Line(entry.name, entry.cubin_sha256[:12], *where, code, **asdict(UNNOTICED))
        if line.key not in done:
            lines.append(broken.judge(line, mutation, seeds))
    return lines


def one_of_each_structure(artifacts: Artifacts, seed: int) -> list[KernelEntry]:
    """Draw a kernel of each structure, by name; equal for an equal seed."""
    alike: dict[tuple[object, ...], list[KernelEntry]] = defaultdict(list)
    for _, entry in sorted(artifacts.manifest.kernels.items()):
        ptx = artifacts.ptx(entry)
        alike[structure(entry, ptx, find(ptx))].append(entry)
    return [random.Random(f"{seed} {entries[0].name}").choice(entries) for entries in alike.values()]


def wanted_numbers(kernels: Iterable[KernelEntry], number: int, seed: int) -> Iterator[tuple[str, list[Mutation]]]:
    """Yield so many numeric mutations of each kernel."""
    for entry in kernels:
        yield entry.name, numeric.drawn(entry.name, numeric.find(load_artifacts().ptx(entry)), number, seed)


def read(path: Path) -> list[Line]:
    """Return the records of earlier runs."""
    return [Line(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


def wanted(kernels: Iterable[KernelEntry], sample: int | None, seed: int, kind: str) -> Iterator[tuple[str, list[Mutation]]]:
    """Yield the mutations of each kernel."""
    for entry in kernels:
        chosen = sampled(entry.name, find(load_artifacts().ptx(entry)), sample, seed)
        yield entry.name, [mutation for mutation in chosen if kind in mutation.kind]


@dataclass(frozen=True)
class Explanation:
    """Why mutations of these kinds, at places and in kernels that match, change nothing that is promised."""

    kernel: re.Pattern[str]
    kind: re.Pattern[str]
    place: re.Pattern[str]
    reason: str

    def covers(self, line: Line) -> bool:
        """Return whether the explanation covers a mutation."""
        return bool(self.kind.fullmatch(line.kind) and self.kernel.fullmatch(line.kernel) and self.place.fullmatch(line.place))


def explanations() -> list[Explanation]:
    """Return the contents of survivors.toml."""
    return [
        Explanation(**{name: re.compile(entry.get(name, ".*")) for name in ("kernel", "kind", "place")}, reason=entry["reason"])
        for entry in tomllib.loads(SURVIVORS.read_text())["survivor"]
    ]


def unexplained(lines: Iterable[Line]) -> list[Line]:
    """Return the survivors that survivors.toml does not explain."""
    known = explanations()
    return [line for line in lines if not line.noticed and not any(item.covers(line) for item in known)]


@dataclass(frozen=True)
class Coverage:
    """Kernels by how many of their mutations were tried.

    whole: all. alike: not all, but of the same structure as one of those. sampled: of the others, some.
    """

    whole: int
    alike: int
    sampled: int
    untouched: int

    def __str__(self) -> str:
        return (
            f"kernels: {self.whole} with all their mutations, {self.alike} of the same structure as one of those, "
            f"{self.sampled} others with some, {self.untouched} with none"
        )


def coverage(lines: Iterable[Line], artifacts: Artifacts) -> Coverage:
    """Count how much of the current kernels the records cover."""
    tried = {line.key for line in lines}
    some, whole, structures = set(), set(), {}
    for name, entry in artifacts.manifest.kernels.items():
        ptx = artifacts.ptx(entry)
        mutations = find(ptx)
        hits = sum((name, entry.ptx_sha256[:12], mutation.kind, mutation.number) in tried for mutation in mutations)
        structures[name] = structure(entry, ptx, mutations)
        if hits == len(mutations):
            whole.add(name)
        elif hits:
            some.add(name)
    known = {structures[name] for name in whole}
    alike = {name for name in structures.keys() - whole if structures[name] in known}
    others = structures.keys() - whole - alike
    return Coverage(len(whole), len(alike), len(others & some), len(others - some))
