"""Records of the cover: one JSON line a test, in one file a process, so that a run that stops loses nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

Reached = dict[str, set[str]]  # elements by structure, or by test function and architecture
Element = tuple[str, str]


@dataclass(frozen=True)
class CoverRecord:
    """Record of a test. seconds: CPU time, of which translation is the part that translates kernels. slow: marked so in its file."""

    test: str
    seconds: float
    translation: float
    reached: Mapping[str, set[str]]
    slow: bool

    @property
    def elements(self) -> set[Element]:
        """Return everything that the test reaches; all but blocks, once for every dtype of its cases."""
        found = set()
        for group, items in self.reached.items():
            types = [item for item in items if item.startswith("dtype=")] or [""]
            found |= {(group, item) for item in items if item.startswith("#")}
            found |= {(f"{group} {dtype}".rstrip(), item) for item in items if not item.startswith("#") for dtype in types}
        return found


def append(file: Path, record: CoverRecord) -> None:
    """Append a record to a file; make its folder first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    as_json = {**asdict(record), "reached": {group: sorted(items) for group, items in record.reached.items()}}
    with file.open("a") as stream:
        stream.write(json.dumps(as_json) + "\n")


def read(folder: Path) -> dict[str, CoverRecord]:
    """Return the records of a folder by test; the latest of each, by the age of the files."""
    found = {}
    for file in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in file.read_text().splitlines():
            raw = json.loads(line)
            reached = {group: set(items) for group, items in raw.pop("reached").items()}
            found[raw["test"]] = CoverRecord(reached=reached, **raw)
    return found
