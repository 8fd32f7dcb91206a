"""Fixtures for tests of several folders."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings

from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.testing.collector import collect_seldom
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


def pytest_collection_finish() -> None:
    """Take modules and tests out of the garbage collector's sight: they stay to the end, and a full collection would take a second."""
    gc.collect()
    collect_seldom()
