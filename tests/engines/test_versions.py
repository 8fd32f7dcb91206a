"""The table of tested versions in docs/engines.md, and what it says of the versions that the adapters name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_mla.engines import sglang, vllm
from tests.engines import versions
from tests.engines.sglang_interface import RECORDS


def test_the_table_is_that_of_the_results() -> None:
    """On failure: `make test-vllm`, which writes it."""
    text = versions.PAGE.read_text()
    assert text[text.index(versions.BEGIN) + len(versions.BEGIN) : text.index(versions.END)] == versions.table()


def test_the_version_that_the_adapter_names_passed_all_its_tests() -> None:
    results = json.loads(versions.RESULTS.read_text())
    supported = {name for name, counts in results.items() if not counts["failures"] + counts["errors"]}
    assert supported == {"0.33.0"}
    assert "vLLM 0.33." in str(vllm.__doc__)
    assert all(not results[name]["skipped"] for name in supported)


@pytest.mark.parametrize("name", [path.stem for path in RECORDS.glob("*.json")])
def test_versions_of_sglang_are_named(name: str) -> None:
    assert name in str(sglang.__doc__)


def test_rows_are_newest_first_and_failures_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counts = {"torch": "2.13.0", "tests": 10, "failures": 0, "errors": 0, "skipped": 1}
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"0.9.2": {**counts, "errors": 2}, "0.10.0": counts}))
    monkeypatch.setattr(versions, "RESULTS", results)
    lines = versions.table().splitlines()
    assert lines[2] == "| vLLM 0.10.0 | `make test-vllm VLLM=0.10.0`, beside torch 2.13.0 | 9 of 10 tests pass |"
    assert lines[3].endswith("| 7 of 10 tests pass: not supported |")
