"""Reproducibility check of a wheel: rebuilds its kernels from the recorded commit, and compares every kernel and the wheel byte by byte.

    python -m cute_mla.aot_build.rebuild WHEEL [--kernel NAME].. [--jobs N]

Runs in a checkout that has the commit, with the tools that the wheel names.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cute_mla.manifest import KernelEntry, Manifest, ManifestError, Provenance

from .fingerprint import PACKAGE
from .tools import ToolError, tool_versions
from .wheel import TREE, git

_ARTIFACTS = f"{PACKAGE}/artifacts/"


@dataclass(frozen=True)
class Shipped:
    """Contents of a wheel. folder: its unpacked artefacts."""

    wheel: Path
    folder: Path
    manifest: Manifest
    provenance: Provenance


def unpack(wheel: Path, folder: Path) -> Shipped:
    """Unpack a wheel's artefacts. ToolError if the wheel has no provenance, ManifestError if its manifest or provenance is damaged."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(_ARTIFACTS)])
    artifacts = folder / _ARTIFACTS
    provenance = Provenance.load(artifacts)
    if provenance is None:
        raise ToolError(f"{wheel} has no provenance; `make wheel` makes a wheel with provenance")
    return Shipped(wheel, artifacts, Manifest.load(artifacts), provenance)


def rebuild(shipped: Shipped, kernels: Sequence[str], tree: Path, folder: Path, jobs: int | None = None) -> list[str]:
    """Return the differences between a wheel and a rebuild from its commit; an empty list if all bytes are equal.

    kernels: names to rebuild, all if empty; other kernels are taken from the wheel. tree: a checkout that has the commit.
    folder: an empty folder to work in. ToolError if the rebuild fails.
    """
    _check_tools(shipped, kernels)
    source, built, made = folder / "source", folder / "built", folder / "wheel"
    git(tree, "clone", "--quiet", "--no-checkout", "--shared", str(tree), str(source))
    git(source, "-c", "advice.detachedHead=false", "checkout", "--quiet", shipped.provenance.commit)
    chosen = [option for name in kernels for option in ("--kernel", name)]
    _python(source, "cute_mla.cli", "build", "--out", str(built), *chosen, *(("--jobs", str(jobs)) if jobs else ()))
    again = Manifest.load(built)
    names = list(kernels) or sorted(shipped.manifest.kernels)
    differences = [text for name in names for text in _differences(shipped, again.kernels.get(name), built)]
    if differences:
        return differences
    for entry in shipped.manifest.kernels.values():
        if entry.name not in again.kernels:
            for name in (entry.cubin, entry.ptx):
                (built / name).write_bytes((shipped.folder / name).read_bytes())
    Manifest({**shipped.manifest.kernels, **again.kernels}).save(built)
    _python(source, "cute_mla.aot_build.wheel", "--artifacts", str(built), "--out", str(made))
    (wheel,) = made.glob("*.whl")
    return [] if wheel.read_bytes() == shipped.wheel.read_bytes() else _wheel_differences(shipped.wheel, wheel)


def _check_tools(shipped: Shipped, kernels: Sequence[str]) -> None:
    """Raise ToolError if no rebuild here could give the same bytes: local changes, an unknown kernel, or other tool versions."""
    if not shipped.provenance.clean:
        raise ToolError(f"{shipped.wheel} is of {shipped.provenance.source}, which no checkout has")
    for name in kernels or shipped.manifest.kernels:
        entry = shipped.manifest.kernels.get(name)
        if entry is None:
            raise ToolError(f"{shipped.wheel} has no kernel {name}")
        for tool, here in tool_versions().items():
            if entry.tools.get(tool) != here:
                raise ToolError(f"{name} was built with {tool} {entry.tools.get(tool)}; here is {here}")


def _differences(shipped: Shipped, again: KernelEntry | None, built: Path) -> list[str]:
    """Return the differences between a rebuilt kernel and the wheel's: in its files, and in its manifest entry."""
    if again is None:
        return ["a kernel was not rebuilt"]
    entry = shipped.manifest.kernels[again.name]
    found = [name for name in (entry.cubin, entry.ptx) if (shipped.folder / name).read_bytes() != (built / name).read_bytes()]
    fields = [field for field in entry.__dataclass_fields__ if getattr(entry, field) != getattr(again, field)]
    return [*(f"{name} differs" for name in found), *(f"{again.name}: {field} differs in the manifest" for field in fields)]


def _wheel_differences(shipped: Path, again: Path) -> list[str]:
    """Return the members in which two wheels differ, or that they differ only in their packing."""
    with zipfile.ZipFile(shipped) as one, zipfile.ZipFile(again) as other:
        names = {*one.namelist(), *other.namelist()}
        common = {*one.namelist()} & {*other.namelist()}
        differing = sorted(name for name in names if name not in common or one.read(name) != other.read(name))
    return [f"{name} differs in the wheel" for name in differing] or ["the wheels differ in how their files are packed"]


def _python(source: Path, module: str, *arguments: str) -> None:
    """Run a module of the checkout: the current folder precedes installed packages on Python's path."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=source, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(command)} failed with exit code {done.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if all bytes are equal, else 1."""
    parser = argparse.ArgumentParser(description="Rebuild a wheel's kernels from its commit and compare all bytes.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--kernel", action="append", default=[], help="rebuild only this kernel; may be repeated")
    parser.add_argument("--jobs", type=int, help="kernels compiled at a time; default: one per CPU")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            shipped = unpack(options.wheel, Path(folder) / "shipped")
            differences = rebuild(shipped, options.kernel, TREE, Path(folder) / "again", options.jobs)
    except (ToolError, ManifestError, OSError, zipfile.BadZipFile) as error:
        print(error, file=sys.stderr)
        return 1
    for difference in differences:
        print(difference)
    if differences:
        return 1
    number, total = len(options.kernel) or len(shipped.manifest.kernels), len(shipped.manifest.kernels)
    print(f"{number} of {total} kernels rebuilt from {shipped.provenance.source}: all bytes are equal, and so are those of the wheel")
    return 0


if __name__ == "__main__":
    sys.exit(main())
