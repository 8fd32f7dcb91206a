"""profiles/on_gpu.sh: what it runs, what it leaves, and its exit codes; here, where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.tree import ROOT

SCRIPT = ROOT / "profiles" / "on_gpu.sh"

# Stands in for Python: plays each step as told by a file named after it, and notes how it was called.
FAKE_PYTHON = """#!/usr/bin/env bash
here="$(dirname "$0")"
case "$2 $3" in
    *preflight*) step=preflight; file="$3" ;;
    *verify*) step=verify ;;
    *profile*) step=profile ;;
    *pip*) step=pip; touch "${@: -2:1}/installed-$(basename "${@: -1}")" ;;
esac
echo "$PWD $*" >>"$here/calls"
echo "this is $step"
while [ $# -gt 0 ]; do [ "$1" = --json ] && echo '[]' >"$2"; shift; done
echo "${PYTHONPATH##*:}" >>"$here/paths"
ls "${PYTHONPATH##*:}" >>"$here/listing"
source "$here/$step"
"""


def run(*arguments: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, **(environment or {})},
    )


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    folder = tmp_path / "fake"
    folder.mkdir()
    python = folder / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    for step in ("preflight", "verify", "profile", "pip"):
        (folder / step).write_text("exit 0\n")
    return python


def status(out: Path) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((out / "status.json").read_text())
    return loaded


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_and_leaves_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(out, "--python", sys.executable, environment={"CUTE_MLA_ARTIFACTS": str(tmp_path / "none")})
    assert result.returncode == 3
    assert "cannot run here: no CUDA GPU is available to torch" in result.stdout
    assert f"cannot run here: no manifest.json in {tmp_path / 'none'}" in result.stdout
    assert status(out) == {
        "exit": 3, "wheels": None, "preflight": 1, "verify": None, "profile": None, "seconds": status(out)["seconds"],
    }  # fmt: skip
    assert len(json.loads((out / "preflight.json").read_text())["problems"]) == 2
    assert "no CUDA GPU" in (out / "preflight.log").read_text()
    assert not (out / "verify.json").exists()


@pytest.mark.parametrize(
    ("verify", "profile", "code"), [("exit 0", "exit 0", 0), ("exit 1", "exit 0", 4), ("exit 0", "exit 1", 5), ("exit 2", "exit 1", 6)]
)
def test_exit_code_says_what_failed_and_profile_runs_all_the_same(
    tmp_path: Path, fake_python: Path, verify: str, profile: str, code: int
) -> None:
    (fake_python.parent / "verify").write_text(verify)
    (fake_python.parent / "profile").write_text(profile)
    out = tmp_path / "a folder"
    result = run(out, "--python", fake_python, "--rows", "D1,D5", "--suite", "full", "--profile-seconds", "100")
    assert result.returncode == code == status(out)["exit"]
    calls = (fake_python.parent / "calls").read_text().splitlines()
    assert [call.split(" -m ")[1] for call in calls] == [
        f"cute_mla.profiles.preflight {out}/preflight.json",
        f"cute_mla.cli verify --arch all --device cuda --suite full --json {out}/verify.json",
        f"cute_mla.cli profile --arch all --device cuda --budget 60 --json {out}/profile.json --plot {out}/roofline.svg --rows D1,D5",
    ]
    assert (out / "profile.log").read_text() == "this is profile\n"
    assert (out / "verify.json").exists()


def test_a_step_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path, fake_python: Path) -> None:
    (fake_python.parent / "verify").write_text("sleep 60")
    out = tmp_path / "out"
    result = run(out, "--python", fake_python, "--verify-seconds", "1")
    assert (result.returncode, status(out)["verify"], status(out)["profile"]) == (4, 124, 0)
    assert "verify ran past its 1 s" in (out / "verify.log").read_text()


@pytest.mark.parametrize(("outcome", "code"), [("exit 0", 0), ("exit 1", 1)])
def test_wheels_go_to_a_temporary_folder_behind_everything_else(tmp_path: Path, fake_python: Path, outcome: str, code: int) -> None:
    carried = tmp_path / "carried along"
    carried.mkdir()
    for name in ("a-1.whl", "b-2.whl", "notes.txt"):
        (carried / name).touch()
    (fake_python.parent / "pip").write_text(outcome)
    result = run(tmp_path / "out", "--python", fake_python, "--wheels", carried)
    assert result.returncode == 0  # a baseline that cannot be installed is left out
    assert (status(tmp_path / "out")["wheels"], status(tmp_path / "out")["preflight"]) == (code, 0)
    calls = [call.split(" -m ")[1] for call in (fake_python.parent / "calls").read_text().splitlines()]
    installs = [call for call in calls if call.startswith("pip")]
    assert len(installs) == 2
    assert all(call.startswith("pip install --quiet --no-deps --no-index --no-compile --upgrade --target /") for call in installs)
    paths = (fake_python.parent / "paths").read_text().splitlines()
    assert len(set(paths[2:])) == 1  # of preflight, verify and profile
    assert {"installed-a-1.whl", "installed-b-2.whl", "sitecustomize.py"} <= set((fake_python.parent / "listing").read_text().splitlines())
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


def test_results_of_an_earlier_run_do_not_survive(tmp_path: Path, fake_python: Path) -> None:
    out = tmp_path / "out"
    assert run(out, "--python", fake_python).returncode == 0
    (fake_python.parent / "preflight").write_text("exit 1")
    assert run(out, "--python", fake_python).returncode == 3
    assert not (out / "verify.json").exists()
    assert not (out / "profile.log").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a", "b"],
        ["a", "--verify-seconds", "0"],
        ["a", "--verify-seconds", "1m"],
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
    assert status(tmp_path / "out")["exit"] == 3
