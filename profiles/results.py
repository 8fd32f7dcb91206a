"""Store of measurements, and what is learned from them.

    python -m cute_mla.profiles.results FILE...      run from the tree

FILE.json, a document of `profile --device cuda --json`: its rows are appended to results/<gpu>/<op>.jsonl, each with the time that the
clock predicted before it knew this run. FILE.jsonl, lines of microbenchmarks: constants of the clock in definitions/machines.toml.
The table of docs/performance.md follows from the stored rows, which are never changed or removed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .clock.constants import FILE as MACHINES
from .clock.constants import constants, gpu_of_device
from .measured_constants import Measured, measured_constants, with_measured
from .rows import RESULTS, by_priority, every_case, load

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- begin: python -m cute_mla.profiles.results -->\n", "<!-- end -->"
NOTHING = "No row has been measured.\n"


def folder_name(gpu: str) -> str:
    """Return the folder of a GPU: "h200" for "NVIDIA H200"."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().replace("nvidia", "")).strip("-")
    if not name:
        raise ValueError(f"gpu is {gpu!r}; supported: a name with letters or digits besides NVIDIA")
    return name


def clock_prediction(op: str, name: str, gpu: str) -> dict[str, Any]:
    """Return what the clock predicts of a row on a GPU with this name."""
    from .clock.rows import clock_of

    known = gpu_of_device(gpu)
    case = next((case for case in load(op) if case.name == name), None)
    if known is None or case is None:
        return {"reason": f"the clock does not know {name if known else gpu}"}
    return clock_of(case, known)


def append(document: dict[str, Any], folder: Path = RESULTS, predict: Callable[[str, str, str], dict[str, Any]] = clock_prediction) -> int:
    """Append the rows that were run, each with its environment and prediction; return the number of new rows.

    ValueError for a document that holds no measurements.
    """
    gpu = document.get("environment", {}).get("gpu")
    if document.get("device") != "cuda" or not gpu:
        raise ValueError(f"got a document of device {document.get('device')!r}; supported: one of `profile --device cuda`")
    added = 0
    for row in document["rows"]:
        if row["status"] == "not_run":
            continue
        file = folder / folder_name(gpu) / f"{row['op']}.jsonl"
        new = {"environment": document["environment"], **row}
        if file.is_file() and any(_measurement(json.loads(line)) == _measurement(new) for line in file.read_text("utf-8").splitlines()):
            continue
        if row["status"] == "timed":
            new["clock"] = predict(row["op"], row["name"], gpu)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(new, sort_keys=True) + "\n")
        added += 1
    return added


def _measurement(row: dict[str, Any]) -> dict[str, Any]:
    """Return a stored row without its prediction."""
    return {name: value for name, value in row.items() if name != "clock"}


def _latest(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the latest timing of each row on each GPU, by GPU and priority."""
    cases = by_priority(every_case())
    for gpu in sorted(folder.glob("*/")):
        stored = [json.loads(line) for file in gpu.glob("*.jsonl") for line in file.read_text("utf-8").splitlines()]
        timed = sorted((row for row in stored if row["status"] == "timed"), key=lambda row: row["environment"]["date"])
        latest = {row["name"]: row for row in timed}
        yield from (latest[case.name] for case in cases if case.name in latest)


def table(folder: Path = RESULTS) -> str:
    """Return the measured rows as Markdown: time, the clock's prediction and its error, and the peers of the same run."""
    lines = []
    for row in _latest(folder):
        us, clock = row["cold_us"]["median"], row.get("clock", {}).get("us")
        error = f"{clock / us - 1:+.0%}" if clock else ""
        peers = [f"{name} {peer['ratio']['median']:.2f}" for name, peer in sorted(row["peers"].items()) if peer["status"] == "timed"]
        cells = [row["name"], row["environment"]["gpu"], f"{us:.4g}", f"{clock:.4g}" if clock else "", error, ", ".join(peers)]
        lines.append(f"| {' | '.join(cells)} |\n")
    if not lines:
        return NOTHING
    return "| row | GPU | measured, us | by the clock | error | ours over theirs |\n|---|---|---|---|---|---|\n" + "".join(lines)


def with_table(text: str, block: str) -> str:
    """Return the page with this block."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + block + END + rest.partition(END)[2]


def learn(measured: Measured) -> None:
    """Write constants to definitions/machines.toml, and print each beside the one it replaces."""
    before = {end: constants(measured.gpu, end) for end in ("value", "fast", "slow")}
    for name, (value, source) in measured.entries.items():
        nominal, *ends = (getattr(before[end], name) for end in before)
        outside = "" if min(ends) <= value <= max(ends) else ", outside its range"
        print(f"{name}: {value} instead of {nominal} ({min(ends)} to {max(ends)}){outside}: {source}")
    for name, value in measured.refused.items():
        print(f"{name}: {value:.4g} is refused; supported: a positive value", file=sys.stderr)
    MACHINES.write_text(with_measured(MACHINES.read_text("utf-8"), measured), "utf-8")


def main(files: list[str]) -> int:
    """Take rows, then constants, then write the table. Return 0 if all files held measurements, else 1."""
    for name in sorted(files, key=lambda name: name.endswith(".jsonl")):  # predictions do not yet know the constants
        try:
            text = Path(name).read_text(encoding="utf-8")
            if name.endswith(".jsonl"):
                learn(measured_constants(text.splitlines()))
            else:
                print(f"{name}: {append(json.loads(text))} rows added")
        except (OSError, ValueError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
    PAGE.write_text(with_table(PAGE.read_text("utf-8"), table()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
