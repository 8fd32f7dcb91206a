"""Predictions of the rows: recorded for the first of them, current, and beside what was measured. Measured times here are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_mla.profiles import predictions
from cute_mla.profiles.predictions import (
    BOARDS,
    END,
    SHOWN,
    against,
    board_cases,
    first_cases,
    line_gpu,
    measured_us,
    model_of,
    predicted,
    published_cases,
    record_of,
    recorded,
    tables,
)
from cute_mla.profiles.roofline import GPUS, roof
from cute_mla.profiles.rows import Case, every_case, load

MADE_UP = "NVIDIA H200"
AGAIN = "python -m cute_mla.profiles.predictions"
LIMIT = 0.02  # as of the golden clocks
# a launch over keys with a combine, two launches, a stream, and logits with a selection
SAMPLE = ("D12.h16", "K1.656_128")


@pytest.fixture
def case() -> Case:
    return next(case for case in load("dense_decode") if case.name == "D1.fixed")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder of results with rows that nobody has measured."""
    rows = [
        {"name": "D1.fixed", "status": "timed", "cold_us": {"median": 999.0}, "environment": {"gpu": MADE_UP}},
        {"name": "D1.fixed", "status": "timed", "cold_us": {"median": 260.0}, "environment": {"gpu": MADE_UP}},
        {"name": "D1.fixed", "status": "wrong", "environment": {"gpu": MADE_UP}},
        {"name": "D2.fixed", "status": "timed", "cold_us": {"median": 400.0}, "environment": {"gpu": MADE_UP}},
    ]
    file = tmp_path / "h200" / "dense_decode.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_latest_time_of_a_row_on_its_gpu(case: Case, results: Path, tmp_path: Path) -> None:
    assert measured_us(case, "H200", results) == 260.0
    assert measured_us(case, "H100", results) is None
    assert measured_us(case, "H200", tmp_path / "nothing") is None


def test_a_time_outside_the_prediction_has_an_error(case: Case, results: Path) -> None:
    row = model_of(case, "H200", results=results)
    assert row["measured_us"] == 260.0
    limit_us = roof(case.work, GPUS["H200"]).us
    assert row["fraction_of_roof"] == [limit_us / row["high_us"], limit_us / row["low_us"]]
    assert row["error"] == pytest.approx(260.0 / row["high_us"] - 1)
    assert row["error"] > 0.01


@pytest.mark.parametrize(("measured", "error"), [(150.0, 0.0), (90.0, -0.1), (240.0, 0.2), (100.0, 0.0)])
def test_errors_are_relative_to_the_nearer_end(measured: float, error: float) -> None:
    assert against(measured, 100.0, 200.0) == {"measured_us": measured, "error": pytest.approx(error)}


def test_nothing_measured_has_no_error(case: Case, tmp_path: Path) -> None:
    row = model_of(case, "H200", results=tmp_path)
    assert (row["measured_us"], row["error"]) == (None, None)
    json.dumps(row, allow_nan=False)


def test_the_first_rows_are_recorded_and_none_that_is_gone() -> None:
    first = {f"{case.name} {gpu}" for gpu in SHOWN for case in first_cases()}
    first |= {f"{case.name} {line_gpu(published.gpu)}" for case, published in published_cases()}
    first |= {f"{case.name} {gpu}" for gpu in BOARDS for case in board_cases(gpu)}
    assert first <= recorded().keys() <= {f"{case.name} {line_gpu(gpu)}" for gpu in GPUS for case in every_case()}, AGAIN


def test_the_tables_of_the_pages_are_current() -> None:
    for (page, begin), block in tables().items():
        assert page.read_text().partition(begin)[2].partition(END)[0] == block, f"{page.name}: {AGAIN}"


def check(name: str, gpu: str) -> None:
    """Run the clock on a row and compare its times with the recorded ones."""
    case = next(case for case in every_case() if case.name == name)
    before, after = (predicted(case, gpu, line) for line in (recorded()[f"{name} {line_gpu(gpu)}"], record_of(case, gpu)))
    for key in ("us", "low_us", "high_us"):
        assert after[key] == pytest.approx(before[key], rel=LIMIT), f"{name}: {key} is not as recorded; if that is meant: {AGAIN}"


@pytest.mark.parametrize("name", SAMPLE)
def test_rows_take_the_time_that_is_recorded(name: str) -> None:
    check(name, "H200")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["H200", "B200"])
@pytest.mark.parametrize("name", ["D1.fixed", "S3.h64", "P2.s512", "M2.2k", "X2.64x64k", "C1.two", "K3.656_128_h128", "X1.64x64k"])
def test_rows_of_each_kind_take_the_time_that_is_recorded(name: str, gpu: str) -> None:
    check(name, gpu)


def test_recording_keeps_other_rows_and_skips_current_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a row is that of its kernels and constants."""
    made: list[str] = []
    lines = {f"{case.name} H200": {"state": "old"} for case in every_case() if case.row != "M2"}
    monkeypatch.setattr(predictions, "FILE", tmp_path / "predictions.json")
    monkeypatch.setattr(predictions, "state_of", lambda case, gpu: recorded().get(f"{case.name} {gpu}", {}).get("state", "new"))

    def record(case: Case, gpu: str) -> dict[str, str]:
        made.append(case.name)
        return {"state": "new"}

    monkeypatch.setattr(predictions, "record_of", record)
    monkeypatch.setattr(predictions, "tables", dict)
    predictions.write(lines)
    try:
        predictions.main(["H200"])
        assert made == ["M2.8k", "M2.2k"]
        assert recorded() == {**lines, "M2.8k H200": {"state": "new"}, "M2.2k H200": {"state": "new"}}
        predictions.main(["H200"])
        assert len(made) == 2
    finally:
        recorded.cache_clear()


def test_a_row_that_is_not_recorded_is_predicted_where_that_is_asked_for(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = recorded()[f"{case.name} H200"]
    monkeypatch.setattr(predictions, "recorded", dict)
    monkeypatch.setattr(predictions, "record_of", lambda *_: line)
    assert model_of(case, "H200")["reason"] == f"not recorded; `profile --device model --gpu H200 --rows {case.name}` predicts it"
    assert model_of(case, "H200", live=True)["us"] == predicted(case, "H200", line)["us"]
