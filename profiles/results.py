"""Keeping measurements: rows of a `profile --device cuda --json FILE` are appended to results/<gpu>/<op>.jsonl.

Run in the tree as `python -m cute_mla.profiles.results FILE...`; nothing is ever changed or removed there.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def folder_name(gpu: str) -> str:
    """ "NVIDIA H200" as "h200"."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")
    if not name:
        raise ValueError(f"gpu is {gpu!r}; supported: a name with letters or digits besides NVIDIA")
    return name


def append(document: dict[str, Any], folder: Path = RESULTS) -> int:
    """Appends the rows that were run, each with the machine it ran on, and returns how many were new.

    ValueError for a document that holds no measurements."""
    if document.get("device") != "cuda" or not document.get("environment", {}).get("gpu"):
        raise ValueError(f"got a document of device {document.get('device')!r}; supported: one of `profile --device cuda`")
    added = 0
    for row in document["rows"]:
        if row["status"] == "not_run":
            continue
        file = folder / folder_name(document["environment"]["gpu"]) / f"{row['op']}.jsonl"
        line = json.dumps({"environment": document["environment"], **row}, sort_keys=True)
        if file.is_file() and line in file.read_text(encoding="utf-8").splitlines():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
        added += 1
    return added


def main(files: list[str]) -> int:
    """Appends the documents in some files; 0 if all held measurements, else 1."""
    for name in files:
        try:
            added = append(json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {added} rows added")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
