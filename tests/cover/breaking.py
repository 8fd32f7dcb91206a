"""Tests run with a broken kernel: a pytest plugin that launches a mutant wherever the runtime would launch the kernel as it ships."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from cute_mla import simulator
from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.simulated_device import SimulatedDevice
from tests.mutation import numeric, sites
from tests.mutation.sites import Mutation
from tests.support.tree import ROOT

SECONDS = 600  # of a run: a broken kernel may run for ever
FAILED = 1  # exit status of pytest


@dataclass(frozen=True)
class Mutant:
    """A kernel with one broken site. number: among the sites of its kind."""

    kernel: str
    kind: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Mutant:
        """Return the mutant of a text that str() wrote."""
        kernel, kind, number = text.split(":")
        return cls(kernel, kind, int(number))

    def __str__(self) -> str:
        return f"{self.kernel}:{self.kind}:{self.number}"

    @property
    def mutation(self) -> Mutation:
        """Return the broken site. StopIteration if the kernel no longer has it."""
        ptx = load_artifacts().ptx(load_artifacts().manifest.kernels[self.kernel])
        found = (*sites.find(ptx), *numeric.find(ptx))
        return next(item for item in found if (item.kind, item.number) == (self.kind, self.number))


class BrokenKernel:
    """Plugin that replaces a kernel by a mutant for all tests of a run."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = mutant.kernel
        entry = load_artifacts().manifest.kernels[mutant.kernel]
        self.module = simulator.load_module(mutant.mutation.apply(load_artifacts().ptx(entry)))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self) -> Generator[None, object, object]:
        """Launch the mutant instead of its kernel."""
        shipped = SimulatedDevice._module

        def module(device: SimulatedDevice, kernel: KernelEntry) -> Any:
            return self.module if kernel.name == self.name else shipped(device, kernel)

        with patch.object(SimulatedDevice, "_module", module):
            return (yield)


def notice(mutant: Mutant, tests: Collection[str]) -> bool:
    """Run tests with a mutant in a process of their own; return whether one fails, hangs or ends the process."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--broken-kernel", str(mutant), *tests]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return True
    if result.returncode > FAILED:
        raise RuntimeError(f"pytest ended with {result.returncode}: {result.stdout.decode()[-2000:]}{result.stderr.decode()[-2000:]}")
    return result.returncode == FAILED
