"""Golden instruction counts: what kernels execute per block of keys, counted on the simulated device. The model reads them.

    python -m cute_mla.profiles.kernel_stats.golden_counts [KERNEL...]      counts all built kernels, or the named ones, again

golden_counts.json has one line a kernel, for the variants that benchmark rows run. A test counts some of them again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...manifest import KernelEntry
from . import golden

FILE = Path(__file__).resolve().parent / "golden_counts.json"
COUNTED_DTYPE = "bf16"
COUNTED_OPS = ("mqa_logits",)  # whose kernels have no 16-bit operands


@dataclass(frozen=True)
class RoleCounts:
    """Warps and PTX warp instructions of one role.

    slope: instructions per 64 keys of 64 query rows, by class. fixed: the instructions that do not depend on the number of keys.
    """

    first_warp: int
    warps: int
    slope: dict[str, float]
    fixed: float

    def of(self, *classes: str) -> float:
        """Return the instructions of some classes per 64 keys of 64 rows."""
        return sum(self.slope.get(name, 0.0) for name in classes)

    @property
    def total(self) -> float:
        """Instructions of all classes per 64 keys of 64 rows."""
        return sum(self.slope.values())


Counts = Mapping[str, RoleCounts]  # by role


def counted(entry: KernelEntry) -> Counts | None:
    """Run a built kernel on the simulated device and return its counts; None for a kernel without a loop over keys."""
    from .dynamic_counts import dynamic_counts

    counts = dynamic_counts(entry)
    if counts is None:
        return None
    warps = {role.name: (role.first_warp, role.warps) for role in entry.roles}
    by_role = {}
    for role, classes in sorted(counts.slope.items()):
        slope = {name: _rounded(number) for name, number in sorted(classes.items())}
        by_role[role] = RoleCounts(*warps.get(role, (0, 1)), slope, _rounded(counts.fixed[role]))
    return by_role


def has_golden_counts(entry: KernelEntry) -> bool:
    """Return whether the golden file must have this kernel, which benchmark rows run."""
    return entry.op in COUNTED_OPS or (entry.config.get("dtype") == COUNTED_DTYPE and not entry.name.endswith("_elements"))


def _rounded(number: float) -> float:
    return round(number, 2)


def differences(before: Mapping[str, Counts], after: Mapping[str, Counts]) -> Iterator[str]:
    """Yield a line for every kernel whose counts differ: each changed count, before and after."""
    flat = ({name: _figures(counts) for name, counts in kernels.items()} for kernels in (before, after))
    return golden.differences(*flat, gone="not counted any more", text=lambda number: f"{number or 0:g}")


def _figures(counts: Counts) -> dict[str, float]:
    """Return one number by "ROLE CLASS", "ROLE fixed" and "ROLE warps"."""
    figures = {f"{role} {name}": number for role, of_role in counts.items() for name, number in of_role.slope.items()}
    figures.update({f"{role} fixed": of_role.fixed for role, of_role in counts.items()})
    return figures | {f"{role} warps": of_role.warps for role, of_role in counts.items()}


def read() -> dict[str, Counts]:
    """Return the golden counts by kernel."""
    by_kernel = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: {role: RoleCounts(**of_role) for role, of_role in roles.items()} for name, roles in by_kernel.items()}


def write(counts: Mapping[str, Counts]) -> None:
    """Replace the golden file by these counts."""
    golden.write_lines(FILE, {name: {role: asdict(of_role) for role, of_role in roles.items()} for name, roles in counts.items()})


def main(names: Sequence[str]) -> None:
    """Count the built kernels, or the named ones, on the simulated device; write the counts and print what changed."""
    from ...runtime.artifacts import load_artifacts

    kernels = load_artifacts().manifest.kernels
    chosen = [kernels[name] for name in names] if names else [entry for entry in kernels.values() if has_golden_counts(entry)]
    fresh = {entry.name: counts for entry in chosen if (counts := counted(entry)) is not None}
    before = read() if FILE.exists() else {}
    after = {**before, **fresh} if names else fresh
    for line in differences(before, after):
        print(line)
    write(after)


if __name__ == "__main__":
    main(sys.argv[1:])
