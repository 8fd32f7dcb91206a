"""The command `verify --against sim`: its table, its file and its exit status. The comparison is a stand-in here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from cute_mla.cli import commands
from cute_mla.cli.verify_bits import compare_devices
from cute_mla.testing import bits
from cute_mla.testing.bits import Bits

IDENTITY: dict[str, Any] = {"op": "dense_decode", "arch": "sm90", "kernel": "kernel_of_it", "sm_count": 132}
EQUAL = Bits(**IDENTITY, case="a", status="equal", result="out", elements=10)
OTHER = Bits(**IDENTITY, case="b", status="different", result="out", elements=20, differing=2, ulps=3, where=(1, 5), gpu="1.0", sim="1.5")
SKIPPED = Bits(**IDENTITY, case="c", status="skipped", reason="far")
HUNG = Bits(**IDENTITY, case="d", status="hung", reason="no answer within 3 s")


@pytest.mark.parametrize(
    ("found", "end", "code"),
    [
        ([EQUAL, OTHER, SKIPPED], None, 0),
        ([EQUAL, HUNG], None, 1),
        ([SKIPPED], None, 1),
        ([EQUAL], KeyboardInterrupt, 130),
    ],
)
def test_the_exit_code_tells_lost_cases_and_not_other_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: list[Bits], end: type[BaseException] | None, code: int
) -> None:
    def compare_with_sim(jobs: Any, gpu: Any, on_start: Any) -> Iterator[tuple[int, list[Bits]]]:
        assert gpu.step_seconds == 3
        yield from ((index, [one]) for index, one in enumerate(found))
        if end is not None:
            raise end

    monkeypatch.setattr(bits, "compare_with_sim", compare_with_sim)
    file = tmp_path / "bits.json"
    assert compare_devices([], 3, file) == code
    assert [entry["status"] for entry in json.loads(file.read_text())] == [one.status for one in found]


def test_the_table_has_the_greatest_distance(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bits, "compare_with_sim", lambda *_: ((0, [one]) for one in (EQUAL, OTHER, HUNG)))
    assert compare_devices([], 3, None) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "HUNG kernel_of_it dense_decode d: no answer within 3 s" in lines
    assert lines[-1].split() == ["dense_decode", "out", "2", "1", "30", "2", "3", "b", "[1,", "5]:", "1.0,", "simulated", "1.5"]


@pytest.mark.parametrize("device", ["auto", "sim"])
def test_it_needs_a_gpu(device: str) -> None:
    result = CliRunner().invoke(commands, ["verify", "--device", device, "--against", "sim"])
    assert result.exit_code == 2
    assert f"--against sim: the device is {device}; supported: --device cuda" in result.stderr
