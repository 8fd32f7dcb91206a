"""The README and docs/commands.md against the tree: tables, options, targets and public names."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import click
import pytest

import cute_mla
from cute_mla.cli import served_models, support_table
from tests.support.documents import DOCUMENTS
from tests.support.tree import ROOT

ALL = "\n".join(document.read_text() for document in DOCUMENTS if "reference" not in document.parts)
COMMANDS = (ROOT / "docs" / "commands.md").read_text()


@pytest.mark.parametrize("line", re.findall(r"^\| `cute-mla (.+?)` \|", COMMANDS, re.MULTILINE))
def test_options_of_commands_exist(line: str) -> None:
    name = line.partition(" ")[0]
    command: click.Command = getattr(import_module(f"cute_mla.cli.{name}"), name)
    options = {option: param for param in command.params for option in param.opts}
    mentioned = re.findall(r"--[a-z-]+", line)
    assert set(mentioned) <= set(options)
    for option, values in re.findall(r"(--[a-z-]+) ([a-z0-9]+(?:\\\|[a-z0-9]+)+)", line):
        choice = options[option].type
        assert isinstance(choice, click.Choice)
        assert set(values.split("\\|")) <= set(choice.choices)


@pytest.mark.parametrize(
    ("what", "page", "printed"),
    [
        ("cute-mla show support", "docs/support.md", support_table.markdown),
        ("summary of cute-mla show support", "README.md", support_table.summary),
        ("cute-mla show models", "docs/models.md", served_models.markdown),
    ],
)
def test_the_tables_of_what_is_supported_are_the_ones_that_show_prints(what: str, page: str, printed: Callable[[], str]) -> None:
    """On failure: put what `cute-mla show` prints, or the summary, between the two comments."""
    text, begin, end = (ROOT / page).read_text(), f"<!-- begin: {what} -->\n", "<!-- end -->"
    assert text[text.index(begin) + len(begin) : text.index(end)] == printed()


def test_every_target_of_make_is_listed() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = set(re.findall(r"(?:`|^)make ([a-z-]+)", COMMANDS, re.MULTILINE))
    assert listed >= set(targets.split()) - {"setup", "clean"}
    contributing = re.findall(r"^    make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert contributing
    assert listed | set(contributing) <= set(targets.split())


def test_every_public_function_is_mentioned() -> None:
    for name in cute_mla.__all__:
        if not name.startswith("__"):
            assert re.search(rf"\b{name}\b", ALL), name


def test_every_command_is_listed() -> None:
    commands = import_module("cute_mla.cli").commands
    listed = re.findall(r"^\| `cute-mla (\w+)", COMMANDS, re.MULTILINE)
    assert sorted(listed) == sorted(commands.list_commands(click.Context(commands)))


def test_public_names_that_are_used_exist() -> None:
    used = set(re.findall(r"cute_mla\.([a-z_]+)\(", ALL))
    assert {"simulate", "workspace_size", "get_mla_metadata", "flash_mla_with_kvcache"} <= used
    for name in used:
        assert callable(getattr(cute_mla, name))


def test_names_that_are_imported_exist() -> None:
    imports = re.findall(r"^from (cute_mla[.\w]*) import (.+)$", ALL, re.MULTILINE)
    assert "cute_mla.layer" in dict(imports)
    for module, names in imports:
        if module.startswith("cute_mla.integrations."):
            continue  # needs another package: `make test-transformers` runs these snippets
        for name in names.split(", "):
            found = getattr(import_module(module), name)
            assert callable(found) or isinstance(found, ModuleType)
