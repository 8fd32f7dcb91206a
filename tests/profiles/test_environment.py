"""The record of the machine: nvidia-smi's answer, the commit, the manifest; and what is said when one is missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cute_mla.manifest import PROVENANCE_NAME, Provenance
from cute_mla.profiles.measure import environment
from cute_mla.profiles.measure.cuda_bench import kernel_times, times_by_name
from tests.profiles.benching import ENTRY


def test_gpu_state_reads_numbers_by_name() -> None:
    asked: list[list[str]] = []

    def run(command: list[str]) -> str:
        asked.append(command)
        return "1980, 3201, 1980, 512.4, 700.00, 61, 580.95.05, 0x0000000000000004\n"

    state = environment.gpu_state(3, run)
    assert (state["sm_mhz"], state["power_w"]) == (1980.0, 512.4)
    assert (state["driver"], state["throttle_reasons"]) == ("580.95.05", "0x0000000000000004")
    assert "--id=3" in asked[0]
    assert not any(option.startswith(("-l", "-p", "-r", "-ac", "--lock", "--reset")) for option in asked[0])  # it only asks


def broken(command: list[str]) -> str:
    raise subprocess.CalledProcessError(9, command)


@pytest.mark.parametrize(
    ("run", "reason"), [(broken, "nvidia-smi failed"), (lambda command: "", "nvidia-smi failed"), (lambda command: "1, 2", "2 values to 8")]
)
def test_gpu_state_says_why_it_has_none(run: environment.Runner, reason: str) -> None:
    assert reason in environment.gpu_state(0, run)["unavailable"]


def test_commit_is_marked_when_the_tree_has_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    assert environment.commit(tmp_path) is None
    git("init")
    (tmp_path / "file").write_text("one")
    git("add", "file")
    git("commit", "-m", "first")
    clean = environment.commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "file").write_text("two")
    assert environment.commit(tmp_path) == clean + "+"
    (tmp_path / "site-packages").mkdir()
    assert environment.commit(tmp_path / "site-packages") is None


def test_a_wheels_commit_is_the_one_of_its_provenance(tmp_path: Path) -> None:
    assert environment.wheel_commit(tmp_path) is None
    for clean, mark in ((True, ""), (False, "+")):
        Provenance("0.1.0", "a" * 40, clean, {}, "b" * 64).save(tmp_path)
        assert environment.wheel_commit(tmp_path) == "a" * 40 + mark
    (tmp_path / PROVENANCE_NAME).write_text("{")
    assert environment.wheel_commit(tmp_path) is None


def test_kernel_times_are_per_launch_and_of_our_kernels_only() -> None:
    events = [(ENTRY.entry, 100.0), (ENTRY.entry, 110.0), ("cublas_kernel", 500.0), ("aten::copy_", 5.0)]
    assert kernel_times(events, 2, [ENTRY]) == {"dense_decode": 105.0}
    assert "unavailable" in kernel_times([("cublas_kernel", 1.0)], 2, [ENTRY])


def test_the_kernels_of_others_keep_their_names() -> None:
    assert times_by_name([("a", 100.0), ("b", 1.0), ("a", 50.0)], 2) == {"a": 75.0, "b": 0.5}


def test_the_environment_imports_no_peer() -> None:
    """A peer that crashes when it is imported may cost its own figure only."""
    assert "peers" not in environment.environment()
