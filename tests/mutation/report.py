"""The records of a campaign against what it must reach: a reason for each survivor, or a share noticed for each kernel."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cute_mla.runtime.artifacts import load_artifacts
from tests.mutation.campaign import Line

_FOLDER = Path(__file__).parent
REASONS = {"synchronisation": _FOLDER / "survivors.toml", "machine": _FOLDER / "machine.toml"}  # of the campaigns without floors
FLOORS: Mapping[str, float] = tomllib.loads((_FOLDER / "floors.toml").read_text())
JUDGED = 60  # records of a kernel that are enough to hold it to its floor


@dataclass(frozen=True)
class Explanation:
    """Why mutations of these kinds, at places and in kernels that match, change nothing that is promised."""

    kernel: re.Pattern[str]
    kind: re.Pattern[str]
    place: re.Pattern[str]
    code: re.Pattern[str]
    reason: str

    def covers(self, line: Line) -> bool:
        """Return whether the explanation covers a mutation."""
        found = ((self.kernel, line.kernel), (self.kind, line.kind), (self.place, line.place), (self.code, line.code))
        return all(pattern.fullmatch(text) for pattern, text in found)


def explanations(path: Path) -> list[Explanation]:
    """Return the contents of survivors.toml or machine.toml."""
    names = ("kernel", "kind", "place", "code")
    return [
        Explanation(**{name: re.compile(entry.get(name, ".*")) for name in names}, reason=entry["reason"])
        for entry in tomllib.loads(path.read_text())["survivor"]
    ]


def current(lines: Iterable[Line]) -> list[Line]:
    """Return the records of kernels as they are built now, without mutations that no case runs."""
    kernels = load_artifacts().manifest.kernels
    digests = {name: (entry.ptx_sha256[:12], entry.cubin_sha256[:12]) for name, entry in kernels.items()}
    return [line for line in lines if line.ptx in digests.get(line.kernel, ()) and line.noticed != "no case"]


def unexplained(lines: Iterable[Line], known: Sequence[Explanation]) -> list[Line]:
    """Return the survivors that no explanation covers."""
    return [line for line in lines if not line.noticed and not any(item.covers(line) for item in known)]


def unused(lines: Sequence[Line], known: Iterable[Explanation]) -> list[Explanation]:
    """Return the explanations of kernels and kinds on record that explain none of their survivors."""
    about = [item for item in known if any(item.kernel.fullmatch(line.kernel) and item.kind.fullmatch(line.kind) for line in lines)]
    return [item for item in about if not any(not line.noticed and item.covers(line) for line in lines)]


def floor_of(kernel: str, floors: Mapping[str, float]) -> tuple[str, float]:
    """Return the longest name of a floor which a kernel's begins with, and the share; "" and 0 if none was measured."""
    name = max((name for name in floors if kernel.startswith(name)), key=len, default="")
    return name, floors.get(name, 0.0)


def below_floors(lines: Iterable[Line], floors: Mapping[str, float]) -> list[str]:
    """Return a text for each kernel with enough records of which too few are noticed."""
    tried, noticed = Counter[str](), Counter[str]()
    for line in lines:
        tried[line.kernel] += 1
        noticed[line.kernel] += bool(line.noticed)
    return [
        f"{name}: {noticed[name]} of {count} noticed, floor: {floor_of(name, floors)[1]:.0%}"
        for name, count in sorted(tried.items())
        if count >= JUDGED and noticed[name] < floor_of(name, floors)[1] * count
    ]


def table(title: str, lines: Iterable[Line], open_ones: Sequence[Line], row: Callable[[Line], str]) -> str:
    """Return counts by a property of the records, with the share noticed of those that are not explained."""
    rows: dict[str, Counter[str]] = {}
    is_open = set(open_ones)
    for line in lines:
        verdict = "noticed" if line.noticed else "open" if line in is_open else "explained"
        rows.setdefault(row(line), Counter())[verdict] += 1
    verdicts = ("noticed", "explained", "open")
    text = [f"{title:48}" + "".join(f"{name:>11}" for name in verdicts) + "      share"]
    for name, counts in [*sorted(rows.items()), ("all", sum(rows.values(), Counter[str]()))]:
        matter = counts["noticed"] + counts["open"]
        share = f"{counts['noticed'] / matter:11.1%}" if matter else f"{'-':>11}"
        text.append(f"{name:48}" + "".join(f"{counts[verdict]:11}" for verdict in verdicts) + share)
    return "\n".join(text)
