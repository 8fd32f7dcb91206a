"""Choice of the device that a tensor's kernels run on."""

from __future__ import annotations

import threading
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_mla import workspace_size
from cute_mla.runtime.cuda_device import CudaDevice
from cute_mla.runtime.current import device_for, simulate
from cute_mla.runtime.errors import ArtifactError, DeviceError
from cute_mla.spec.arch import SM90, SM100
from tests.runtime.fake_driver import FakeDriver

CPU = torch.device("cpu")


def test_cuda_tensors_run_on_their_device(fake: FakeDriver) -> None:
    device = device_for(torch.device("cuda", 0))
    assert isinstance(device, CudaDevice)
    assert device.index == 0
    assert device_for(torch.device("cuda", 0)) is device
    assert device_for(torch.device("cuda", 1)) is not device


def test_a_device_that_failed_is_tried_again(fake: FakeDriver) -> None:
    fake.fail["cuInit"] = 999
    with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
        device_for(torch.device("cuda", 0))
    fake.fail.clear()
    assert device_for(torch.device("cuda", 0)).arch is SM90


@pytest.mark.parametrize("error", [AssertionError("Torch not compiled with CUDA enabled"), RuntimeError("No CUDA GPUs are available")])
def test_without_a_gpu_there_is_no_default_device(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def current_device() -> int:
        raise error

    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    for call in (lambda: device_for(torch.device("cuda")), lambda: workspace_size("dense_decode", batch=2, s_q=1, h_q=16)):
        with pytest.raises(DeviceError, match=f"there is no CUDA device: {error}; supported: a GPU, and the simulated device inside"):
            call()


def test_the_default_device_is_the_simulated_one_inside_simulate(artifacts: Path) -> None:
    shape: dict[str, Any] = {"batch": 3, "s_q": 2, "h_q": 16}
    for arch in ("sm90", "sm100"):
        for sm_count in (4, 132):
            with simulate(arch, sm_count):
                assert workspace_size("dense_decode", **shape) == workspace_size("dense_decode", **shape, device="cpu")
    with simulate("sm90", 4):
        few = workspace_size("dense_decode", **shape)
    with simulate("sm90", 132):
        assert workspace_size("dense_decode", **shape) > few


def test_the_default_device_is_torchs_current_one(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    device = device_for(torch.device("cuda"))
    assert device is device_for(torch.device("cuda", 1))
    assert workspace_size("dense_decode", batch=2, s_q=1, h_q=16) == workspace_size("dense_decode", batch=2, s_q=1, h_q=16, device=1)


def test_a_boards_name_is_answered_as_its_familys() -> None:
    with simulate("sm103") as device:
        assert device.arch is SM100
    with pytest.raises(ValueError, match="arch is 'sm80'; supported: sm90, sm100, sm120, sm103, sm121"), simulate("sm80"):
        pass


def test_simulate_has_the_usual_board_by_default(artifacts: Path) -> None:
    with simulate() as device:
        assert device_for(CPU) is device
        assert (device.arch, device.sm_count) == (SM90, 132)
    with simulate("sm100") as device:
        assert (device.arch, device.sm_count) == (SM100, 148)
    with simulate(SM90, sm_count=4) as device:
        assert device.sm_count == 4


def test_simulate_ends_with_its_block(artifacts: Path) -> None:
    def fail_inside() -> None:
        with simulate("sm90") as inner:
            assert device_for(CPU) is inner
            raise KeyError

    with simulate("sm90") as outer:
        with pytest.raises(KeyError):
            fail_inside()
        assert device_for(CPU) is outer
    with pytest.raises(ValueError, match="got CPU tensors"):
        device_for(CPU)


def test_simulate_is_local_to_its_context(artifacts: Path) -> None:
    seen: list[str] = []

    def look() -> None:
        try:
            seen.append(f"sm_count {device_for(CPU).sm_count}")
        except ValueError:
            seen.append("none")

    with simulate("sm90", sm_count=3):
        here = copy_context()
        for target in (look, lambda: here.run(look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == ["none", "sm_count 3"]


def test_simulate_without_artefacts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUTE_MLA_ARTIFACTS", str(tmp_path))
    with pytest.raises(ArtifactError, match=r"no manifest\.json in"), simulate("sm90"):
        pass
