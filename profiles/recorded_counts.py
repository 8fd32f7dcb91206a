"""What kernels execute per block of keys, as somebody last counted it on the simulated device: the model needs it at once.

    python -m cute_mla.profiles.recorded_counts [KERNEL...]      counts again what is built, or the named kernels, and says what changed

The file has a line a kernel, of the variants that benchmark rows run. A test counts some of them again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..manifest import KernelEntry
from .recorded import write_lines

FILE = Path(__file__).resolve().parent / "recorded_counts.json"
COUNTED_DTYPE = "bf16"


@dataclass(frozen=True)
class RoleCounts:
    """Of one role: the warps that have it, its PTX warp instructions per 64 keys of 64 rows by class, and its fixed part."""

    first_warp: int
    warps: int
    slope: dict[str, float]
    fixed: float

    def of(self, *classes: str) -> float:
        """Per 64 keys of 64 rows, of some classes."""
        return sum(self.slope.get(name, 0.0) for name in classes)

    @property
    def total(self) -> float:
        """Per 64 keys of 64 rows, of all classes."""
        return sum(self.slope.values())


Counts = Mapping[str, RoleCounts]  # by role


def counted(entry: KernelEntry) -> Counts | None:
    """Counts a built kernel now; None of one that does not walk over keys."""
    from .dynamic_counts import dynamic_counts

    counts = dynamic_counts(entry)
    if counts is None:
        return None
    places = {role.name: (role.first_warp, role.warps) for role in entry.roles}
    recorded = {}
    for role, classes in sorted(counts.slope.items()):
        slope = {name: _rounded(number) for name, number in sorted(classes.items())}
        recorded[role] = RoleCounts(*places.get(role, (0, 1)), slope, _rounded(counts.fixed[role]))
    return recorded


def is_recorded(entry: KernelEntry) -> bool:
    """Whether the file is to have this kernel: one that benchmark rows run."""
    return entry.config.get("dtype") == COUNTED_DTYPE and not entry.name.endswith("_elements")


def _rounded(number: float) -> float:
    return round(number, 2)


def differences(recorded: Mapping[str, Counts], now: Mapping[str, Counts]) -> Iterator[str]:
    """A line for every kernel that is not as recorded: what differs, before and after."""
    for name in sorted(recorded.keys() | now.keys()):
        before, after = recorded.get(name), now.get(name)
        if before is None or after is None:
            yield f"{name}: {'not recorded' if before is None else 'recorded, but not counted any more'}"
        elif before != after:
            old, new = _figures(before), _figures(after)
            keys = (key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key))
            yield f"{name}: " + ", ".join(f"{key} {old.get(key, 0):g} -> {new.get(key, 0):g}" for key in keys)


def _figures(counts: Counts) -> dict[str, float]:
    figures = {f"{role} {name}": number for role, of_role in counts.items() for name, number in of_role.slope.items()}
    figures.update({f"{role} fixed": of_role.fixed for role, of_role in counts.items()})
    return figures | {f"{role} warps": of_role.warps for role, of_role in counts.items()}


def read() -> dict[str, Counts]:
    """All that is recorded, by kernel."""
    recorded = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: {role: RoleCounts(**of_role) for role, of_role in roles.items()} for name, roles in recorded.items()}


def write(counts: Mapping[str, Counts]) -> None:
    """Records counts instead of what was recorded before."""
    write_lines(FILE, {name: {role: asdict(of_role) for role, of_role in roles.items()} for name, roles in counts.items()})


def main(names: Sequence[str]) -> None:
    """Records the kernels that are built, or some of them, and says what has changed."""
    from ..runtime.artifacts import load_artifacts

    kernels = load_artifacts().manifest.kernels
    chosen = [kernels[name] for name in names] if names else [entry for entry in kernels.values() if is_recorded(entry)]
    fresh = {entry.name: counts for entry in chosen if (counts := counted(entry)) is not None}
    before = read() if FILE.exists() else {}
    after = {**before, **fresh} if names else fresh
    for line in differences(before, after):
        print(line)
    write(after)


if __name__ == "__main__":
    main(sys.argv[1:])
