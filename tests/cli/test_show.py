"""The command show, on a manifest written for the test."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from cute_mla.cli import commands
from cute_mla.manifest import MANIFEST_NAME, Barrier, KernelEntry, Manifest, Provenance, Role, manifest_sha256
from cute_mla.profiles.clock import stall_report
from cute_mla.profiles.clock.stall_report import Stall, StallReport
from cute_mla.profiles.kernel_stats.dynamic_counts import BaselineCounts, DynamicCounts
from cute_mla.runtime import driver
from cute_mla.runtime.artifacts import Artifacts
from cute_mla.runtime.errors import DeviceError
from cute_mla.simulator.findings import SassError
from cute_mla.spec.arch import SM90, SM100
from tests.support.kernel_entries import kernel_entry
from tests.support.params import int32s, tensor_maps

NAME = "dense_decode_sm90_bf16"
ENTRY = kernel_entry(
    "dense_decode",
    "sm90",
    "bf16",
    config={"dtype": "bf16", "cluster": 1},
    params=(*tensor_maps("kv_map"), *int32s("s_q")),
    block=(384, 1, 1),
    cluster=(2, 1, 1),
    smem_bytes=222_456,
    barriers=(Barrier("kv_ready", 0, 2),),
    roles=(Role("load", 0, 4),),
    instructions={"BAR": 3, "HGMMA": 44, "UTMALDG": 3},
    tools={"reassembly": "equal"},
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which the runtime looks for artefacts."""
    Manifest({NAME: ENTRY}).save(tmp_path)
    monkeypatch.setenv("CUTE_MLA_ARTIFACTS", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> Result:
    """Run `cute-mla show` with these arguments."""
    return CliRunner().invoke(commands, ["show", *arguments])


@pytest.mark.parametrize("arguments", [[], ["manifest"]])
def test_manifest(arguments: list[str], folder: Path) -> None:
    lines = run(*arguments).output.splitlines()
    assert lines[1].split() == [NAME, "128", "0", "222456", "0", "384x1x1", "2x1x1", "2", "50", "44", "a" * 12]
    assert lines[2:] == [f"1 kernels in {folder}", SM90.proof]


def test_a_kernel_for_blackwell(folder: Path) -> None:
    name = NAME.replace("sm90", "sm100")
    other = replace(ENTRY, name=name, arch="sm100", tmem_columns=512, instructions={"UTCHMMA": 26, "UTCBAR": 9, "BAR": 3})
    Manifest({NAME: ENTRY, name: other}).save(folder)
    lines = run().output.splitlines()
    assert lines[1].split() == [name, "128", "0", "222456", "512", "384x1x1", "2x1x1", "2", "38", "26", "a" * 12]
    assert lines[3:] == [f"2 kernels in {folder}", SM90.proof, SM100.proof]
    assert json.loads(run("--json").output)["proof"] == {"sm90": SM90.proof, "sm100": SM100.proof}
    assert json.loads(run("kernel", name, "--json").output)["proof"] == SM100.proof
    assert SM100.proof in run("kernel", name).output
    assert "the kernels for sm100 have not run on hardware" in run("env").output


def test_manifest_as_json_is_the_whole_record(folder: Path) -> None:
    shown = json.loads(run("--json").output)
    assert shown["folder"] == str(folder)
    assert shown["kernels"] == json.loads((folder / "manifest.json").read_text())["kernels"]


def test_kernel() -> None:
    lines = [line.split() for line in run("kernel", NAME).output.splitlines()]
    for expected in (
        ["config", "cluster=1,", "dtype=bf16"],
        ["registers", "128"],
        ["kv_map", "tensor_map", "128"],
        ["s_q", "int32", "4"],
        ["kv_ready", "0", "2"],
        ["load", "0", "4"],
    ):
        assert expected in lines
    assert lines[-3:] == [["HGMMA", "44"], ["BAR", "3"], ["UTMALDG", "3"]]


def test_kernel_as_json() -> None:
    assert json.loads(run("kernel", NAME, "--json").output)["instructions"] == ENTRY.instructions


def test_counts_stand_beside_flashmlas(monkeypatch: pytest.MonkeyPatch) -> None:
    slope = {"load": {"bulk copy": 9.0, "integer": 31.0}, "score": {"matrix product": 144.0, "integer": 16.0}}
    counts = DynamicCounts(slope, {"load": 40.0, "score": 60.0}, BaselineCounts("dense", 400.0, 1000.0))
    monkeypatch.setattr("cute_mla.profiles.kernel_stats.dynamic_counts.dynamic_counts", lambda entry, code: replace(counts, code=code))
    lines = run("kernel", NAME, "--counts", "--code", "ptx").output.splitlines()
    assert "warp instructions (PTX)" in lines[-7]
    assert [line.split() for line in lines[-6:-1]] == [
        ["matrix", "product", "144.0", "0", "144.0"],
        ["integer", "47.0", "31.0", "16.0"],
        ["bulk", "copy", "9.0", "9.0", "0"],
        ["all,", "per", "64", "keys", "of", "64", "rows", "200.0", "40.0", "160.0"],
        ["fixed", "100", "40", "60"],
    ]
    assert lines[-1] == "FlashMLA, dense: 400 and 1000; this kernel: 0.50 and 0.10 of it"
    assert json.loads(run("kernel", NAME, "--counts", "--json").output)["executed"]["slope"] == slope


def test_machine_code_is_counted_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = DynamicCounts({"load": {"integer": 31.0}}, {"load": 40.0}, None)
    monkeypatch.setattr("cute_mla.profiles.kernel_stats.dynamic_counts.dynamic_counts", lambda entry, code: replace(counts, code=code))
    assert "warp instructions (SASS)" in run("kernel", NAME, "--counts").output
    assert json.loads(run("kernel", NAME, "--counts", "--json").output)["executed"]["code"] == "sass"


def test_counts_without_nvdisasm_name_the_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(entry: KernelEntry, code: str) -> None:
        raise SassError("install nvdisasm")

    monkeypatch.setattr("cute_mla.profiles.kernel_stats.dynamic_counts.dynamic_counts", fail)
    result = run("kernel", NAME, "--counts")
    assert result.exit_code == 1
    assert result.stderr == "Error: install nvdisasm; --code ptx counts the PTX\n"


def test_counts_of_a_kernel_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cute_mla.profiles.kernel_stats.dynamic_counts.dynamic_counts", lambda entry, code: None)
    result = run("kernel", NAME, "--counts")
    assert result.exit_code == 2
    assert f"{NAME} does not walk over keys" in result.stderr


def test_an_unknown_kernel_names_those_that_are_built(folder: Path) -> None:
    result = run("kernel", "combine")
    assert result.exit_code == 2
    assert result.stderr.endswith(f"Error: no kernel combine in {folder}; `cute-mla show` lists the 1 that are built\n")


@pytest.mark.parametrize(
    "arguments", [["kernel"], ["manifest", "--counts"], ["manifest", NAME], ["env", NAME], ["paint"], ["kernel", NAME, "more"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_nothing_built_is_exit_code_1_and_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_MLA_ARTIFACTS", "/nonexistent")
    result = run()
    assert result.exit_code == 1
    assert "`make build`" in result.stderr


def no_driver() -> None:
    """CuInit on a machine without one."""
    raise DeviceError("no usable NVIDIA driver")


def env() -> dict[str, Any]:
    """`show env --json`, which must succeed whatever is missing."""
    result = run("env", "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_env_without_driver_or_artefacts_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "init", no_driver)
    monkeypatch.setenv("CUTE_MLA_ARTIFACTS", "/nonexistent")
    found = env()
    assert (found["driver"], found["gpus"]) == ("no usable NVIDIA driver", [])
    assert found["artifacts"]["folder"] == found["variables"]["CUTE_MLA_ARTIFACTS"] == "/nonexistent"
    assert "`make build`" in found["artifacts"]["error"]
    assert found["simulated"] == dict.fromkeys(("sm90", "sm100", "sm120"), "none: there are no artefacts")
    assert found["packages"]["torch"] == version("torch")
    assert found["torch build"]["git"] == torch.version.git_version
    assert found["numpy BLAS"]
    assert platform.python_version() in found["python"]


def test_env_says_which_artefacts_are_damaged_and_where_they_are_from(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(driver, "init", no_driver)
    sha256 = manifest_sha256(folder)
    assert sha256 is not None
    Provenance("0.1.0", "a" * 40, False, {"python": "3.11.4"}, sha256).save(folder)
    found = env()
    about = found["artifacts"]
    assert (about["kernels"], about["manifest sha256"]) == (1, sha256)
    missing = [f"cannot read {folder / NAME}.{kind}" for kind in ("cubin", "ptx")]
    assert [damage.split(":")[0] for damage in about["damaged"]] == [*missing, f"{folder / MANIFEST_NAME}"]  # whose params are not the op's
    assert about["provenance"] == {"source": f"commit {'a' * 40} with local changes", "version": "0.1.0", "python": "3.11.4"}
    assert about["tools"] == {"reassembly": "equal"}
    assert found["simulated"]["sm90"]["dense_decode"].startswith("no: cannot read")
    assert found["simulated"]["sm100"]["dense_decode"] == "no: not built"
    lines = run("env").output.splitlines()
    assert any(line.startswith("artifacts: damaged 0 ") and f"cannot read {folder / NAME}.cubin" in line for line in lines)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return one GPU, of the given values; the kernel's cubin is whole and of CUDA 13.4."""
    values: dict[str, Any] = {"version": 13_000, "compute_capability": (9, 0)}
    for name, function in {
        "init": lambda: None,
        "version": lambda: values["version"],
        "version_text": lambda number: f"{number // 1000}.{number % 1000 // 10}",
        "device_count": lambda: 1,
        "device_name": lambda device: f"NVIDIA {device}",
        "compute_capability": lambda device: values["compute_capability"],
        "sm_count": lambda device: 132 + device,
        "total_memory": lambda device: 1 << 37,
    }.items():
        monkeypatch.setattr(driver, name, function)
    monkeypatch.setattr(Artifacts, "cubin", lambda self, entry: b"Cuda compilation tools, release 13.4")
    return values


@pytest.mark.parametrize(
    ("capability", "version", "arch", "ops"),
    [
        ((9, 0), 13_000, "sm90", {"dense_decode": "supported"}),
        ((9, 0), 12_040, "sm90", {"dense_decode": "no: compiled with CUDA 13.4, the driver is for CUDA 12.4"}),
        ((10, 3), 13_000, "sm100", {"dense_decode": "no: not built"}),
        ((12, 1), 13_000, "sm120", {"dense_decode": "no: not built"}),
        (
            (11, 0),
            13_000,
            None,
            "none: there are kernels for compute capability 9.0 (sm90), 10.0 or 10.3 (sm100), 12.0 or 12.1 (sm120)",
        ),
    ],
)
def test_env_says_what_runs_on_each_gpu_and_why_not(
    gpu: dict[str, Any], capability: tuple[int, int], version: int, arch: str | None, ops: object
) -> None:
    gpu.update(version=version, compute_capability=capability)
    found = env()
    assert found["driver"] == f"CUDA {version // 1000}.{version % 1000 // 10}"
    identity = {"name": "NVIDIA 0", "compute capability": ".".join(map(str, capability)), "kernels of": arch}
    assert found["gpus"] == [{**identity, "multiprocessors": 132, "memory bytes": 1 << 37, "ops": ops}]


def test_env_as_a_table_has_a_line_for_every_value(gpu: dict[str, Any]) -> None:
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in run("env").output.splitlines()}
    assert lines["driver"] == "CUDA 13.0"
    assert lines["gpus 0: name"] == "NVIDIA 0"
    assert lines["gpus 0: ops: dense_decode"] == "supported"
    assert lines["artifacts: kernels"] == "1"
    assert lines["artifacts: provenance"] == "none"


REPORT = StallReport(
    NAME, "H200", 64, 3012.5,
    (Stall("score", 580.375, "tensor core queue", "tensor core queue", 0x87D0, "HGMMA.64x64x16.F32 R24, gdesc[UR8], R24", None, ""),
     Stall("load", 615.2, "mbarrier", "mbarrier", 0x1600, "@!P1 BRA `(.L_x_15)", 387, "kernels/primitives/pipeline.py:95")),
    ("no Python lines of this one",),
)  # fmt: skip


def test_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_report, "stall_report", lambda entry, values, setting: replace(REPORT, gpu=values.gpu))
    text = run("kernel", NAME, "--stalls", "--gpu", "H800").output
    assert "H800 (others: --gpu NAME): predicted clocks that a warp of each role waits in a block of 64 keys, which takes 3,012" in text
    (line,) = [line for line in text.splitlines() if line.startswith("load")]
    assert line.split()[:4] == ["load", "615.2", "mbarrier", "mbarrier"]
    assert line.endswith("387  kernels/primitives/pipeline.py:95")
    assert "no Python lines of this one" in text
    document = json.loads(run("kernel", NAME, "--stalls", "--json").output)
    assert document["gpu"] == "H200"
    assert document["stalls"][0]["source"] is None
    assert document["stalls"][1]["ptx_line"] == 387


def test_stalls_of_a_kernel_that_the_clock_cannot_time_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SassError("install nvdisasm")

    monkeypatch.setattr(stall_report, "stall_report", fail)
    result = run("kernel", NAME, "--stalls")
    assert (result.exit_code, result.stderr) == (1, "Error: --stalls: install nvdisasm\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stalls",), "--stalls needs one kernel"),
        (("kernel", NAME, "--stalls", "--counts"), "--stalls needs one kernel, without --counts"),
        (("kernel", NAME, "--gpu", "H200"), "--gpu needs --stalls"),
        (("kernel", NAME, "--stalls", "--gpu", "B200"), f"B200 does not run {NAME}; supported: H200, H100, H800"),
    ],
)
def test_stalls_refuses(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output
