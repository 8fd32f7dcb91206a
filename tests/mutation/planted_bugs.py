"""Bugs planted in the PTX of built kernels. Manifest, runtime and API are the real ones.

A bug counts as found if the answer is wrong, the simulator reports a finding, or the call fails, under any of the
schedules: each of the four, with as many seeds as it takes, up to SEEDS.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cute_mla.manifest import KernelEntry, Manifest
from cute_mla.runtime.library import FOLDER_VARIABLE, artifacts_folder
from cute_mla.spec.arch import Arch
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from cute_mla.testing.runner import Target, run_case, schedules

SEEDS = 6  # some missing waits show only when one role is slow at one moment


@dataclass(frozen=True)
class Workshop:
    """Breaks the kernel that serves a case, in copies of the artefacts.

    source: the artefacts as they were built. scratch: where the copies go.
    """

    arch: Arch
    source: Path
    scratch: Path
    monkeypatch: pytest.MonkeyPatch

    @staticmethod
    def open(arch: Arch, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
        """A workshop beside the artefacts in use."""
        return Workshop(arch, artifacts_folder(), scratch, monkeypatch)

    def _entry(self, case: DenseDecodeCase) -> tuple[Manifest, KernelEntry]:
        manifest = Manifest.load(self.source)
        return manifest, manifest.find(case.op, self.arch.name, case.problem(self.arch).config.name)

    def shipped_ptx(self, case: DenseDecodeCase) -> str:
        """The PTX of a case's kernel."""
        return (self.source / self._entry(case)[1].ptx).read_text()

    def install(self, case: DenseDecodeCase, ptx: str) -> None:
        """Makes a PTX text the kernel of a case."""
        manifest, entry = self._entry(case)
        digest = hashlib.sha256(ptx.encode()).hexdigest()
        folder = self.scratch / digest[:16]
        if not folder.exists():
            shutil.copytree(self.source, folder, copy_function=os.symlink)
        (folder / entry.ptx).unlink()
        (folder / entry.ptx).write_text(ptx)
        Manifest({**manifest.kernels, entry.name: replace(entry, ptx_sha256=digest)}).save(folder)
        self.monkeypatch.setenv(FOLDER_VARIABLE, str(folder))

    def places(self, case: DenseDecodeCase, pattern: str) -> list[re.Match[str]]:
        """Where a pattern occurs in the PTX of a case's kernel."""
        found = list(re.finditer(pattern, self.shipped_ptx(case)))
        assert found, f"{pattern!r} does not occur in the PTX: the planted bug is out of date"
        return found

    def is_found(self, case: DenseDecodeCase, replacement: str, broken: Iterable[re.Match[str]]) -> bool:
        """Breaks the kernel at these places, and says whether a case fails for it."""
        ptx = self.shipped_ptx(case)
        for place in sorted(broken, key=lambda place: -place.start()):
            ptx = ptx[: place.start()] + place.expand(replacement) + ptx[place.end() :]
        self.install(case, ptx)
        return any(not run_case(case, Target(self.arch.name, "sim", (schedule,)))[0].passed for schedule in schedules(4 * SEEDS, 0))

    def survivors(self, case: DenseDecodeCase, pattern: str, replacement: str) -> list[str]:
        """Breaks the kernel at each place of a pattern in turn, and returns those that nobody missed."""
        return [place[0] for place in self.places(case, pattern) if not self.is_found(case, replacement, [place])]

    def check_unbroken(self, case: DenseDecodeCase) -> None:
        """Asserts that a case passes with its kernel replaced by itself."""
        self.install(case, self.shipped_ptx(case) + "// as it was\n")
        for record in run_case(case, Target(self.arch.name, "sim", schedules(4, 0))):
            assert record.passed, record.reason
