"""The command build: what it asks for, prints and returns. Nothing is compiled here."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cute_mla.aot_build.build import BUILT, FAILED, UP_TO_DATE, BuildReport, KernelReport, Progress
from cute_mla.aot_build.tools import ToolError
from cute_mla.aot_build.variants import OPS, Variant, closed_variants
from cute_mla.cli import commands
from cute_mla.spec.arch import ARCHS, SM90
from cute_mla.testing import suite as suites
from tests.support.kernel_entries import kernel_entry

module = importlib.import_module("cute_mla.cli.build")

ENTRY = kernel_entry("combine", "sm90", "bf16", smem_bytes=0, registers=80, tools={"reassembly": "equal"})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the build: `asked["kernels"]` is what it reports; the arguments it got are left there."""
    seen: dict[str, Any] = {"kernels": (KernelReport("combine_sm90_bf16", BUILT, 1.25, ENTRY),)}

    def build_all(archs: Sequence[str], ops: Sequence[str], jobs: int | None, out: Path, progress: Progress) -> BuildReport:
        seen.update(archs=list(archs), ops=list(ops), jobs=jobs, out=out)
        compiled = [kernel for kernel in seen["kernels"] if kernel.status != UP_TO_DATE]
        variants = {variant.name: variant for arch in ARCHS.values() for variant in closed_variants(arch)}
        if compiled:
            progress.begin([variants.get(kernel.name, next(iter(variants.values()))) for kernel in compiled], 2)
        for kernel in compiled:
            progress.end(kernel)
        return BuildReport(out, seen["kernels"], 2.5)

    monkeypatch.setattr(module, "build_all", build_all)
    return seen


def run(*arguments: str) -> Result:
    """Run `cute-mla build` with these arguments."""
    return CliRunner().invoke(commands, ["build", *arguments])


def test_defaults_are_everything_into_the_folder_that_is_loaded_from(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUTE_MLA_ARTIFACTS", str(tmp_path))
    assert run().exit_code == 0
    assert asked["archs"] == ["sm90", "sm100", "sm120"]
    assert asked["ops"] == list(OPS)
    assert (asked["jobs"], asked["out"]) == (None, tmp_path)


def test_options_are_passed_on(asked: dict[str, Any]) -> None:
    assert run("--arch", "sm90", "--op", "combine", "--op", "split_plan", "--jobs", "3", "--out", "/tmp/out").exit_code == 0
    assert asked["archs"] == ["sm90"]
    assert (asked["ops"], asked["jobs"], asked["out"]) == (["combine", "split_plan"], 3, Path("/tmp/out"))


def test_single_kernels(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def build_variants(variants: Sequence[Variant], jobs: int | None, out: Path, progress: Progress) -> BuildReport:
        asked.update(variants=[variant.name for variant in variants], jobs=jobs, out=out)
        return BuildReport(out, asked["kernels"], 1.0)

    monkeypatch.setattr(module, "build_variants", build_variants)
    names = ["split_plan_sm90_i32", "combine_sm100_bf16"]
    assert run(*(f"--kernel={name}" for name in [*names, names[0]]), "--jobs", "1", "--out", "/tmp/out").exit_code == 0
    assert (asked["variants"], asked["jobs"], asked["out"]) == (names, 1, Path("/tmp/out"))
    assert "archs" not in asked
    for arguments in (["--kernel", "combine"], ["--arch", "sm90", "--kernel", names[1]], ["--op", "combine", "--kernel", names[0]]):
        result = run(*arguments, "--out", "/tmp/out")
        assert result.exit_code == 2
        assert f"there is no {arguments[-1]} among the" in result.stderr


@pytest.mark.parametrize(("arch", "archs"), [("sm90", ["sm90"]), ("sm100", ["sm100"]), ("all", ["sm90", "sm100", "sm120"])])
def test_architectures(asked: dict[str, Any], arch: str, archs: list[str]) -> None:
    assert run("--arch", arch, "--out", "/tmp/out").exit_code == 0
    assert asked["archs"] == archs


@pytest.mark.parametrize("arguments", [["--arch", "sm70"], ["--op", "conv"], ["--jobs", "0"], ["more"], ["--out", "/dev/null/x"]])
def test_wrong_usage(asked: dict[str, Any], arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2
    assert "archs" not in asked


def test_progress_is_on_stderr_and_the_table_has_what_was_built(asked: dict[str, Any]) -> None:
    asked["kernels"] += (KernelReport("dense_decode_sm90_bf16_cluster1", UP_TO_DATE, 0.0, ENTRY),)
    result = run("--out", "/tmp/out")
    assert result.stderr.splitlines() == [
        "building 1 kernels, 2 at a time; each that ends says the time left", "[1/1] combine_sm90_bf16: built, 1.2 s"
    ]  # fmt: skip
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["kernel", "status", "seconds", "registers", "stack", "smem", "tmem", "MMA", "PTX", "=", "cubin"]
    assert lines[1].split() == ["combine_sm90_bf16", "built", "1.2", "80", "0", "0", "0", "0", "equal"]
    assert lines[2:] == ["1 of 1 kernels built in /tmp/out, 1 were up to date; 2 s"]


def test_the_time_left_follows_the_pace_of_this_machine(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [variant.name for variant in closed_variants(SM90, ["combine"])]
    asked["kernels"] = tuple(KernelReport(name, BUILT, 60.0, ENTRY) for name in names[:3])
    clock = iter((1000.0, 1000.0, 1060.0, 1300.0, 1400.0))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    ended = run("--out", "/tmp/out").stderr.splitlines()[1:]  # of two processes: half of the other's kernel is done
    assert [line.partition("; ")[2] for line in ended] == ["about 1 min 0 s left", "about 1 min 0 s left", ""]


def test_a_suite_that_launches_no_kernel_of_an_op_builds_none(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "suite_kernels", lambda suite, op, arch: set())
    monkeypatch.setattr(module, "build_variants", lambda variants, jobs, out, progress: BuildReport(out, tuple(variants), 1.0))
    assert run("--suite", "quick", "--out", "/tmp/out").output == "0 kernels in /tmp/out are up to date\n"
    assert "archs" not in asked


def test_nothing_to_do_is_one_line(asked: dict[str, Any]) -> None:
    asked["kernels"] = (KernelReport("dense_decode_sm90_bf16_cluster1", UP_TO_DATE, 0.0, ENTRY),)
    assert run("--out", "/tmp/out").output == "1 kernels in /tmp/out are up to date\n"


def test_the_kernels_of_a_suite_follow_from_its_cases(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def build_variants(variants: Sequence[Variant], jobs: int | None, out: Path, progress: Progress) -> BuildReport:
        asked["variants"] = {variant.name for variant in variants}
        return BuildReport(out, asked["kernels"], 1.0)

    monkeypatch.setattr(module, "build_variants", build_variants)
    assert run("--suite", "quick", "--arch", "sm90", "--out", "/tmp/out").exit_code == 0
    assert asked["variants"] == {name for op in suites.OPS for name in suites.suite_kernels("quick", op, SM90)}
    assert run("--suite", "smoke", "--op", "combine", "--out", "/tmp/out").exit_code == 0
    assert asked["variants"] == {variant.name for arch in ARCHS.values() for variant in closed_variants(arch, ["combine"])}


def test_a_kernel_that_fails_is_exit_code_1_with_the_reason_on_standard_error(asked: dict[str, Any]) -> None:
    reason = "bad_sm90: gate stack: stack 8 bytes, limit: 0 bytes"
    asked["kernels"] += (KernelReport("combine_sm90_fp16", FAILED, 1.0, error=reason),)
    result = run("--out", "/tmp/out")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == reason
    assert result.stdout.splitlines()[-1] == "1 of 2 kernels built in /tmp/out; 2 s"


def test_a_missing_tool_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_all(*_: object) -> BuildReport:
        raise ToolError("the CuTe DSL is not installed")

    monkeypatch.setattr(module, "build_all", build_all)
    result = run()
    assert result.exit_code == 1
    assert result.stderr == "Error: the CuTe DSL is not installed\n"
