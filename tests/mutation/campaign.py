"""Campaigns: which mutations are tried, how they are judged, and what is recorded of them."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import Artifacts, load_artifacts
from cute_mla.testing.operations import operation
from tests.mutation import machine, numeric, sites
from tests.mutation.bench import Outcome, ShippedBits, Subject, call_of, first_notice, orders, prepare, text_of
from tests.mutation.places import NOT_RUN, structure
from tests.mutation.sites import Mutation
from tests.mutation.smoke import ROUND_ROBIN, SmokeSubject

NO_CASE = Outcome("no case", "", "")


@dataclass(frozen=True)
class Line:
    """Record of one mutation.

    ptx: digest of the text that was broken, or of the cubin whose machine code was. place: from Places.of or of_all. line: of PTX, or the
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


def read(path: Path) -> list[Line]:
    """Return the records of earlier runs."""
    return [Line(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


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


@dataclass(frozen=True)
class Campaign:
    """Mutations of a code ("ptx" or "sass") in every kernel or one of each structure, and the judge of a batch of them.

    sample: of mutations of a kernel, over all kinds in turn, if no other number is asked for. None: all of them, or so many of each kind.
    """

    code: str
    find: Callable[[str], list[Mutation]]
    judge: Callable[[str, Sequence[Mutation], int], list[Line]]
    sample: int | None = None

    def draw(self, kernel: KernelEntry, sample: int | None, seed: int) -> list[Mutation]:
        """Return the mutations of a kernel that a run tries; the same for the same seed."""
        found = self.find(text_of(kernel, self.code))
        if self.sample is None:
            return sampled(kernel.name, found, sample, seed)
        return numeric.drawn(kernel.name, found, sample or self.sample, seed)

    def key(self, kernel: KernelEntry, mutation: Mutation) -> tuple[str, str, str, int]:
        """Return the key of a mutation's record."""
        return kernel.name, _digest(kernel, self.code), mutation.kind, mutation.number


def _digest(kernel: KernelEntry, code: str) -> str:
    return (kernel.ptx_sha256 if code == "ptx" else kernel.cubin_sha256)[:12]


def kernels_of(campaign: Campaign, artifacts: Artifacts, seed: int) -> list[KernelEntry]:
    """Return the kernels that a campaign breaks."""
    return list(artifacts.manifest.kernels.values()) if campaign.sample is None else one_of_each_structure(artifacts, seed)


def one_of_each_structure(artifacts: Artifacts, seed: int) -> list[KernelEntry]:
    """Draw a kernel of each structure, by name; equal for an equal seed."""
    alike: dict[tuple[object, ...], list[KernelEntry]] = defaultdict(list)
    for _, entry in sorted(artifacts.manifest.kernels.items()):
        ptx = artifacts.ptx(entry)
        alike[structure(entry, ptx, sites.find(ptx))].append(entry)
    return [random.Random(f"{seed} {entries[0].name}").choice(entries) for entries in alike.values()]


def _line(kernel: KernelEntry, mutation: Mutation, place: str, text: str, outcome: Outcome) -> Line:
    """Return the record of a mutation of a kernel's PTX."""
    code = " ".join(text[mutation.start : mutation.stop].split())
    return Line(kernel.name, _digest(kernel, "ptx"), mutation.kind, mutation.number, place, mutation.line, code, **asdict(outcome))


@lru_cache(1)
def _synchronisation(kernel: str) -> tuple[Subject, dict[Mutation, str]]:
    """Return a kernel with its trials, and the place of each of its mutations, for all batches of a process."""
    subject = Subject(load_artifacts().manifest.kernels[kernel])
    return subject, subject.places.of_all(sites.find(subject.text))


def judge_synchronisation(kernel: str, mutations: Sequence[Mutation], seeds: int) -> list[Line]:
    """Break the synchronisation of a kernel in these ways, one at a time."""
    prepare()
    subject, places = _synchronisation(kernel)
    lines = []
    for mutation in mutations:
        outcome = subject.judge(mutation, orders(seeds)) if subject.trials else NO_CASE
        lines.append(_line(subject.kernel, mutation, places[mutation], subject.text, outcome))
    return lines


def judge_sample(kernel: str, sample: int, seed: int, seeds: int, is_explained: Callable[[Line], bool]) -> list[Line]:
    """Break a kernel's synchronisation in so many ways of each kind, drawn from those that are not explained.

    An explained survivor runs all trials under all schedules, and its outcome means nothing.
    """
    prepare()
    subject, places = _synchronisation(kernel)
    before = {mutation: _line(subject.kernel, mutation, place, subject.text, NO_CASE) for mutation, place in places.items()}
    wanted = [mutation for mutation, line in before.items() if not is_explained(line)]
    return judge_synchronisation(kernel, sampled(kernel, wanted, sample, seed), seeds)


@lru_cache(1)
def _smoke_subject(kernel: str) -> SmokeSubject:
    """Return a kernel with the cases that have run on it as it ships, for all batches of a process."""
    return SmokeSubject(load_artifacts().manifest.kernels[kernel])


def judge_numbers(kernel: str, mutations: Sequence[Mutation], seeds: int) -> list[Line]:
    """Break numbers of a kernel, one at a time, and run its smoke cases, each under the one schedule of `cute-mla verify`."""
    prepare()
    subject = _smoke_subject(kernel)
    lines = []
    for mutation in mutations:
        outcome = subject.judge(mutation)
        outcome = outcome if subject.known else NO_CASE
        lines.append(_line(subject.kernel, mutation, subject.places.of(mutation.line), subject.text, outcome))
    return lines


class _MachineSubject(Subject):
    """A kernel as machine code."""

    def __init__(self, kernel: str) -> None:
        super().__init__(load_artifacts().manifest.kernels[kernel], "sass")

    @cached_property
    def larger(self) -> list[ShippedBits]:
        """Return the smoke cases that launch the kernel, for edits of operands that the small trials do not notice."""
        known = []
        for case, _ in SmokeSubject(self.kernel).cases("smoke"):
            tensors = operation(case).make_tensors(case, "cpu")
            results, findings = call_of(self.kernel.arch, case, tensors, ROUND_ROBIN, "sass")
            if not findings:
                known.append(ShippedBits(self.kernel, case, tensors, results, "sass"))
        return sorted(known, key=lambda trial: trial.case.tiles)

    def outcome(self, mutation: Mutation, seeds: int) -> Outcome:
        """Return the outcome of a mutation; control codes are checked without running them."""
        runs = mutation.kind in machine.STATIC or self.places.of(mutation.line) != NOT_RUN
        if not (runs and self.trials):
            return NO_CASE
        outcome = self.judge(mutation, orders(seeds))
        if outcome.noticed or mutation.kind not in machine.OF_OPERANDS:
            return outcome
        return first_notice(self.larger, mutation.apply(self.text), (ROUND_ROBIN,))


@lru_cache(1)
def _machine_subject(kernel: str) -> _MachineSubject:
    return _MachineSubject(kernel)


def judge_machine_code(kernel: str, mutations: Sequence[Mutation], seeds: int) -> list[Line]:
    """Break a kernel's machine code, one mutation at a time."""
    prepare()
    subject = _machine_subject(kernel)
    lines = []
    for mutation in mutations:
        where = (mutation.kind, mutation.number, subject.places.of(mutation.line), mutation.line)
        code = machine.describe(subject.text, mutation)
        outcome = subject.outcome(mutation, seeds)
        lines.append(Line(kernel, _digest(subject.kernel, "sass"), *where, code, **asdict(outcome)))
    return lines


CAMPAIGNS = {
    "synchronisation": Campaign("ptx", sites.find, judge_synchronisation),
    "numbers": Campaign("ptx", numeric.find, judge_numbers, 100),
    "machine": Campaign("sass", machine.find, judge_machine_code, 40),
}
