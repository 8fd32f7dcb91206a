"""Tiers: which tests `make test-full` alone runs because others reach the same in the kernels. full_only.toml lists them."""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("full_only.toml")
# Rooms whose parametrised tests launch kernels through the API, or plant bugs in them; others have no twin.
ROOMS = ("tests/ops/", "tests/api/", "tests/layer/", "tests/mutation/test_planted_bugs.py")
NOTICES = "notices"  # the table of tests that stay, with the broken kernel that only they notice

_HEAD = """\
# Tests that only `make test-full` runs: other tests of the same functions reach the same in the kernels (tests/cover).
# `python -m tests.cover choose` writes this file; the table "notices" is kept: tests that stay, since they alone notice a broken kernel.
"""


def may_move(test: str) -> bool:
    """Return whether a test may move to `make test-full`: a set of parameters in one of the rooms."""
    return test.startswith(ROOMS) and "[" in test


@cache
def moved() -> frozenset[str]:
    """Return the tests that only `make test-full` runs, as the file had them first."""
    return read_moved()


def read_moved() -> frozenset[str]:
    """Return the tests that the file lists."""
    tables = _tables()
    files = ((file, table) for file, table in tables.items() if file != NOTICES)
    return frozenset(f"{file}::{function}[{ids}]" for file, table in files for function, sets in table.items() for ids in sets)


def notices() -> dict[str, str]:
    """Return tests that stay, each with a broken kernel that only it notices."""
    return dict(_tables().get(NOTICES, {}))


def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


def write(tests: Iterable[str], alone: Mapping[str, str]) -> None:
    """Write the list of moved tests, and the tests that stay for what they alone notice."""
    files: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test in sorted(tests):
        file, _, name = test.partition("::")
        function, _, ids = name.partition("[")
        files[file][function].append(ids.removesuffix("]"))
    lines = [_HEAD, f"[{NOTICES}]", *(f"{json.dumps(test)} = {json.dumps(kernel)}" for test, kernel in sorted(alone.items()))]
    for file, functions in files.items():
        lines.append(f"\n[{json.dumps(file)}]")
        for function, sets in functions.items():
            lines += [f"{function} = [", *_wrapped(f"{json.dumps(ids)}," for ids in sets), "]"]
    FILE.write_text("\n".join(lines) + "\n")


def _wrapped(words: Iterable[str]) -> Iterator[str]:
    """Yield lines of words, indented."""
    line = "   "
    for word in words:
        if len(line) + len(word) > 139:
            yield line
            line = "   "
        line += f" {word}"
    yield line
