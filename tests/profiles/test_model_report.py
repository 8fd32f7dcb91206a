"""Predicted beside measured, once something was measured. The times here are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cute_mla.profiles.model.report import against, between, markdown, measured_us, model_of
from cute_mla.profiles.roofline import GPUS, roof
from cute_mla.profiles.rows import Case, load

MADE_UP = "NVIDIA H200"


@pytest.fixture
def case() -> Case:
    return next(case for case in load("dense_decode") if case.name == "D1.fixed")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder of results with rows that nobody has measured."""
    rows = [
        {"name": "D1.fixed", "status": "timed", "cold_us": {"median": 999.0}, "environment": {"gpu": MADE_UP}},
        {"name": "D1.fixed", "status": "timed", "cold_us": {"median": 230.0}, "environment": {"gpu": MADE_UP}},
        {"name": "D1.fixed", "status": "wrong", "environment": {"gpu": MADE_UP}},
        {"name": "D2.fixed", "status": "timed", "cold_us": {"median": 400.0}, "environment": {"gpu": MADE_UP}},
    ]
    file = tmp_path / "h200" / "dense_decode.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_latest_time_of_a_row_on_its_gpu(case: Case, results: Path, tmp_path: Path) -> None:
    assert measured_us(case, "H200", results) == 230.0
    assert measured_us(case, "H100", results) is None
    assert measured_us(case, "H200", tmp_path / "nothing") is None


def test_a_time_outside_the_prediction_has_an_error(case: Case, results: Path) -> None:
    row = model_of(case, "H200", results)
    assert row["measured_us"] == 230.0
    limit_us = roof(case.work, GPUS["H200"]).us
    assert row["fraction_of_roof"] == [limit_us / row["high_us"], limit_us / row["low_us"]]
    assert row["error"] == pytest.approx(230.0 / row["high_us"] - 1)
    assert row["error"] > 0.01


@pytest.mark.parametrize(("measured", "error"), [(150.0, 0.0), (90.0, -0.1), (240.0, 0.2), (100.0, 0.0)])
def test_errors_are_relative_to_the_nearer_end(measured: float, error: float) -> None:
    assert against(measured, 100.0, 200.0) == {"measured_us": measured, "error": pytest.approx(error)}


def test_nothing_measured_has_no_error(case: Case, tmp_path: Path) -> None:
    row = model_of(case, "H200", tmp_path)
    assert (row["measured_us"], row["error"]) == (None, None)
    json.dumps(row, allow_nan=False)


def test_a_row_without_a_model_says_why(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(case, dtype="fp16")
    assert model_of(odd, "H200", tmp_path)["reason"].startswith("the instructions of dense_decode_sm90_fp16_cluster2 are not recorded")
    assert "are not recorded" in markdown([odd], "H200")


def test_the_table_of_the_notes(case: Case) -> None:
    lines = markdown([case], "H200").splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| D1.fixed | b128 L4096 h128 s1 | 185 | ")
    assert lines[2].endswith("| 210 |")
    assert (between(1.0, 1.0), between(52.34, 81.2), between(99.9, 1234.5)) == ("1", "52.3 to 81.2", "99.9 to 1,234")
