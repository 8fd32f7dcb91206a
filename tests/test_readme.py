"""The README against what is there: files, links, options and public names that it mentions exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import click
import pytest

import cute_mla

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_files_that_are_named_exist() -> None:
    linked = re.findall(r"\]\((?!#|http)([^)]+)\)", TEXT)
    named = re.findall(r"`((?:\w+/)+\w+\.(?:md|py|sh))\b", TEXT)
    assert len(linked) + len(named) >= 5
    for path in [*linked, *named]:
        assert (ROOT / path).is_file(), path


def test_anchors_lead_to_headings() -> None:
    titles = re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    headings = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    anchors = set(re.findall(r"\]\(#([^)]+)\)", TEXT))
    assert anchors
    assert anchors <= headings


@pytest.mark.parametrize("line", re.findall(r"^\| `cute-mla (.+?)` \|", TEXT, re.MULTILINE))
def test_options_of_commands_exist(line: str) -> None:
    name = line.split()[0]
    command: click.Command = getattr(import_module(f"cute_mla.cli.{name}"), name)
    options = {option: param for param in command.params for option in param.opts}
    mentioned = re.findall(r"--[a-z-]+", line)
    assert set(mentioned) <= set(options)
    for option, values in re.findall(r"(--[a-z-]+) ([a-z0-9]+(?:\\\|[a-z0-9]+)+)", line):
        choice = options[option].type
        assert isinstance(choice, click.Choice)
        assert set(values.split("\\|")) <= set(choice.choices)


def test_every_command_is_listed() -> None:
    commands = import_module("cute_mla.cli").commands
    listed = re.findall(r"^\| `cute-mla (\w+)", TEXT, re.MULTILINE)
    assert sorted(listed) == sorted(commands.list_commands(click.Context(commands)))


def test_public_names_that_are_used_exist() -> None:
    used = set(re.findall(r"cute_mla\.([a-z_]+)\(", TEXT))
    assert {"simulate", "workspace_size", "get_mla_metadata", "flash_mla_with_kvcache"} <= used
    for name in used:
        assert callable(getattr(cute_mla, name))


def test_names_that_are_imported_exist() -> None:
    imports = re.findall(r"^from (cute_mla[.\w]*) import (.+)$", TEXT, re.MULTILINE)
    assert "cute_mla.layer" in dict(imports)
    for module, names in imports:
        for name in names.split(", "):
            assert callable(getattr(import_module(module), name))
