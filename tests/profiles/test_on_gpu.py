"""profiles/on_gpu.sh: what it runs, what it leaves, and its exit codes; here, where there is no GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tree import ROOT

SCRIPT = ROOT / "profiles" / "on_gpu.sh"

# Stands in for Python: plays each step as told by a file named after it, and notes how it was called.
FAKE_PYTHON = """#!/usr/bin/env bash
here="$(dirname "$0")"
case "$*" in
    *preflight*) step=preflight; file="${@: -1}" ;;
    *against*) step=bits ;;
    *verify*quick*) step=quick ;;
    *verify*smoke*) step=smoke ;;
    *profile*) step=profile ;;
    *pip*) step=pip; >"${@: -2:1}/installed-$(basename "${@: -1}")" ;;
esac
echo "$*" >>"$here/calls"
echo "this is $step"
[ ! -e "$OUT/status.json" ] || cat "$OUT/status.json" >>"$here/states"
while [ $# -gt 0 ]; do [ "$1" = --json ] && json="$2"; shift; done
echo "${PYTHONPATH##*:}" >>"$here/paths"
ls "${PYTHONPATH##*:}" >>"$here/listing"
source "$here/$step"
"""
FAKE_NVCC = """#!/usr/bin/env bash
source "$(dirname "$0")/build"
cp "$(dirname "$0")/program" "${@: -1}"
"""
FAKE_PROGRAM = """#!/usr/bin/env bash
[ "$1" = list ] && echo "first hanging last" && exit
[ "$1" = hanging ] && exec sleep 60
echo "{\\"name\\": \\"$1\\"}"
"""
TOOLS = ("bash", "basename", "cat", "cp", "dirname", "env", "grep", "ls", "mkdir", "mktemp", "rm", "sed", "sleep", "tail", "tee", "timeout")
RECORD = ' {{\n  "status": "{}",\n  "passed": {}\n }}'
STEPS = ("preflight", "quick", "bits", "profile", "smoke")


def records(right: int, wrong: int, skipped: int = 0) -> str:
    """Return shell code that writes what `verify --json` writes."""
    entries = [RECORD.format("passed", "true")] * right + [RECORD.format("failed", "false")] * wrong
    entries += [RECORD.format("skipped", "null")] * skipped
    return f"cat >\"$json\" <<'END'\n[\n{','.join(entries)}\n]\nEND\n"


def run(*arguments: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OUT": str(next(iter(arguments), "")), **(environment or {})},
    )


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a Python and a compiler, the only one on the path, that do as files beside them say."""
    folder = tmp_path / "fake"
    folder.mkdir()
    for name, text in (("python", FAKE_PYTHON), ("nvcc", FAKE_NVCC), ("program", FAKE_PROGRAM)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for step in (*STEPS, "pip", "build"):
        (folder / step).write_text("exit 0\n" if step not in ("build", "quick") else "")
    (folder / "quick").write_text(records(3, 0, 2))
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (folder / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(folder))
    return folder


def status(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "status.json").read_text())
    return loaded


def calls(fakes: Path) -> list[str]:
    return [call.removeprefix("-m ") for call in (fakes / "calls").read_text().splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_leaves_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(out, "--python", sys.executable, environment={"CUTE_MLA_ARTIFACTS": str(tmp_path / "none")})
    assert result.returncode == 3
    assert "cannot run here: no CUDA GPU is available to torch" in result.stdout
    assert f"cannot run here: no manifest.json in {tmp_path / 'none'}" in result.stdout
    assert status(out) == {"exit": 3, "steps": {"preflight": 1}, "seconds": status(out)["seconds"]}
    assert len(json.loads((out / "preflight.json").read_text())["problems"]) == 2
    assert "no CUDA GPU" in (out / "preflight.log").read_text()
    assert not (out / "quick.json").exists()


def test_each_step_runs_and_leaves_its_results_before_the_next(tmp_path: Path, fakes: Path) -> None:
    out = tmp_path / "a folder"
    (fakes / "program").write_text(FAKE_PROGRAM.replace("exec sleep 60", "exit 1"))
    result = run(out, "--python", fakes / "python", "--rows", "D1,D5")
    assert (result.returncode, status(out)["exit"]) == (1, 1)
    verify = "cute_mla.cli verify --arch all --device cuda --suite"
    assert calls(fakes) == [
        f"cute_mla.profiles.preflight {out}/preflight.json",
        f"{verify} quick --json {out}/quick.json",
        f"{verify} quick --against sim --json {out}/bits.json",
        f"cute_mla.cli profile --arch all --device cuda --budget 200 --json {out}/profile.json --plot {out}/roofline.svg --rows D1,D5",
        f"{verify} smoke --json {out}/smoke.json",
    ]
    states = [json.loads(line)["steps"] for line in (fakes / "states").read_text().splitlines()]
    order = ["preflight", "quick", "bits", "profile", "microbenchmarks", "smoke"]
    assert [list(state) for state in states] == [order[:1], order[:2], order[:3], order[:5]]
    assert status(out)["steps"] == {**dict.fromkeys(order, 0), "microbenchmarks": 1}  # one group failed
    assert (out / "microbenchmarks.jsonl").read_text() == '{"name": "first"}\n{"name": "last"}\n'
    assert "hanging ended with 1" in (out / "microbenchmarks.log").read_text()
    assert (out / "profile.log").read_text() == "this is profile\n"
    assert "3 of 3 runs of the quick suite are right" in result.stdout


@pytest.mark.parametrize(("failing", "code"), [((), 0), (("quick",), 1), (("bits", "profile", "smoke"), 1)])
def test_a_step_that_fails_is_named_and_the_others_run(tmp_path: Path, fakes: Path, failing: tuple[str, ...], code: int) -> None:
    (fakes / "program").write_text(FAKE_PROGRAM.replace("exec sleep 60", "exit 0"))
    for step in failing:
        (fakes / step).write_text((records(1, 3) if step == "quick" else "") + "exit 2\n")
    assert run(tmp_path / "out", "--python", fakes / "python").returncode == code
    assert status(tmp_path / "out")["steps"] == {step: 2 if step in failing else 0 for step in (*STEPS, "microbenchmarks")}


@pytest.mark.parametrize("quick", [records(1, 4), records(0, 0, 5), "exit 1"], ids=["a fifth is right", "nothing ran", "no file"])
def test_the_gate_ends_the_run_with_the_logs(tmp_path: Path, fakes: Path, quick: str) -> None:
    (fakes / "quick").write_text(quick)
    result = run(tmp_path / "out", "--python", fakes / "python")
    assert (result.returncode, status(tmp_path / "out")["exit"], len(calls(fakes))) == (4, 4, 2)
    assert status(tmp_path / "out")["steps"].keys() == {"preflight", "quick"}
    assert "read quick.log" in result.stdout
    assert (tmp_path / "out" / "quick.log").read_text() == "this is quick\n"


@pytest.mark.parametrize(
    "hang",
    [
        pytest.param("exec sleep 60", id="ends by Ctrl-C"),
        pytest.param("trap '' INT; sleep 60; sleep 60", id="ends by SIGKILL", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("step", ["quick", "bits", "profile", "build", "microbenchmarks"])
def test_the_time_limit_holds_whatever_hangs(tmp_path: Path, fakes: Path, step: str, hang: str) -> None:
    if step == "quick":
        hang = records(1, 0) + hang
    if step == "microbenchmarks":
        (fakes / "program").write_text(FAKE_PROGRAM.replace("exec sleep 60", hang))
    else:
        (fakes / "program").write_text(FAKE_PROGRAM.replace("exec sleep 60", "exit 0"))
        (fakes / step).write_text(hang)
    begin = time.monotonic()
    result = run(tmp_path / "out", "--python", fakes / "python", "--seconds", "3")
    assert 2 < time.monotonic() - begin < 3 + 2
    assert result.returncode == 1
    steps = status(tmp_path / "out")["steps"]
    assert steps["preflight"] == 0
    assert steps["smoke"] is None
    if step != "build":
        assert steps[step] in (124, 137)
    assert f"{step} ran past its" in (tmp_path / "out" / f"{step}.log").read_text()


@pytest.mark.parametrize("lacking", ["no nvcc on this machine", "the microbenchmarks are for Hopper"])
def test_without_a_compiler_or_hopper_the_microbenchmarks_are_left_out(tmp_path: Path, fakes: Path, lacking: str) -> None:
    (fakes / "nvcc").rename(fakes / ("none" if "nvcc" in lacking else "nvcc"))
    (fakes / "preflight").write_text("" if "nvcc" in lacking else """echo '{"environment": {"arch": "sm120"}}' >"$file"\n""")
    assert run(tmp_path / "out", "--python", fakes / "python").returncode == 0
    assert "microbenchmarks" not in status(tmp_path / "out")["steps"]
    assert lacking in (tmp_path / "out" / "build.log").read_text()


@pytest.mark.parametrize("outcome", ["exit 0", "exit 1"])
def test_wheels_go_to_a_temporary_folder_behind_everything_else(tmp_path: Path, fakes: Path, outcome: str) -> None:
    carried = tmp_path / "carried along"
    carried.mkdir()
    for name in ("a-1.whl", "b-2.whl", "notes.txt"):
        (carried / name).touch()
    (fakes / "pip").write_text(outcome)
    (fakes / "nvcc").unlink()
    result = run(tmp_path / "out", "--python", fakes / "python", "--wheels", carried)
    assert result.returncode == 0  # a baseline that cannot be installed is left out
    assert result.stdout.count("left out: ") == (2 if outcome == "exit 1" else 0)
    installs = [call for call in calls(fakes) if call.startswith("pip")]
    assert len(installs) == 2
    assert all(call.startswith("pip install --quiet --no-deps --no-index --no-compile --upgrade --target /") for call in installs)
    paths = (fakes / "paths").read_text().splitlines()
    assert len(set(paths[2:])) == 1  # of the steps
    assert {"installed-a-1.whl", "installed-b-2.whl", "sitecustomize.py"} <= set((fakes / "listing").read_text().splitlines())
    assert not Path(paths[-1]).exists()


def test_wheels_that_place_themselves_by_a_pth_file_are_found(tmp_path: Path) -> None:
    """A real Python finds a package below the folder that the script leaves."""
    text = SCRIPT.read_text()
    (line,) = (line.strip() for line in text.splitlines() if "sitecustomize.py" in line)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "placed_by_pth.py").touch()
    (tmp_path / "one.pth").write_text("below\n")
    subprocess.run(["bash", "-c", line], check=True, env={**os.environ, "SITE": str(tmp_path)})
    found = subprocess.run(
        [sys.executable, "-c", "import placed_by_pth"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr


def test_results_of_an_earlier_run_do_not_survive(tmp_path: Path, fakes: Path) -> None:
    (fakes / "nvcc").unlink()
    out = tmp_path / "out"
    assert run(out, "--python", fakes / "python").returncode == 0
    (fakes / "preflight").write_text("exit 1")
    assert run(out, "--python", fakes / "python").returncode == 3
    assert sorted(path.name for path in out.iterdir()) == ["preflight.log", "status.json"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "b"],
        ["a", "--seconds", "0"],
        ["a", "--seconds", "1m"],
        ["a", "--rows"],
        ["a", "--fast"],
        ["a", "--wheels", "b"],
    ],
)
def test_bad_usage_exits_2_and_runs_nothing(tmp_path: Path, arguments: list[str]) -> None:
    result = subprocess.run(["bash", str(SCRIPT), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=20)
    assert result.returncode == 2
    assert result.stderr
    assert not list(tmp_path.iterdir())


def test_a_missing_python_is_named(tmp_path: Path) -> None:
    result = run(tmp_path / "out", "--python", "no-such-python")
    assert result.returncode == 3
    assert "cannot run here: no no-such-python on this machine" in result.stderr
    assert status(tmp_path / "out")["steps"] == {"preflight": 127}
