"""Fixtures for tests of several folders."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings

from cute_mla.spec.arch import Arch
from cute_mla.spec.kernel_ops import ARCHS_OF
from cute_mla.testing.collector import collect_seldom
from tests.support.bench import Bench

# The same examples in every run: a test that fails on one machine fails on the others.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

torch.set_num_threads(1)  # threads of OpenMP would spin beside the other workers of the test run


@pytest.fixture(scope="session", params=ARCHS_OF["dense_prefill_backward"], ids=lambda arch: arch.name)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Return every architecture with all kernels of attention in turn."""
    found: Arch = request.param
    return found


@pytest.fixture
def bench(arch: Arch) -> Bench:
    """Return the simulated device of every architecture in turn."""
    return Bench(arch)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Give every second case of a test with the mark in_turn the mark slow: where the positions of its parameters add up to an odd number.

    So each case runs on one architecture, and the next one on the other.
    """
    for item in items:
        if item.get_closest_marker("in_turn") is not None and sum(item.callspec.indices.values()) % 2:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Take modules and tests out of the garbage collector's sight: they stay to the end, and a full collection would take a second."""
    gc.collect()
    collect_seldom()
