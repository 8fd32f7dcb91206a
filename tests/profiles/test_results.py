"""Keeping measurements: appended once, with their machine and prediction, never for a document that measured nothing; and their table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cute_mla.profiles import results
from cute_mla.profiles.results import BEGIN, END, NOTHING, PAGE, append, clock_prediction, folder_name, main, table, with_table
from cute_mla.profiles.rows import RESULTS
from tests.profiles.microbenchmark_lines import lines
from tests.support.tree import ROOT

JANUARY = {"gpu": "NVIDIA H200", "date": "2026-01-01T00:00:00Z"}
FEBRUARY = {"gpu": "NVIDIA H200", "date": "2026-02-01T00:00:00Z"}


def timed(name: str, us: float, **peers: float) -> dict[str, Any]:
    ratios = {peer: {"status": "timed", "ratio": {"median": ratio}} for peer, ratio in peers.items()}
    return {"op": "dense_decode", "name": name, "status": "timed", "cold_us": {"median": us}, "peers": ratios}


def document(*rows: dict[str, Any], **changes: Any) -> dict[str, Any]:
    idle = {"op": "combine", "name": "C1.two", "status": "not_run"}
    return {"device": "cuda", "environment": JANUARY, "rows": [*(rows or [timed("D1.fixed", 200.0)]), idle], **changes}


def predicted(op: str, name: str, gpu: str) -> dict[str, Any]:
    return {"us": 220.0} if name == "D1.fixed" else {"reason": "unknown"}


def test_rows_that_ran_are_appended_once_with_their_machine_and_prediction(tmp_path: Path) -> None:
    assert append(document(), tmp_path, predicted) == 1
    assert append(document(), tmp_path, lambda op, name, gpu: {"us": 210.0}) == 0  # the clock has learned since
    assert append(document(environment=FEBRUARY), tmp_path, predicted) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["h200"]
    stored = [json.loads(line) for line in (tmp_path / "h200" / "dense_decode.jsonl").read_text().splitlines()]
    assert [(line["environment"]["date"], line["clock"]) for line in stored] == [
        (JANUARY["date"], {"us": 220.0}),
        (FEBRUARY["date"], {"us": 220.0}),
    ]
    assert not (tmp_path / "h200" / "combine.jsonl").exists()


def test_a_lost_row_is_kept_without_a_prediction(tmp_path: Path) -> None:
    append(document({"op": "dense_decode", "name": "D1.fixed", "status": "hung", "reason": "in step cold"}), tmp_path, predicted)
    (line,) = (tmp_path / "h200" / "dense_decode.jsonl").read_text().splitlines()
    assert json.loads(line).keys() == {"environment", "op", "name", "status", "reason"}
    assert table(tmp_path) == NOTHING


@pytest.mark.parametrize("changes", [{"device": "model"}, {"environment": {"gpu": None}}, {"device": "cuda", "environment": {}}])
def test_what_was_not_measured_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="supported: one of `profile --device cuda`"):
        append(document(**changes), tmp_path, predicted)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gpu", "folder"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("H800", "h800")])
def test_folders_are_named_after_gpus(gpu: str, folder: str) -> None:
    assert folder_name(gpu) == folder
    with pytest.raises(ValueError, match="supported"):
        folder_name("NVIDIA")


def test_the_table_has_the_latest_of_each_row_with_error_and_peers(tmp_path: Path) -> None:
    append(document(environment=FEBRUARY), tmp_path, predicted)
    append(document(timed("D8.s1", 150.0), timed("D1.fixed", 250.0, FlashMLA=0.9, FA3=1.234)), tmp_path, predicted)
    assert table(tmp_path).splitlines()[2:] == [
        "| D1.fixed | NVIDIA H200 | 200 | 220 | +10% |  |",
        "| D8.s1 | NVIDIA H200 | 150 |  |  |  |",
    ]
    march = {**FEBRUARY, "date": "2026-03-01T00:00:00Z"}
    append(document(timed("D1.fixed", 250.0, FlashMLA=0.9, FA3=1.234), environment=march), tmp_path, predicted)
    assert table(tmp_path).splitlines()[2] == "| D1.fixed | NVIDIA H200 | 250 | 220 | -12% | FA3 1.23, FlashMLA 0.90 |"


def test_a_row_or_a_gpu_that_the_clock_does_not_know_has_no_prediction() -> None:
    assert clock_prediction("dense_decode", "D1.fixed", "NVIDIA A100") == {"reason": "the clock does not know NVIDIA A100"}
    assert clock_prediction("dense_decode", "D99.none", "NVIDIA H200") == {"reason": "the clock does not know D99.none"}
    assert clock_prediction("merge_states", "C2.decode", "NVIDIA H200")["us"] > 0


def test_the_page_has_the_table_of_the_stored_rows() -> None:
    text = PAGE.read_text()
    assert with_table(text, table()) == text
    assert ("nothing has been timed" in (ROOT / "README.md").read_text()) == (table() == NOTHING) == (not RESULTS.exists())


def test_rows_come_before_constants_and_the_table_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machines, page, steps = tmp_path / "machines.toml", tmp_path / "page.md", list[str]()
    machines.write_text(results.MACHINES.read_text())
    page.write_text(f"before\n{BEGIN}{NOTHING}{END}\nafter\n")
    (tmp_path / "a.jsonl").write_text("\n".join(lines(cvt_bf16x2_f32_rate=4.0)))
    (tmp_path / "b.json").write_text(json.dumps(document()))

    def stored(document: dict[str, Any]) -> int:
        steps.append("measured" if "[measured.H200]" in machines.read_text() else "not yet")
        return append(document, tmp_path / "results", predicted)

    monkeypatch.setattr(results, "append", stored)
    monkeypatch.setattr(results, "table", lambda: table(tmp_path / "results"))
    monkeypatch.setattr(results, "MACHINES", machines)
    monkeypatch.setattr(results, "PAGE", page)
    assert main([str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")]) == 0
    assert steps == ["not yet"]
    assert "[measured.H200]\nconvert_clocks = { value = 4," in machines.read_text()
    assert page.read_text().startswith(f"before\n{BEGIN}| row |")
    assert page.read_text().endswith(f"| +10% |  |\n{END}\nafter\n")
    assert main([str(tmp_path / "none.json")]) == 1
