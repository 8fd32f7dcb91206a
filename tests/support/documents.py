"""Documents for users, the README and the pages of docs/: their snippets, links and headings."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.tree import ROOT

README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [README, *PAGES]

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+?) -->\n)?"
    r"^```(?P<language>\w*)\n(?P<text>.*?)^```\n"
    r"(?:\n```text\n(?P<printed>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
_INSIDE_SIMULATE = "<!-- snippets run inside simulate -->"


@dataclass(frozen=True)
class Snippet:
    """A fenced block. line: number of its first line. reason: why it is not run, or None. printed: the output that it shows, or None."""

    language: str
    text: str
    line: int
    reason: str | None
    printed: str | None


def name_of(document: Path) -> str:
    """Return the path of a document inside the repository."""
    return document.relative_to(ROOT).as_posix()


def snippets(document: Path) -> list[Snippet]:
    """Return the fenced blocks of a document in their order. A block of output belongs to the block before it."""
    text = document.read_text()
    return [
        Snippet(found["language"], found["text"], text.count("\n", 0, found.start("text")) + 1, found["reason"], found["printed"])
        for found in _FENCE.finditer(text)
    ]


def execute(document: Path, snippet: Snippet, names: dict[str, Any]) -> None:
    """Run a Python snippet among these names. A traceback names the line of the document, and functions have their source there."""
    name = name_of(document)
    linecache.cache[name] = (0, None, document.read_text().splitlines(keepends=True), name)
    exec(compile("\n" * (snippet.line - 1) + snippet.text, name, "exec"), names)


def runs_inside_simulate(document: Path) -> bool:
    """Return whether the Python snippets of a document expect a simulated device around them, as the document says."""
    return _INSIDE_SIMULATE in document.read_text()


def prose(document: Path) -> str:
    """Return a document without its fenced blocks."""
    return _FENCE.sub("", document.read_text())


def links(document: Path) -> list[tuple[str, str]]:
    """Return (path, anchor) of every link to a file of the repository or within the document, as written; either may be empty."""
    return re.findall(r"\]\((?![a-z]+:)([^)#\s]*)#?([^)\s]*)\)", prose(document))


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as the repository's pages and the site make them."""
    titles = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
