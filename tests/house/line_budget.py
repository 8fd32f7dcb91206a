"""Lines of Python that each room may have: line_budget.toml.

python -m tests.house.line_budget   prints the lines of each room, and writes them, plus 5 %, as the new budgets
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.support.tree import ROOT

FILE = Path(__file__).with_suffix(".toml")
PACKAGES = ("aot_build", "cli", "cute_mla", "examples", "profiles", "tests")
SPLIT = ("cute_mla", "tests")  # packages of which each folder is a room of its own
ALLOWANCE = 1.05
HEAD = """\
# Lines of Python that each room may have. A commit that raises a budget says why.
# `python -m tests.house.line_budget` writes the lines of today plus 5 %.

"""


def room_of(path: Path) -> str:
    """Return the room of a file in the tree: its package, or the folder in a package that is split."""
    package, *rest = path.parts
    return f"{package}/{rest[0]}" if package in SPLIT and len(rest) > 1 else package


def lines_of_rooms(root: Path) -> Counter[str]:
    """Count the lines of Python of each room. The links of cute_mla are not followed."""
    counts = Counter[str]()
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            counts[room_of(path.relative_to(root))] += len(path.read_text().splitlines())
    return counts


def read() -> dict[str, int]:
    """Return the budgets of the rooms."""
    return tomllib.loads(FILE.read_text())


def beyond(lines: Mapping[str, int], budgets: Mapping[str, int]) -> list[str]:
    """Return a text for each room with more lines than its budget, or without one."""
    return [
        f"{room}: {count} lines, budget: {budgets.get(room, 0)}; remove some, or raise it in {FILE.name} and say why in the commit"
        for room, count in sorted(lines.items())
        if count > budgets.get(room, 0)
    ]


def main() -> None:
    """Print the lines of each room, and write the new budgets."""
    lines = lines_of_rooms(ROOT)
    budgets = read() if FILE.exists() else {}
    for room, count in sorted(lines.items()):
        print(f"{room:24}{count:8}, budget was {budgets.get(room, 0)}")
    print(f"{'all':24}{lines.total():8}")
    FILE.write_text(HEAD + "".join(f'"{room}" = {int(count * ALLOWANCE)}\n' for room, count in sorted(lines.items())))


if __name__ == "__main__":
    main()
