"""The snippets of docs/transformers.md run as printed, in order, and print what the page shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.documents import execute, snippets
from tests.support.tree import ROOT

PAGE = ROOT / "docs" / "transformers.md"
REASON = "needs transformers, run by make test-transformers"


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "snippets"}
    ours = [snippet for snippet in snippets(PAGE) if snippet.reason == REASON]
    assert len(ours) == 5
    with torch.random.fork_rng(devices=[]):
        for snippet in ours:
            execute(PAGE, snippet, names)
            assert capsys.readouterr().out == (snippet.printed or ""), f"line {snippet.line}"
