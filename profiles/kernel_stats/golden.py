"""Golden static figures of the kernels: registers, stack, shared memory and SASS mix of each, one line a kernel in golden.json.

    python -m cute_mla.profiles.kernel_stats.golden      writes the figures of the kernels that are built

A test compares the file with the built kernels. A difference is either a regression, or committed with the change that caused it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cute_mla.manifest import KernelEntry

from .static_report import static_figures

FILE = Path(__file__).resolve().parent / "golden.json"

Figures = dict[str, Any]  # one kernel's figures by name; the instruction mix contributes one number a class


def figures(entry: KernelEntry) -> Figures:
    """Return the figures of a kernel that the golden file holds."""
    report = static_figures(entry)
    return {
        "registers": report.registers,
        "stack": report.stack_bytes,
        "smem": report.smem_bytes,
        "SASS": sum(report.instructions.values()),
        **report.mix,
    }


def differences(golden: Mapping[str, Figures], found: Mapping[str, Figures]) -> Iterator[str]:
    """Yield a line for every kernel whose figures differ from the golden ones: each changed figure, before and after."""
    for name in sorted(golden.keys() | found.keys()):
        before, after = golden.get(name), found.get(name)
        if before is None or after is None:
            yield f"{name}: {'not recorded' if before is None else 'recorded, but no longer built'}"
        elif before != after:
            changed = (key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key))
            yield f"{name}: " + ", ".join(f"{key} {before.get(key)} -> {after.get(key)}" for key in changed)


def read() -> dict[str, Figures]:
    """Return the golden figures by kernel."""
    golden: dict[str, Figures] = json.loads(FILE.read_text(encoding="utf-8"))
    return golden


def write(built: Mapping[str, Figures]) -> None:
    """Replace the golden file by these figures."""
    write_lines(FILE, built)


def write_lines(file: Path, by_kernel: Mapping[str, object]) -> None:
    """Write JSON with one line a kernel, sorted by name, so that a diff shows which kernels changed."""
    lines = (f" {json.dumps(name)}: {json.dumps(by_kernel[name])}" for name in sorted(by_kernel))
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Write the figures of the built kernels, and print what changed."""
    from cute_mla.runtime.artifacts import load_artifacts

    built = {name: figures(entry) for name, entry in load_artifacts().manifest.kernels.items()}
    for line in differences(read() if FILE.exists() else {}, built):
        print(line)
    write(built)


if __name__ == "__main__":
    main()
