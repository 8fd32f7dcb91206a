"""The README against the tree.

Files, links, options and public names that it mentions exist, its tables are generated, and its first example runs.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import click
import pytest
import torch

import cute_mla
from cute_mla.cli.support_table import markdown
from cute_mla.spec.cache_format import FORMATS, CacheFormat
from cute_mla.spec.mla import D_LATENT, ELEMENT_BYTES
from tests.support.tree import ROOT

TEXT = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_files_that_are_named_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    linked = re.findall(r"\]\((?!#|http)([^)]+)\)", text)
    named = re.findall(r"`((?:\w+/)+\w+\.(?:md|py|sh|toml))\b", text)
    assert len(linked) + len(named) >= (5 if document != "CHANGELOG.md" else 1)
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
    name = line.partition(" ")[0]
    command: click.Command = getattr(import_module(f"cute_mla.cli.{name}"), name)
    options = {option: param for param in command.params for option in param.opts}
    mentioned = re.findall(r"--[a-z-]+", line)
    assert set(mentioned) <= set(options)
    for option, values in re.findall(r"(--[a-z-]+) ([a-z0-9]+(?:\\\|[a-z0-9]+)+)", line):
        choice = options[option].type
        assert isinstance(choice, click.Choice)
        assert set(values.split("\\|")) <= set(choice.choices)


def test_the_tables_of_what_is_supported_are_the_ones_that_show_prints() -> None:
    """On failure: put what `cute-mla show support` prints between the two comments."""
    begin, end = "<!-- begin: cute-mla show support -->\n", "<!-- end -->"
    assert TEXT[TEXT.index(begin) + len(begin) : TEXT.index(end)] == markdown()


def test_the_quick_start_runs() -> None:
    code = re.search(r"^## Quick start\n.*?^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert (names["out"].shape, names["lse"].shape) == ((2, 1, 16, 512), (2, 16, 1))
    for result in (names["out"], names["lse"]):
        assert bool(torch.isfinite(result.float()).all())


@pytest.mark.parametrize("layout", FORMATS.values(), ids=lambda layout: layout.name)
def test_the_bytes_of_a_row_are_those_of_the_format(layout: CacheFormat) -> None:
    wide = f"{layout.wide_offset}–{layout.row_bytes - 1}"
    table = TEXT[TEXT.index("Inside a row, by bytes") : TEXT.index("## Edge contract")]
    of_token = layout.row_bytes + (0 if layout.scales_inside else layout.scale_bytes)
    rows = table[table.index(f"| {of_token:,} |") :].splitlines()[:3]
    if layout.quantised:
        assert f"0–{layout.quantised - 1}" in rows[0]
        scales = next(row for row in rows if "scales" in row)
        assert f"{layout.groups} scales" in scales
        assert f"of {layout.group} latent columns each" in scales
        behind = f"page size · {layout.row_bytes} + token · {layout.scale_bytes}"
        placed = f"{layout.quantised}–{layout.wide_offset - 1}" if layout.scales_inside else behind
        assert placed in scales
        assert any(wide in row and "rotary columns, bf16" in row for row in rows)
    else:
        assert f"{D_LATENT * ELEMENT_BYTES}–{layout.row_bytes - 1}" in rows[1]


def test_every_target_of_make_is_listed() -> None:
    (targets,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = set(re.findall(r"(?:`|^    )make ([a-z-]+)", TEXT, re.MULTILINE))
    assert listed >= set(targets.split()) - {"setup", "clean"}
    contributing = re.findall(r"^    make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert contributing
    assert listed | set(contributing) <= set(targets.split())


def test_every_public_function_is_mentioned() -> None:
    for name in cute_mla.__all__:
        if not name.startswith("__"):
            assert re.search(rf"\b{name}\b", TEXT) or f"..{name.removeprefix('flash_attn_varlen')}" in TEXT, name


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
