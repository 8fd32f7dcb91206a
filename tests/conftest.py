"""Fixtures for tests of several folders."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.testing.collector import collect_seldom
from tests.cover import tiers
from tests.support.bench import Bench

# The same examples in every run: a test that fails on one machine fails on the others.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # threads of OpenMP would spin beside the other workers of the test run


@pytest.fixture(scope="session", params=ARCHS.values(), ids=lambda arch: arch.name)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Return every architecture in turn."""
    found: Arch = request.param
    return found


@pytest.fixture
def bench(arch: Arch) -> Bench:
    """Return the simulated device of every architecture in turn."""
    return Bench(arch)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of tests/cover."""
    group = parser.getgroup("cover", "cover of the kernels (tests/cover)")
    group.addoption("--record-cover", metavar="FOLDER", help="Record CPU seconds and what each test reaches in the kernels.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder if it is asked for."""
    folder = config.getoption("--record-cover")
    if folder is not None:
        from tests.cover.recording import CoverRecorder  # the simulator and the suites take a second to import

        config.pluginmanager.register(CoverRecorder(Path(folder)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that only `make test-full` runs."""
    for item in items:
        if item.nodeid in tiers.moved():
            item.add_marker(pytest.mark.slow(cover=True))


def pytest_collection_finish() -> None:
    """Take modules and tests out of the garbage collector's sight: they stay to the end, and a full collection would take a second."""
    gc.collect()
    collect_seldom()
