"""Campaigns: which mutations are tried, and what is recorded of them."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.library import load_artifacts
from tests.mutation.bench import Outcome, Subject, orders, prepare
from tests.mutation.sites import Mutation, find

SURVIVORS = Path(__file__).with_name("survivors.toml")


@dataclass(frozen=True)
class Line:
    """What is recorded of one mutation. ptx: digest of the text that was broken; the rest as in Mutation and Outcome."""

    kernel: str
    ptx: str
    kind: str
    number: int
    line: int
    code: str
    noticed: str
    detail: str
    by: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Which mutation this is."""
        return self.kernel, self.ptx, self.kind, self.number


def sampled(kernel: str, mutations: Sequence[Mutation], sample: int | None, seed: int) -> list[Mutation]:
    """All mutations, or so many of each kind; the same for the same seed."""
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
    """Breaks a kernel in these ways, one at a time."""
    prepare()
    entry = load_artifacts().manifest.kernels[kernel]
    subject = Subject(entry)
    if not subject.cases:
        return [as_line(entry, subject.ptx, mutation, Outcome("no case", "", "")) for mutation in mutations]
    return [as_line(entry, subject.ptx, mutation, subject.judge(mutation, orders(seeds))) for mutation in mutations]


def as_line(entry: KernelEntry, ptx: str, mutation: Mutation, outcome: Outcome) -> Line:
    """The record."""
    code = " ".join(ptx[mutation.start : mutation.stop].split())
    return Line(entry.name, entry.ptx_sha256[:12], mutation.kind, mutation.number, mutation.line, code, **asdict(outcome))


def read(path: Path) -> list[Line]:
    """The records of earlier runs."""
    return [Line(**json.loads(text)) for text in path.read_text().splitlines()] if path.exists() else []


def wanted(kernels: Iterable[KernelEntry], sample: int | None, seed: int, kind: str) -> Iterator[tuple[str, list[Mutation]]]:
    """The mutations of each kernel."""
    for entry in kernels:
        chosen = sampled(entry.name, find(load_artifacts().ptx(entry)), sample, seed)
        yield entry.name, [mutation for mutation in chosen if kind in mutation.kind]


@dataclass(frozen=True)
class Explanation:
    """Why mutations of a kind, in kernels whose names match, change nothing that is promised. numbers: None for all of them."""

    kernel: re.Pattern[str]
    kind: str
    numbers: frozenset[int] | None
    reason: str

    def covers(self, line: Line) -> bool:
        """Whether it is about this mutation."""
        return line.kind == self.kind and bool(self.kernel.fullmatch(line.kernel)) and (self.numbers is None or line.number in self.numbers)


def explanations() -> list[Explanation]:
    """The contents of survivors.toml."""
    return [
        Explanation(
            re.compile(entry["kernel"]), entry["kind"], frozenset(entry["numbers"]) if "numbers" in entry else None, entry["reason"]
        )
        for entry in tomllib.loads(SURVIVORS.read_text())["survivor"]
    ]


def unexplained(lines: Iterable[Line]) -> list[Line]:
    """The survivors that survivors.toml does not explain."""
    known = explanations()
    return [line for line in lines if not line.noticed and not any(item.covers(line) for item in known)]
