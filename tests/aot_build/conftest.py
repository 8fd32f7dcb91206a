"""One build of the test kernel, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_mla.aot_build.build import BuildReport, build_variants
from tests.aot_build.tma_copy import GOOD, NOT_RENAMED, SPILLING


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """Return a build of one kernel that passes and two that must not ship."""
    return build_variants((GOOD, SPILLING, NOT_RENAMED), 2, tmp_path_factory.mktemp("artifacts"))


@pytest.fixture(scope="session")
def ptx(report: BuildReport) -> str:
    """Return the good kernel's PTX."""
    return (report.folder / f"{GOOD.name}.ptx").read_text()


@pytest.fixture(scope="session")
def cubin(report: BuildReport) -> bytes:
    """Return the good kernel's cubin."""
    return (report.folder / f"{GOOD.name}.cubin").read_bytes()


@pytest.fixture
def folder(report: BuildReport, tmp_path: Path) -> Path:
    """Return a copy of the built folder, to be damaged."""
    for path in report.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path
