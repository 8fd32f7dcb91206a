"""Snippets of the README and of docs/: Python and `cute-mla` commands run as printed, page by page and in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_mla
from tests.support.documents import DOCUMENTS, README, Snippet, execute, name_of, runs_inside_simulate, snippets
from tests.support.tree import ROOT

# Snippets that are not run, by the reason that stands above them. A snippet gets a reason only if it cannot run here.
NOT_RUN = {
    "needs a GPU": 2,
    "needs an engine": 3,
    "needs a checkpoint": 4,
    "needs transformers, run by make test-transformers": 5,
    "needs kernels, run by make test-transformers": 2,
    "builds kernels": 1,
    "names a kernel to be written": 2,
}
RUN = {"python": 61, "bash": 9, "text": 1}
OTHER_PROGRAMS = {"make", "pip", "vllm", "python", "profiles/on_gpu.sh"}

ALL = [(document, snippet) for document in DOCUMENTS for snippet in snippets(document)]


def runnable(document: Path) -> list[Snippet]:
    return [snippet for snippet in snippets(document) if snippet.language in ("python", "bash") and snippet.reason is None]


def commands(snippet: Snippet) -> list[list[str]]:
    """Return the words of every command of a shell snippet, without comments."""
    return [words for line in snippet.text.replace("\\\n", "").splitlines() if (words := shlex.split(line, comments=True))]


def test_the_snippets_are_counted() -> None:
    assert Counter(snippet.reason for _, snippet in ALL if snippet.reason) == NOT_RUN
    assert Counter(snippet.language for _, snippet in ALL if not snippet.reason) == RUN


def test_no_code_hides_in_an_indented_block() -> None:
    for document in DOCUMENTS:
        assert not re.findall(r"\n\n {4,}(?:cute-mla|make|pip|python|import|from) .*", document.read_text()), name_of(document)


@pytest.mark.parametrize("document", [each for each in DOCUMENTS if runnable(each)], ids=name_of)
def test_snippets_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Run Python and commands of a document in their order and in one folder, so that commands find the files that Python wrote.

    README's run with the kernels that `make quick` builds.
    """
    if document == README:
        request.getfixturevalue("quick_kernels_only")
    if torch.cuda.is_available() and any(snippet.language == "python" for snippet in runnable(document)):
        pytest.skip("the snippets make CPU tensors")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippets"}
    device = cute_mla.simulate("sm90", sm_count=8) if runs_inside_simulate(document) else nullcontext()
    with torch.random.fork_rng(devices=[]), device:
        for snippet in runnable(document):
            if snippet.language == "bash":
                run_commands(snippet)
                continue
            execute(document, snippet, names)
            assert capsys.readouterr().out == (snippet.printed or ""), f"{name_of(document)}:{snippet.line}"
            for name, value in names.items():
                if isinstance(value, torch.Tensor) and name in ("out", "lse"):
                    assert bool(torch.isfinite(value.float()).all()), f"{name} of {name_of(document)}:{snippet.line}"


def run_commands(snippet: Snippet) -> None:
    """Run the `cute-mla` commands of a snippet in the current folder. Each must succeed, and print what the document shows behind them."""
    printed = ""
    for words in commands(snippet):
        if words[0] == "cute-mla":
            run = [sys.executable, "-m", "cute_mla", *words[1:]]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            result = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=300, check=False)
            assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout}{result.stderr}"
            printed += result.stdout
    assert snippet.printed is None or printed == snippet.printed


def test_other_programs_are_known() -> None:
    """Commands of other programs do not run. Targets of make and scripts exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document, snippet in ALL:
        for words in commands(snippet) if snippet.language == "bash" else []:
            assert words[0] in {"cute-mla", *OTHER_PROGRAMS}, f"{words[0]} in {name_of(document)}:{snippet.line}"
            if words[0] == "make":
                assert words[1] in targets
            if "/" in words[0]:
                assert (ROOT / words[0]).is_file()
