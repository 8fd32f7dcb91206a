"""A folder of artefacts that holds only the kernels that `make quick` builds."""

from __future__ import annotations

from pathlib import Path

from cute_mla.manifest import Manifest
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import ARCHS
from cute_mla.testing.suite import OPS, suite_kernels


def link_quick_kernels(folder: Path) -> None:
    """Link the files of these kernels from the folder of all, and write their manifest."""
    built = load_artifacts()
    names = {name for arch in ARCHS.values() for op in OPS for name in suite_kernels("quick", op, arch)}
    kernels = {name: entry for name, entry in built.manifest.kernels.items() if name in names}
    for entry in kernels.values():
        for file in (entry.cubin, entry.ptx):
            (folder / file).symlink_to(built.folder / file)
    Manifest(kernels).save(folder)
