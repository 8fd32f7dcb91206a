"""The list of moved tests is up to date, and marks them."""

from __future__ import annotations

import subprocess
import sys

from tests.cover import tiers
from tests.support.tree import ROOT


def test_listed_tests_exist_and_are_marked_slow() -> None:
    """If not: a test was renamed, so choose again."""
    files = sorted({test.partition("::")[0] for test in tiers.moved()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "slow", *files]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert tiers.moved() <= set(result.stdout.splitlines())


def test_only_sets_of_parameters_of_the_rooms_are_listed() -> None:
    assert all(map(tiers.may_move, tiers.moved() | tiers.notices().keys()))
    assert not tiers.moved() & tiers.notices().keys()
