"""The kernels as built have the static figures that are recorded, and a difference says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from cute_mla.profiles.kernel_stats import golden
from cute_mla.runtime.artifacts import load_artifacts

AGAIN = "python -m cute_mla.profiles.kernel_stats.golden"


def test_the_kernels_are_as_recorded() -> None:
    built = {name: golden.figures(entry) for name, entry in load_artifacts().manifest.kernels.items()}
    changed = list(golden.differences(golden.read(), built))
    assert not changed, "\n".join([f"kernels are not as recorded; if that is meant: {AGAIN}", *changed])


def test_differences_name_what_has_changed() -> None:
    before = {"a": {"registers": 128, "stack": 0, "tensor": 44}, "b": {"registers": 40}, "c": {"registers": 9}}
    after = {"a": {"registers": 130, "stack": 0, "tensor": 45}, "b": {"registers": 40}, "d": {"registers": 9}}
    assert list(golden.differences(before, after)) == [
        "a: registers 128 -> 130, tensor 44 -> 45",
        "c: recorded, but no longer built",
        "d: not recorded",
    ]


def test_what_is_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "FILE", tmp_path / "golden.json")
    figures = {"b": {"registers": 1, "mix": 2}, "a": {"registers": 3}}
    golden.write(figures)
    assert golden.read() == figures
    assert golden.FILE.read_text().count("\n") == 4


def test_every_kind_of_figure_is_there() -> None:
    entry = next(iter(load_artifacts().manifest.kernels.values()))
    assert {"registers", "stack", "smem", "SASS", "tensor", "memory", "other"} <= golden.figures(entry).keys()
