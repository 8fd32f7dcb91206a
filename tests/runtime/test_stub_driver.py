"""The whole launch path, through the real cuda.bindings or ctypes, down to a libcuda of our own: needs a C compiler, not a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cute_mla.profiles import host_cost
from cute_mla.spec.abi import ParamKind
from tests.runtime.decode_arguments import COUNTS
from tests.runtime.fake_artifacts import fake_cubin
from tests.support.tree import ROOT

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) to build the stub libcuda with"),
    pytest.mark.skipif(sys.platform != "linux", reason="the stub libcuda is a Linux library"),
]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the stub as libcuda.so.1."""
    folder = tmp_path_factory.mktemp("stub")
    host_cost.build_stub_driver(folder)
    return folder


def run_session(stub: Path, artifacts: Path, *arguments: int | str) -> subprocess.CompletedProcess[str]:
    """Run stub_session.py."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(stub), "PYTHONPATH": str(ROOT), "CUTE_MLA_ARTIFACTS": str(artifacts)}
    command = [sys.executable, str(HERE / "stub_session.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)


@pytest.mark.parametrize("binding", ["cuda.bindings", "ctypes"])
@pytest.mark.parametrize(("capability", "arch"), [((9, 0), "sm90"), ((10, 0), "sm100"), ((10, 3), "sm100")])
def test_a_launch(stub: Path, artifacts: Path, capability: tuple[int, int], arch: str, binding: str) -> None:
    done = run_session(stub, artifacts, *capability, binding)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["kernel"] == f"dense_decode_{arch}_bf16_cluster2"
    assert seen["launches"] == 2
    assert (seen["grid"], seen["block"], seen["smem"], seen["smem_limit"]) == ([2, 1, 66], [384, 1, 1], 230_000, 230_000)
    assert seen["stream"] == 0x5757
    assert seen["attributes"] == {"4": [2, 1, 1], "6": [1, 0, 0]}
    assert seen["library_bytes"] == int.from_bytes(fake_cubin()[:8], "little")
    assert seen["addresses"] == seen["expected_addresses"]
    assert seen["int64s"] == list(range(COUNTS[ParamKind.INT64]))
    assert seen["int32s"] == list(range(COUNTS[ParamKind.INT32]))
    assert (seen["encode_calls"], seen["encode_misaligned"]) == (1, 0)
    bf16 = 9
    assert seen["map_words"][:13] == [0x70000000, bf16, 4, 576, 1, 64, 100, 0, 1152, 1152, 73728, 0, 0]


@pytest.mark.parametrize("binding", ["cuda.bindings", "ctypes"])
def test_a_device_without_kernels_is_refused(stub: Path, artifacts: Path, binding: str) -> None:
    done = run_session(stub, artifacts, 11, 0, binding)
    supported = "9.0 (sm90), 10.0 or 10.3 (sm100), 12.0 or 12.1 (sm120)"
    assert f"cuda:0 (Stub) has compute capability 11.0; supported: {supported}" in done.stderr
    assert done.returncode


@pytest.mark.parametrize("binding", ["cuda.bindings", "ctypes"])
def test_an_error_has_the_name_that_the_driver_gives_it(stub: Path, artifacts: Path, binding: str) -> None:
    """The stub has no kernel of this name."""
    manifest = artifacts / "manifest.json"
    manifest.write_text(manifest.read_text().replace("_0", "_9"))
    done = run_session(stub, artifacts, 9, 0, binding)
    assert done.returncode
    assert "DeviceError: cuLibraryGetKernel failed: CUDA_ERROR_NOT_FOUND (500)" in done.stderr


def test_the_cost_of_a_call_on_the_host_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "host_cost.json"
    host_cost.main(file)
    figures = json.loads(file.read_text())
    assert figures["call_us"] > figures["driver_us"] > 0
    assert f"call_us{figures['call_us']:13.2f}" in capsys.readouterr().out
