"""Kernels that the simulated device runs: their names or their ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import cute_mla
from cute_mla.manifest import KernelEntry
from cute_mla.runtime.simulated_device import SimulatedDevice
from cute_mla.spec.arch import Arch


def _name(kernel: KernelEntry, arch: Arch) -> str:
    """Return the name of a kernel without its architecture."""
    return kernel.name.replace(f"_{arch.name}", "")


def _op(kernel: KernelEntry, arch: Arch) -> str:
    """Return the op of a kernel."""
    return kernel.op


def record_launches(monkeypatch: pytest.MonkeyPatch, entry: Callable[[KernelEntry, Arch], str] = _name) -> list[str]:
    """Return a list that grows by the entry of each kernel that runs, in order; by default its name without its architecture."""
    entries: list[str] = []
    launch: Callable[..., Any] = SimulatedDevice.launch

    def record(self: SimulatedDevice, kernel: KernelEntry, *arguments: Any, **options: Any) -> Any:
        entries.append(entry(kernel, self.arch))
        return launch(self, kernel, *arguments, **options)

    monkeypatch.setattr(SimulatedDevice, "launch", record)
    return entries


@contextmanager
def launched_ops(arch: Arch, sm_count: int = 6) -> Iterator[list[str]]:
    """Run CPU calls on the simulated device and yield the ops of its launches, in order. Findings fail the test."""
    with pytest.MonkeyPatch.context() as monkeypatch, cute_mla.simulate(arch, sm_count) as device:
        yield record_launches(monkeypatch, _op)
    assert device.findings == []
