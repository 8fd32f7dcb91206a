"""Keeping measurements: appended once, with their machine, never for a document that measured nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cute_mla.profiles.results import append, folder_name


def document(**changes: Any) -> dict[str, Any]:
    timed = {"op": "dense_decode", "name": "D1.fixed", "status": "timed", "tflops": 600.0}
    rows = [timed, {"op": "combine", "name": "C1", "status": "not_run"}]
    return {"device": "cuda", "environment": {"gpu": "NVIDIA H200", "date": "2026-01-01T00:00:00Z"}, "rows": rows, **changes}


def test_rows_that_ran_are_appended_once_with_their_machine(tmp_path: Path) -> None:
    assert append(document(), tmp_path) == 1
    assert append(document(), tmp_path) == 0
    later = {"gpu": "NVIDIA H200", "date": "2026-01-02T00:00:00Z"}
    assert append(document(environment=later), tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["h200"]
    lines = [json.loads(line) for line in (tmp_path / "h200" / "dense_decode.jsonl").read_text().splitlines()]
    assert [line["environment"]["date"] for line in lines] == ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]
    assert not (tmp_path / "h200" / "combine.jsonl").exists()


@pytest.mark.parametrize("changes", [{"device": "model"}, {"environment": {"gpu": None}}, {"device": "cuda", "environment": {}}])
def test_what_was_not_measured_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="supported: one of `profile --device cuda`"):
        append(document(**changes), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("gpu", "folder"), [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("H800", "h800")])
def test_folders_are_named_after_gpus(gpu: str, folder: str) -> None:
    assert folder_name(gpu) == folder
    with pytest.raises(ValueError, match="supported"):
        folder_name("NVIDIA")
