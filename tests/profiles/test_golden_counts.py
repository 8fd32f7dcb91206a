"""The instructions that the model reckons with are those that kernels execute, and a difference says what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.profiles.kernel_stats import golden_counts as module
from cute_mla.profiles.kernel_stats.golden_counts import RoleCounts, counted, differences, has_golden_counts, read, write
from cute_mla.runtime.artifacts import load_artifacts

AGAIN = "python -m cute_mla.profiles.kernel_stats.golden_counts"


@pytest.mark.parametrize(
    "name",
    [
        "dense_decode_sm90_bf16_cluster1",
        "dense_decode_sm100_bf16_cluster2",
        "dense_prefill_sm90_bf16_d192",
        "sparse_prefill_sm90_bf16_d576_cluster2",
    ],
)
def test_kernels_execute_what_is_recorded(name: str) -> None:
    counts = counted(load_artifacts().manifest.kernels[name])
    assert counts is not None
    changed = list(differences({name: read()[name]}, {name: counts}))
    assert not changed, "\n".join([f"instructions are not as recorded; if that is meant: {AGAIN}", *changed])


def test_every_kernel_of_the_rows_is_recorded() -> None:
    prefills = ("sparse_prefill", "dense_prefill", "masked_prefill", "dense_prefill_dq", "dense_prefill_dkdv")
    with_keys = ("dense_decode", "sparse_decode", *prefills, "mqa_logits")
    built = {entry.name for entry in load_artifacts().manifest.kernels.values() if has_golden_counts(entry) and entry.op in with_keys}
    assert built == read().keys(), f"other kernels are built than are recorded: {AGAIN}"
    assert len(built) > 20


def test_differences_name_what_has_changed() -> None:
    load, score = RoleCounts(0, 4, {"mov": 2.0}, 30.0), RoleCounts(4, 4, {"ex2": 4.0, "max": 1.0}, 50.0)
    changed = replace(score, slope={"ex2": 5.0}, fixed=49.0)
    before = {"a": {"load": load, "score": score}, "b": {"load": load}, "c": {"load": load}}
    after = {"a": {"load": load, "score": changed}, "b": {"load": load}, "d": {"load": load}}
    assert list(differences(before, after)) == [
        "a: score ex2 4 -> 5, score max 1 -> 0, score fixed 50 -> 49",
        "c: recorded, but not counted any more",
        "d: not recorded",
    ]


def test_what_is_written_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILE", tmp_path / "counts.json")
    counts = {"b": {"load": RoleCounts(0, 4, {"mov": 2.5}, 30.0)}, "a": {"score": RoleCounts(4, 1, {}, 0.0)}}
    write(counts)
    assert read() == counts
    assert module.FILE.read_text().count("\n") == 4


def test_recording_one_kernel_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "FILE", tmp_path / "counts.json")
    write({"kept": {"load": RoleCounts(0, 4, {"mov": 2.0}, 30.0)}})
    name = "dense_decode_sm100_bf16_cluster2"
    module.main([name])
    assert capsys.readouterr().out == f"{name}: not recorded\n"
    assert read().keys() == {"kept", name}
    module.main([name])
    assert capsys.readouterr().out == ""
