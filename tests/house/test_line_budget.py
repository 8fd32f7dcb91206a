"""No room has more lines than its budget."""

from __future__ import annotations

from pathlib import Path

from tests.house.line_budget import beyond, lines_of_rooms, read
from tests.support.tree import ROOT


def test_rooms_keep_their_budgets() -> None:
    lines, budgets = lines_of_rooms(ROOT), read()
    assert beyond(lines, budgets) == []
    assert budgets.keys() <= lines.keys(), "a room of line_budget.toml is gone"


def test_a_room_beyond_its_budget_is_named(tmp_path: Path) -> None:
    for name in ("tests/conftest.py", "tests/ops/dense/test_a.py", "tests/ops/test_b.py", "cli/a/b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("a = 1\n" * 3)
    (tmp_path / "cute_mla").mkdir()
    (tmp_path / "cute_mla" / "cli").symlink_to(tmp_path / "cli")
    lines = lines_of_rooms(tmp_path)
    assert lines == {"tests": 3, "tests/ops": 6, "cli": 3}
    first, second = beyond(lines, {"tests": 2, "tests/ops": 6})
    assert first.startswith("cli: 3 lines, budget: 0;")
    assert second == "tests: 3 lines, budget: 2; remove some, or raise it in line_budget.toml and say why in the commit"
