"""The simulated device runs the artefacts' PTX on the memory of CPU tensors, and says what is wrong."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_mla.manifest import KernelEntry
from cute_mla.runtime import artifacts, simulated_device
from cute_mla.runtime.arguments import Span
from cute_mla.runtime.current import simulate
from cute_mla.runtime.errors import ArtifactError
from cute_mla.simulator import Module, SimulationError, load_module
from cute_mla.spec.abi import Param
from tests.runtime.fake_artifacts import entry, fake_cubin, write_artifacts
from tests.support.params import float32s, int32s, int64s, pointers
from tests.support.shifted_copy import PTX

PARAMS: tuple[Param, ...] = (*pointers("source", "target"), *int64s("shift"), *float32s("addend"), *int32s("count"))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelEntry:
    """Return the kernel, as the only one in the folder of artefacts."""
    kernel = entry("shifted", "copy", PARAMS, fake_cubin(), PTX, block=(32, 1, 1), smem_bytes=0)
    write_artifacts(tmp_path, entries=[kernel], ptx=PTX)
    monkeypatch.setenv(artifacts.FOLDER_VARIABLE, str(tmp_path))
    return kernel


def test_runs_on_the_memory_of_the_tensors(kernel: KernelEntry) -> None:
    source, target = torch.arange(32.0), torch.zeros(40)
    with simulate("sm90") as device:
        assert device.kernel("shifted", "copy") == kernel
        device.launch(kernel, (1, 1, 1), (source, target, 3, 0.5, 20), stream=5, pdl=True)
    assert torch.equal(target[3:23], torch.arange(20.0) + 0.5)
    assert target[:3].abs().max() == target[23:].abs().max() == 0
    assert (device.launches, device.findings) == (1, [])
    assert device.instructions > 10
    assert device.seconds > 0


@pytest.mark.parametrize("pdl", [True, False])
def test_only_a_launch_that_overlaps_the_one_before_needs_the_wait_for_it(
    kernel: KernelEntry, monkeypatch: pytest.MonkeyPatch, pdl: bool
) -> None:
    module = load_module(PTX.replace("griddepcontrol.wait;", ""))
    monkeypatch.setattr(simulated_device.SimulatedDevice, "_module", lambda self, entry: module)
    with simulate("sm90", on_finding="collect") as device:
        device.launch(kernel, (1, 1, 1), (torch.arange(32.0), torch.zeros(40), 3, 0.5, 20), pdl=pdl)
    assert {finding.kind for finding in device.findings} == ({"missing_wait"} if pdl else set())


def test_a_finding_is_raised_with_kernel_and_schedule(kernel: KernelEntry) -> None:
    with (
        simulate("sm90", schedule="random", seed=7) as device,
        pytest.raises(
            SimulationError, match=r"shifted_sm90_copy on grid \(1, 1, 1\), schedule random, seed 7:\nout_of_bounds: .*target"
        ) as caught,
    ):
        device.launch(kernel, (1, 1, 1), (torch.zeros(32), torch.zeros(32), 1, 0.0, 32))
    assert caught.value.findings == tuple(device.findings)
    assert len(device.findings) > 0


def test_findings_are_collected(kernel: KernelEntry) -> None:
    with simulate("sm90", on_finding="collect") as device:
        device.launch(kernel, (1, 1, 1), (torch.zeros(32), torch.zeros(32), 1, 0.0, 32))
        device.launch(kernel, (1, 1, 1), (torch.zeros(31), torch.zeros(32), 0, 0.0, 32))
    assert [finding.kind for finding in device.findings] == ["out_of_bounds", "out_of_bounds"]
    assert device.launches == 2


def test_spans_bound_what_a_pointer_may_reach(kernel: KernelEntry) -> None:
    memory = torch.zeros(64)
    with simulate("sm90", on_finding="collect") as device:
        device.launch(kernel, (1, 1, 1), (Span(memory, 0, 128), Span(memory, 128, 128), 0, 1.0, 32))
        assert device.findings == []
        assert memory.tolist() == [0.0] * 32 + [1.0] * 32
        device.launch(kernel, (1, 1, 1), (Span(memory, 0, 128), Span(memory, 128, 124), 0, 1.0, 32))
    assert [finding.kind for finding in device.findings] == ["out_of_bounds"]


def test_reading_what_no_launch_has_written(kernel: KernelEntry) -> None:
    first, second, third = torch.ones(32), torch.zeros(32), torch.zeros(32)
    with simulate("sm90", on_finding="collect") as device:
        device.mark_uninitialized(second)
        device.launch(kernel, (1, 1, 1), (first, second, 0, 1.0, 31))
        device.launch(kernel, (1, 1, 1), (second, third, 0, 1.0, 31))
        assert device.findings == []
        assert third[:31].tolist() == [3.0] * 31
        device.launch(kernel, (1, 1, 1), (second, third, 0, 1.0, 32))
    assert {finding.kind for finding in device.findings} == {"poison"}


def test_a_module_is_read_once(kernel: KernelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(simulated_device, "_modules", {})

    def recorded(ptx: str) -> Module:
        read.append(ptx)
        return load_module(ptx)

    monkeypatch.setattr(simulated_device.simulator, "load_module", recorded)
    for _ in range(2):
        with simulate("sm90") as device:
            device.launch(kernel, (1, 1, 1), (torch.zeros(32), torch.zeros(32), 0, 0.0, 32))
    assert len(read) == 1


def test_few_modules_are_kept(kernel: KernelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Any] = {f"other {i}": None for i in range(simulated_device.MAX_CACHED_MODULES)}
    monkeypatch.setattr(simulated_device, "_modules", kept)
    for _ in range(2):
        with simulate("sm90") as device:
            device.launch(kernel, (1, 1, 1), (torch.zeros(32), torch.zeros(32), 0, 0.0, 32))
    assert list(kept) == [*(f"other {i}" for i in range(1, simulated_device.MAX_CACHED_MODULES)), kernel.ptx_sha256]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_does_not_wait_for_a_thread_that_it_does_not_have(kernel: KernelEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork while another thread loads a kernel; the child loads the kernel itself."""
    monkeypatch.setattr(simulated_device, "_modules", {})
    loading, loaded, parent = threading.Event(), threading.Event(), os.getpid()

    def slow(ptx: str) -> Module:
        if os.getpid() == parent:
            loading.set()
            loaded.wait(60)
        return load_module(ptx)

    def launch() -> None:
        with simulate("sm90") as device:
            device.launch(kernel, (1, 1, 1), (torch.zeros(32), torch.zeros(32), 0, 0.0, 32))

    monkeypatch.setattr(simulated_device.simulator, "load_module", slow)
    other = threading.Thread(target=launch)
    other.start()
    try:
        assert loading.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits
            status = 1
            try:
                launch()
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
    finally:
        loaded.set()
        other.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_tensor_without_memory_is_a_finding(kernel: KernelEntry) -> None:
    lost, whole = torch.zeros(32), torch.zeros(32)
    lost.untyped_storage().resize_(0)
    shrunk = torch.zeros(32)
    shrunk.untyped_storage().resize_(64)
    with simulate("sm90", on_finding="collect") as device:
        device.launch(kernel, (1, 1, 1), (lost, whole, 0, 0.0, 32))
        device.launch(kernel, (1, 1, 1), (whole, Span(lost, 8, 64), 0, 0.0, 32))
        device.launch(kernel, (1, 1, 1), (whole, shrunk, 0, 0.0, 32))
    assert [(finding.kind, finding.message) for finding in device.findings] == [
        ("null_address", "source is 128 bytes at address 0x0, which has no memory"),
        ("null_address", "target is 64 bytes at address 0x8, which has no memory"),
        ("out_of_bounds", "target has a storage of 64 bytes where its elements need 128"),
    ]
    with simulate("sm90") as device, pytest.raises(SimulationError, match="null_address: source is 128 bytes at address 0x0"):
        device.launch(kernel, (1, 1, 1), (lost, whole, 0, 0.0, 32))


def test_a_manifest_that_does_not_fit_the_ptx(kernel: KernelEntry) -> None:
    with simulate("sm90") as device, pytest.raises(ArtifactError, match=r"shifted_sm90_copy cannot be launched on grid \(1, 1, 1\): .*64"):
        device.launch(replace(kernel, block=(64, 1, 1)), (1, 1, 1), (torch.zeros(32), torch.zeros(32), 0, 0.0, 32))
