"""The static figures that the kernels had when somebody last looked at them: what a change does to them is seen, not overlooked.

    python -m cute_mla.profiles.recorded      records those of the kernels that are built

The file has a line a kernel. A test compares it with the kernels as built: any difference fails, and is either a regression or
recorded with the change that made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..manifest import KernelEntry
from .static_report import kernel_report

FILE = Path(__file__).resolve().parent / "recorded.json"

Figures = dict[str, Any]  # of a kernel, by name: numbers, and the mix as numbers by class


def figures(entry: KernelEntry) -> Figures:
    """What is recorded of a kernel."""
    report = kernel_report(entry)
    return {
        "registers": report.registers,
        "stack": report.stack_bytes,
        "smem": report.smem_bytes,
        "SASS": sum(report.instructions.values()),
        **report.mix,
    }


def differences(recorded: Mapping[str, Figures], built: Mapping[str, Figures]) -> Iterator[str]:
    """A line for every kernel that is not as recorded: each figure that differs, before and after."""
    for name in sorted(recorded.keys() | built.keys()):
        before, after = recorded.get(name), built.get(name)
        if before is None or after is None:
            yield f"{name}: {'not recorded' if before is None else 'recorded, but no longer built'}"
        elif before != after:
            changed = (key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key))
            yield f"{name}: " + ", ".join(f"{key} {before.get(key)} -> {after.get(key)}" for key in changed)


def read() -> dict[str, Figures]:
    """All that is recorded, by kernel."""
    recorded: dict[str, Figures] = json.loads(FILE.read_text(encoding="utf-8"))
    return recorded


def write(built: Mapping[str, Figures]) -> None:
    """Records figures instead of what was recorded before."""
    write_lines(FILE, built)


def write_lines(file: Path, by_kernel: Mapping[str, object]) -> None:
    """JSON with a line for each kernel, by name, so that a diff shows which have changed."""
    lines = (f" {json.dumps(name)}: {json.dumps(by_kernel[name])}" for name in sorted(by_kernel))
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main() -> None:
    """Records the kernels that are built, and says what has changed."""
    from ..runtime.artifacts import load_artifacts

    built = {name: figures(entry) for name, entry in load_artifacts().manifest.kernels.items()}
    for line in differences(read() if FILE.exists() else {}, built):
        print(line)
    write(built)


if __name__ == "__main__":
    main()
