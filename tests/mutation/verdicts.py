"""Verdicts on mutations of numbers and of machine code: noticed, equal by proof, explained in numbers.toml or machine.toml, or open."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from cute_mla.runtime.artifacts import load_artifacts
from tests.mutation import numeric
from tests.mutation.campaign import Line
from tests.mutation.equality import is_equal
from tests.mutation.expressions import expression, use
from tests.mutation.sites import Mutation

EXPLANATIONS = Path(__file__).with_name("numbers.toml")
OF_MACHINE_CODE = Path(__file__).with_name("machine.toml")
NOTICED, EQUAL, EXPLAINED, OPEN = VERDICTS = ("noticed", "equal", "explained", "open")


@dataclass(frozen=True)
class NumberExplanation:
    """Why no practical input shows mutations of these kinds.

    place: of the roles that run the instruction. code: of the whole expression that expressions.py makes of the instruction, or of the edit
    of machine code. use: of that of the first instruction that reads its result.
    """

    kernel: re.Pattern[str]
    kind: re.Pattern[str]
    place: re.Pattern[str]
    code: re.Pattern[str]
    use: re.Pattern[str]
    reason: str

    def covers(self, line: Line, code: str, use: str = "") -> bool:
        """Return whether the explanation is about a mutation."""
        found = ((self.kernel, line.kernel), (self.kind, line.kind), (self.place, line.place), (self.code, code), (self.use, use))
        return all(pattern.fullmatch(text) for pattern, text in found)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one record. code: the broken expression; it and the explanation are empty for what is noticed or equal."""

    line: Line
    verdict: str
    code: str = ""
    explanation: NumberExplanation | None = None


def explanations(path: Path = EXPLANATIONS) -> list[NumberExplanation]:
    """Return the contents of numbers.toml, or of machine.toml."""
    names = ("kernel", "kind", "place", "code", "use")
    return [
        NumberExplanation(**{name: re.compile(entry.get(name, ".*")) for name in names}, reason=entry["reason"])
        for entry in tomllib.loads(path.read_text())["survivor"]
    ]


@lru_cache(1)
def _mutations(kernel: str) -> dict[tuple[str, int], Mutation]:
    artifacts = load_artifacts()
    return {(item.kind, item.number): item for item in numeric.find(artifacts.ptx(artifacts.manifest.kernels[kernel]))}


def mutation_of(line: Line) -> Mutation:
    """Return the mutation that a record is about."""
    return _mutations(line.kernel)[line.kind, line.number]


def current(lines: Iterable[Line]) -> list[Line]:
    """Return the records of kernels as they are built now."""
    kernels = load_artifacts().manifest.kernels
    return [line for line in lines if line.kernel in kernels and kernels[line.kernel].ptx_sha256.startswith(line.ptx)]


def judged(lines: Iterable[Line]) -> Iterator[Verdict]:
    """Yield a verdict on each record, by kernel."""
    known = explanations()
    for line in sorted(lines, key=lambda line: line.kernel):
        entry = load_artifacts().manifest.kernels[line.kernel]
        if line.noticed:
            yield Verdict(line, NOTICED)
        elif is_equal(entry, mutation_of(line)):
            yield Verdict(line, EQUAL)
        else:
            code, reader = expression(entry, mutation_of(line)), use(entry, mutation_of(line))
            why = next((item for item in known if item.covers(line, code, reader)), None)
            yield Verdict(line, OPEN if why is None else EXPLAINED, code, why)


def judged_machine_code(lines: Iterable[Line]) -> Iterator[Verdict]:
    """Yield a verdict on each record about the machine code of a kernel as it is built now."""
    known = explanations(OF_MACHINE_CODE)
    kernels = load_artifacts().manifest.kernels
    for line in lines:
        if line.kernel in kernels and kernels[line.kernel].cubin_sha256.startswith(line.ptx):
            why = next((item for item in known if item.covers(line, line.code)), None)
            yield Verdict(line, NOTICED if line.noticed else OPEN if why is None else EXPLAINED, line.code, why)


def unused(verdicts: Iterable[Verdict], path: Path = EXPLANATIONS) -> list[NumberExplanation]:
    """Return the explanations of kernels and kinds on record that explain none of their survivors."""
    every = list(verdicts)
    used = {item.explanation for item in every}
    return [
        known
        for known in explanations(path)
        if known not in used and any(known.kernel.fullmatch(item.line.kernel) and known.kind.fullmatch(item.line.kind) for item in every)
    ]


def table(title: str, verdicts: Iterable[Verdict], row: Callable[[Line], str]) -> str:
    """Return counts of the verdicts by a property of the records, with the share noticed of those that are neither equal nor explained."""
    rows: dict[str, Counter[str]] = {}
    for item in verdicts:
        rows.setdefault(row(item.line), Counter())[item.verdict] += 1
    total = sum(rows.values(), Counter[str]())
    lines = [f"{title:48}" + "".join(f"{name:>11}" for name in VERDICTS) + "    noticed"]
    for name, counts in [*sorted(rows.items()), ("all", total)]:
        matter = counts[NOTICED] + counts[OPEN]
        share = f"{100 * counts[NOTICED] / matter:9.1f} %" if matter else f"{'-':>11}"
        lines.append(f"{name:48}" + "".join(f"{counts[verdict]:11}" for verdict in VERDICTS) + share)
    return "\n".join(lines)
