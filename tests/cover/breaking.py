"""Tests run with a broken kernel: pytest in a process of its own, in which a mutant is launched instead of the kernel as it ships."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Generator, Sequence
from contextlib import redirect_stdout
from typing import Any
from unittest.mock import patch

import pytest

from cute_mla import simulator
from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.simulated_device import SimulatedDevice
from tests.mutation.bench import limited_time, prepare, processes
from tests.mutation.sites import Mutation
from tests.support.tree import ROOT

CPU_SECONDS = 20  # of a test: a broken kernel may run for ever


class BrokenKernel:
    """Plugin that replaces a kernel by a mutant for all tests of a run. failed: the first test that failed."""

    def __init__(self, kernel: KernelEntry, mutation: Mutation) -> None:
        self.name = kernel.name
        self.module = simulator.load_module(mutation.apply(load_artifacts().ptx(kernel)))
        self.failed: str | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Launch the mutant instead of its kernel, for a limited time."""
        shipped = SimulatedDevice._module

        def module(device: SimulatedDevice, kernel: KernelEntry) -> Any:
            return self.module if kernel.name == self.name else shipped(device, kernel)

        with patch.object(SimulatedDevice, "_module", module), limited_time(CPU_SECONDS):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the first failure."""
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def noticing(kernel: str, mutations: Sequence[Mutation], arguments: Collection[str]) -> list[str | None]:
    """Return for each mutation of a kernel the first test that fails with it, of those that pytest collects with these arguments."""
    with processes(1) as pool:  # which limits its memory, and ends runs at the first finding
        return pool.submit(_noticing, kernel, mutations, arguments).result()


def _noticing(kernel: str, mutations: Sequence[Mutation], arguments: Collection[str]) -> list[str | None]:
    prepare()
    os.chdir(ROOT)
    return [_first_failure(load_artifacts().manifest.kernels[kernel], mutation, arguments) for mutation in mutations]


def _first_failure(kernel: KernelEntry, mutation: Mutation, arguments: Collection[str]) -> str | None:
    """Run tests with a mutant; return the first that fails. RuntimeError if they do not run."""
    plugin, output = BrokenKernel(kernel, mutation), io.StringIO()
    with redirect_stdout(output):
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments], plugins=[plugin])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status}: {output.getvalue()[-2000:]}")
    return plugin.failed
