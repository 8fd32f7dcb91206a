"""Store of measurements: appends the rows of `profile --device cuda --json FILE` to results/<gpu>/<op>.jsonl.

    python -m cute_mla.profiles.results FILE...      run from the tree

Stored rows are never changed or removed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def folder_name(gpu: str) -> str:
    """Return the folder of a GPU: "h200" for "NVIDIA H200"."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")
    if not name:
        raise ValueError(f"gpu is {gpu!r}; supported: a name with letters or digits besides NVIDIA")
    return name


def append(document: dict[str, Any], folder: Path = RESULTS) -> int:
    """Append the rows that were run, each with its environment; return the number of new rows.

    ValueError for a document that holds no measurements.
    """
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
    """Append the documents in some files. Return 0 if all of them held measurements, else 1."""
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
