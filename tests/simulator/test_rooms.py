"""The simulator's rooms: each imports only the rooms below it, so that its files form no circle."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cute_mla.simulator

ROOT = Path(cute_mla.simulator.__file__).parent
ROOMS = (
    "findings",
    "numerics",
    "frontend",
    "state",
    "checks",
    "units",
    "isa",
    "codegen",
    "sass",
    "engine",
    "cute_dsl",
)  # from the ground up


def imported_rooms(source: str) -> set[str]:
    """Return the rooms of the simulator that a file of a room imports, those for types and inside functions too."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 2:
            rooms |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cute_mla.simulator"):
            rooms.add("an absolute import")
    return rooms


def upward(room: str, source: str) -> set[str]:
    """Return the rooms that a file imports and that are not below its own."""
    return imported_rooms(source) - set(ROOMS[: ROOMS.index(room)])


@pytest.mark.parametrize("room", ROOMS[1:])
def test_a_room_imports_only_rooms_below(room: str) -> None:
    found = {path.name: up for path in sorted((ROOT / room).glob("*.py")) if (up := upward(room, path.read_text()))}
    assert not found


def test_the_simulator_imports_nothing_of_the_rest_of_the_package() -> None:
    """Find imports that would keep the folder from being a library of its own."""
    outside = {
        path.name
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and (node.level > len(path.relative_to(ROOT).parts) or (node.module or "").startswith("cute_mla"))
    }
    assert not outside


def test_only_one_room_imports_the_dsl() -> None:
    """Find imports that would make a simulator of PTX and cubins need CuTe DSL."""
    importing = {
        path.relative_to(ROOT).parts[0]
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(name.startswith("cutlass") for name in (getattr(node, "module", None) or "", *(alias.name for alias in node.names)))
    }
    assert importing == {"cute_dsl"}


def test_every_file_stands_in_a_room() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(ROOMS[1:])
    assert {path.stem for path in ROOT.glob("*.py")} == {"__init__", "findings"}


@pytest.mark.parametrize(
    "source",
    [
        "from ..engine.machine import run",
        "from .. import isa",
        "if TYPE_CHECKING:\n    from ..checks import order",
        "def late():\n    from ..units.copies import issue",
        "from cute_mla.simulator.state.cta import Cta",
    ],
)
def test_an_import_that_points_up_is_found(source: str) -> None:
    assert upward("state", source)
