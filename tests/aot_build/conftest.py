"""One build of the test kernel and one clone of the tree, shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_mla.aot_build.build import BuildReport, build_variants
from cute_mla.aot_build.wheel import git, stage
from tests.aot_build.tma_copy import GOOD, NOT_RENAMED, SPILLING
from tests.support.tree import ROOT

IDENTITY = ("-c", "user.name=n", "-c", "user.email=e@x")


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


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of this tree in which everything is committed."""
    tree = tmp_path_factory.mktemp("checkout") / "tree"
    stage(ROOT, tree)
    for command in (("init", "--quiet"), ("add", "--all"), (*IDENTITY, "commit", "--quiet", "--message", "all")):
        git(tree, *command)
    return tree
