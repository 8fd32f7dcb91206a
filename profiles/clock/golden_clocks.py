"""Golden clocks: predicted clocks of a block of keys of every attention kernel, by the clock, one line a kernel in golden_clocks.json.

    python -m cute_mla.profiles.clock.golden_clocks [KERNEL...]      times all built kernels, or the named ones, again

A block is the keys of a tile of the main loop. Constants are the nominal ones of the GPU in GPU_OF. Keys of decodes come at the latency
of HBM, those of prefills from L2, and neither at a limited rate, which would hide the kernel behind memory. `make test` compares a kernel
of each structure, `make test-full` all of them; a change of more than LIMIT is a difference.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cute_mla.manifest import KernelEntry

from ..kernel_stats import golden
from ..kernel_stats.dynamic_counts import case_of
from .constants import constants
from .engine import Setting
from .kernel_times import is_cold, kernel_times

FILE = Path(__file__).resolve().parent / "golden_clocks.json"
GPU_OF = {constants(gpu).arch: gpu for gpu in ("H200", "B200", "RTX PRO 6000")}  # by architecture
LIMIT = 0.02  # relative change of the clocks of a block

Clocks = Mapping[str, float]  # "block" and "fixed"


def clocks(entry: KernelEntry) -> dict[str, float] | None:
    """Time a built kernel; None for a kernel without a loop over keys, or an architecture that the clock does not cover."""
    if entry.arch not in GPU_OF or case_of(entry) is None:
        return None
    values = constants(GPU_OF[entry.arch])
    times = kernel_times(entry, values, Setting(float(values.l2_bytes), cold=is_cold(entry)))
    return {"block": round(times.block, 1), "fixed": round(times.fixed, 1)}


def differences(before: Mapping[str, Clocks], after: Mapping[str, Clocks]) -> Iterator[str]:
    """Yield a line for every kernel that only one side has, or whose clocks of a block have changed by more than LIMIT."""
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            yield f"{name}: {'not recorded' if name not in before else 'recorded, but not timed any more'}"
            continue
        old, new = before[name]["block"], after[name]["block"]
        if abs(new / old - 1) > LIMIT:
            yield f"{name}: {old:,.0f} -> {new:,.0f} clocks a block ({100 * (new / old - 1):+.1f} %)"


def read() -> dict[str, dict[str, float]]:
    """Return the golden clocks by kernel."""
    found: dict[str, dict[str, float]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def main(names: Sequence[str]) -> None:
    """Time the built kernels, or the named ones; write their clocks and print what changed."""
    from cute_mla.runtime.artifacts import load_artifacts

    kernels = load_artifacts().manifest.kernels
    fresh: dict[str, dict[str, float]] = {}
    for entry in [kernels[name] for name in names] if names else kernels.values():
        found = clocks(entry)
        if found is not None:
            fresh[entry.name] = found
            print(f"{entry.name}: {found['block']:,.0f} clocks a block", file=sys.stderr, flush=True)
    before = read() if FILE.exists() else {}
    after = {**before, **fresh} if names else fresh
    for line in differences(before, after):
        print(line)
    golden.write_lines(FILE, after)


if __name__ == "__main__":
    main(sys.argv[1:])
