"""The list of moved tests is up to date, and marks them."""

from __future__ import annotations

import subprocess
import sys

from tests.cover import tiers
from tests.support.tree import ROOT


def collected(*arguments: str) -> set[str]:
    """Return the tests that pytest collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return {line for line in result.stdout.splitlines() if "::" in line}


def test_listed_tests_exist_and_every_function_keeps_one() -> None:
    """If not: a test was renamed, so choose again."""
    listed = tiers.moved() | tiers.notices().keys()
    every = collected(*sorted({test.partition("::")[0] for test in listed}))
    assert listed <= every
    kept = {test.partition("[")[0] for test in every - tiers.moved()}
    assert {test.partition("[")[0] for test in tiers.moved()} <= kept
    assert not tiers.moved() & tiers.notices().keys()
    assert all(map(tiers.may_move, tiers.moved()))


def test_moved_tests_are_marked_slow() -> None:
    """The hook of tests/conftest.py does it."""
    test = min(tiers.moved())
    marked = collected(test.partition("::")[0], "-m", "not slow")
    assert test not in marked
    assert marked
