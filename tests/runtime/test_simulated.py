"""The simulated device runs the artefacts' PTX on the memory of CPU tensors, and says what is wrong."""

from __future__ import annotations

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

# target[i + shift] = source[i] + addend for i < count, one block of 32 threads
PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry shifted_sm90_copy_0(
    .param .u64 p_source, .param .u64 p_target, .param .s64 p_shift, .param .f32 p_addend, .param .u32 p_count
)
.reqntid 32, 1, 1
{
    .reg .pred %p; .reg .b32 %i; .reg .b32 %count; .reg .b64 %from; .reg .b64 %to; .reg .b64 %shift; .reg .b64 %offset;
    .reg .f32 %x; .reg .f32 %addend;
    ld.param.u64 %from, [p_source];
    ld.param.u64 %to, [p_target];
    ld.param.s64 %shift, [p_shift];
    ld.param.f32 %addend, [p_addend];
    ld.param.u32 %count, [p_count];
    griddepcontrol.wait;
    mov.u32 %i, %tid.x;
    setp.ge.u32 %p, %i, %count;
    @%p bra DONE;
    mul.wide.u32 %offset, %i, 4;
    add.s64 %from, %from, %offset;
    shl.b64 %shift, %shift, 2;
    add.s64 %to, %to, %offset;
    add.s64 %to, %to, %shift;
    ld.global.f32 %x, [%from];
    add.f32 %x, %x, %addend;
    st.global.f32 [%to], %x;
DONE:
    ret;
}
"""

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


def test_a_manifest_that_does_not_fit_the_ptx(kernel: KernelEntry) -> None:
    with simulate("sm90") as device, pytest.raises(ArtifactError, match=r"shifted_sm90_copy cannot be launched on grid \(1, 1, 1\): .*64"):
        device.launch(replace(kernel, block=(64, 1, 1)), (1, 1, 1), (torch.zeros(32), torch.zeros(32), 0, 0.0, 32))
