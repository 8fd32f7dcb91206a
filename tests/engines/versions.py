"""The versions of engines that the adapters were tested with, and the table of them in docs/engines.md.

python -m tests.engines.versions      # in an environment of vLLM: runs its tests, keeps their result, and writes the table
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tests.engines.sglang_interface import RECORDS
from tests.support.tree import ROOT

RESULTS = Path(__file__).with_name("vllm_versions.json")
PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- begin: python -m tests.engines.versions -->\n", "<!-- end -->"
COUNTS = ("tests", "failures", "errors", "skipped")


def run() -> int:
    """Run the tests of the vLLM adapter in this environment and keep their result. Returns pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "tests/engines/vllm_adapter", f"--junitxml={report}"], check=False, cwd=ROOT
        )
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in COUNTS}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[version("vllm")] = {"torch": version("torch"), **counts}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    return status.returncode


def table() -> str:
    """Return the table of the versions, newest first."""
    results = json.loads(RESULTS.read_text())
    rows = ["| engine | tested by | result |", "|---|---|---|"]
    for name in sorted(results, key=_order, reverse=True):
        counts = results[name]
        bad = counts["failures"] + counts["errors"]
        good = counts["tests"] - bad - counts["skipped"]
        how = f"`make test-vllm VLLM={name}`, beside torch {counts['torch']}"
        rows.append(f"| vLLM {name} | {how} | {good} of {counts['tests']} tests pass{': not supported' if bad else ''} |")
    rows += [f"| SGLang {name} | interface recorded from its wheel, `make test` | the adapter uses nothing else |" for name in _recorded()]
    return "\n".join(rows) + "\n"


def _recorded() -> list[str]:
    return sorted((path.stem for path in RECORDS.glob("*.json")), key=_order, reverse=True)


def _order(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split("."))


def write_table() -> None:
    """Put the table into its page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    outcome = run()
    write_table()
    sys.exit(outcome)
