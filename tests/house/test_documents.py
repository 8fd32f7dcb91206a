"""Documents against the tree: files, links, anchors, the site's navigation, and what only one page may state."""

from __future__ import annotations

import ast
import inspect
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import cute_mla
from cute_mla import indexer
from cute_mla.cache import gather_kv_cache, insert_kv_cache, write_kv_cache
from cute_mla.spec.cache_format import FORMATS, CacheFormat
from cute_mla.spec.cache_rows import CACHED, KNOWN, key_types, latent_columns, rotary_columns
from cute_mla.spec.mla import D_LATENT, ELEMENT_BYTES
from docs.site.repository_pages import documents, linked_files, remote_resources, rewrite_links, site_path
from tests.support.documents import DOCUMENTS, PAGES, README, anchors, links, name_of, prose, snippets
from tests.support.tree import ROOT

LINKING = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "cute_mla" / "simulator" / "README.md"]
MAX_README_LINES = 200
MAX_COLUMNS = 140

CACHES = (ROOT / "docs" / "caches.md").read_text()
LAYOUTS = (ROOT / "docs" / "layouts.md").read_text()
SITE = (ROOT / "mkdocs.yml").read_text()
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))


def test_the_readme_stays_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("document", LINKING, ids=name_of)
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for path, anchor in links(document):
        target = (document.parent / path).resolve() if path else document
        assert target.is_file(), f"{path} in {name_of(document)}"
        assert not anchor or anchor in anchors(target), f"#{anchor} of {path or name_of(document)} in {name_of(document)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_code_fits_the_pages(document: Path) -> None:
    """docs/stylesheets/pages.css gives code the room of so many columns."""
    wide = [line for snippet in snippets(document) for line in snippet.text.splitlines() if len(line) > MAX_COLUMNS]
    assert not wide


@pytest.mark.parametrize("document", LINKING, ids=name_of)
def test_files_that_are_named_exist(document: Path) -> None:
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:md|py|sh|toml|json))\b", document.read_text()):
        folders = [document.parent, ROOT, *(ROOT / "cute_mla" / room for room in ("", "kernels", "simulator"))]
        assert any((folder / path).is_file() for folder in folders), f"{path} in {name_of(document)}"


def test_the_readme_leads_to_every_page() -> None:
    reached = {"README.md"}
    while True:
        found = {target for path in reached if path.endswith(".md") for target in linked_files((ROOT / path).read_text(), path)} | reached
        if found == reached:
            break
        reached = found
    assert {name_of(page) for page in PAGES if "reference" not in page.parts} <= reached


def test_the_navigation_has_every_page_once() -> None:
    listed = re.findall(r"^ +- .+?: (\S+\.md)$", SITE, re.MULTILINE)
    assert sorted(listed) == sorted(site_path(path) for path in documents(ROOT))


def test_links_of_the_site_lead_where_those_of_the_repository_do() -> None:
    in_site = {site_path(path) for path in documents(ROOT)}
    for path in documents(ROOT):
        text = (ROOT / path).read_text()
        here = posixpath.dirname(site_path(path))
        led = {
            posixpath.normpath(posixpath.join(here, link)) for link in re.findall(r"\]\((?![a-z]+:)([^)#\s]+)", rewrite_links(text, path))
        }
        assert led == {site_path(target) for target in linked_files(text, path)}
        assert {target for target in led if target.endswith(".md")} <= in_site, path


def test_no_brackets_look_like_a_link_by_reference() -> None:
    """`[a][b]` outside of code is a link to b, and no document defines one."""
    shown = {f"{path}.{name}": member_of(path, name) for page in REFERENCE for path, name in referenced(page)}
    texts = {path: prose(ROOT / path) for path in documents(ROOT)}
    texts |= {name: inspect.getdoc(member) or "" for name, member in shown.items()}
    assert len(texts) > len(shown) > 50
    assert [name for name, text in texts.items() if re.search(r"\]\s?\[", re.sub(r"(`+).+?\1", "", text))] == []


def test_resources_from_the_network_are_found() -> None:
    loading = [
        '<script src="https://cdn.test/a.js"></script>',
        '<link rel="preconnect stylesheet" href="//fonts.test/a.css">',
        '<img src="http://images.test/a.png">',
        '<p style="background: url(https://images.test/a.png)"></p>',
        "<style>@import 'https://fonts.test/a.css';</style>",
        '<object data="https://objects.test/a.svg"></object>',
    ]
    for html in loading:
        assert len(remote_resources(html)) == 1, html
    for html in ('<a href="https://page.test">x</a>', '<link rel="canonical" href="https://page.test">', '<img src="a.png">'):
        assert remote_resources(html) == []


@pytest.mark.parametrize("layout", KNOWN.values(), ids=lambda layout: layout.name)
def test_the_page_says_what_writes_and_gathers_a_format(layout: CacheFormat) -> None:
    table = CACHES[CACHES.index("| name | `empty_cache` |") :]
    _, written, gathered = re.findall(rf"^\| `{layout.name}` \|(.+?)\| ([^|]+?) \| ([^|]+?) \|$", table, re.MULTILINE)[0]
    if layout.name not in CACHED:
        assert written.startswith("no kernel: `quantise_cache(")
        assert gathered.startswith("no kernel: `dequantise_cache`")
        return
    types = ", bf16 or fp16" if len(key_types(layout)) > 1 else ", bf16"
    types = types if layout.quantised else ", of the cache's dtype"
    assert written == f"{latent_columns(layout)} + {rotary_columns(layout)}{types}"
    assert gathered == f"{layout.d_qk}{types}"


def referenced(page: Path) -> set[tuple[str, str]]:
    """Return (module, name) of everything that a page of the reference shows."""
    shown = set()
    for name, members in re.findall(r"^::: (\S+)$((?:\n {4}.*)*)", page.read_text(), re.MULTILINE):
        listed = re.search(r"members: \[(.+)\]", members)
        if listed:
            shown |= {(name, member) for member in listed[1].split(", ")}
        if "show_root_heading: false" not in members:
            shown.add(tuple(name.rsplit(".", 1)))
    return shown


def member_of(path: str, name: str) -> object:
    """Return a member of a module or of a class."""
    try:
        owner: object = import_module(path)
    except ModuleNotFoundError:  # a class
        owner = getattr(import_module(path.rpartition(".")[0]), path.rpartition(".")[2])
    return getattr(owner, name)


@pytest.mark.parametrize("page", REFERENCE, ids=name_of)
def test_names_of_the_reference_exist(page: Path) -> None:
    names = referenced(page)
    assert names
    for path, name in names:
        member_of(path, name)


@pytest.mark.parametrize(
    ("module", "page"),
    [
        ("", "functions"),
        (".shared_prefix", "functions"),
        (".flash_mla", "flash_mla"),
        (".cache", "cache"),
        (".indexer", "indexer"),
        (".layer", "layer"),
        (".parallel", "parallel"),
    ],
)
def test_the_reference_has_every_public_name(module: str, page: str) -> None:
    shown = {name for each in (page, "simulate") for _, name in referenced(ROOT / "docs" / "reference" / f"{each}.md")}
    public = {name for name in import_module(f"cute_mla{module}").__all__ if not name.startswith("__")}
    assert public - {"form_a"} <= shown  # form_a is a module: the page has its functions


@pytest.fixture
def markdown_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return the conversion of docstrings, without griffe, which only `make docs` installs."""
    monkeypatch.setitem(sys.modules, "griffe", SimpleNamespace(Extension=object, Object=object, GriffeLoader=object))
    function: Callable[..., str] = import_module("docs.site.argument_lists").markdown_of
    return function


DESCRIBED_WITH_OTHERS = {"is_fp8_kvcache", "kv_offsets"}  # with the formats of k_cache and the layouts of kv
INDEXER = [getattr(indexer, name) for name in indexer.__all__]
FUNCTIONS = [cute_mla.flash_mla_with_kvcache, cute_mla.flash_mla_sparse_fwd, cute_mla.flash_attn_varlen_func, cute_mla.merge_states]


@pytest.mark.parametrize(
    "function", [*FUNCTIONS, write_kv_cache, insert_kv_cache, gather_kv_cache, *INDEXER], ids=lambda function: function.__name__
)
def test_the_reference_lists_every_argument(markdown_of: Callable[..., str], function: Callable[..., object]) -> None:
    arguments = set(inspect.signature(function).parameters)
    text = markdown_of(inspect.getdoc(function), arguments)
    listed = {name for names in re.findall(r"^`(.+)`\n:   \S", text, re.MULTILINE) for name in names.split(", ")}
    assert arguments - listed <= DESCRIBED_WITH_OTHERS
    assert all(name in text for name in arguments)


def test_docstrings_become_lists_of_arguments(markdown_of: Callable[..., str]) -> None:
    columns = "Summary.\n\nq            rows,\n             packed\nfirst, second, third\n             lengths\n\nMore  text."
    assert markdown_of(columns) == "Summary.\n\n`q`\n:   rows, packed\n\n`first, second, third`\n:   lengths\n\nMore  text."
    sentences = "a: one,\nor two. b, c: three. d: none of them."
    assert markdown_of(sentences, ["a", "b", "c"]) == "`a`\n:   one, or two.\n\n`b, c`\n:   three. d: none of them."
    assert markdown_of(sentences) == sentences


def finding_kinds() -> Iterator[str]:
    """Yield the kinds of all findings that the simulator reports: the first string among the first two arguments."""
    for path in (ROOT / "cute_mla" / "simulator").rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if getattr(call.func, "id", getattr(call.func, "attr", None)) in ("Fault", "Finding", "report"):
                strings = [str(node.value) for node in call.args[:2] if isinstance(node, ast.Constant)]
                yield from (text for text in strings[:1] if re.fullmatch("[a-z_]+", text))


def test_every_kind_of_finding_is_explained() -> None:
    text = (ROOT / "docs" / "findings.md").read_text()
    explained = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`.+?) \|", text, re.MULTILINE))))
    kinds = set(finding_kinds())
    assert len(kinds) > 20
    assert kinds <= explained


@pytest.mark.parametrize("layout", FORMATS.values(), ids=lambda layout: layout.name)
def test_the_bytes_of_a_row_are_those_of_the_format(layout: CacheFormat) -> None:
    wide = f"{layout.wide_offset}–{layout.row_bytes - 1}"
    table = LAYOUTS[LAYOUTS.index("## Inside a row, by bytes") :]
    of_token = layout.row_bytes + (0 if layout.scales_inside else layout.scale_bytes)
    rows = table[table.index(f"| {of_token:,} (`{layout.name}`) |") :].splitlines()[:3]
    if layout.quantised:
        assert f"0–{layout.code_bytes - 1}" in rows[0]
        assert f"{layout.quantised} latent columns, {layout.code}" in rows[0]
        scales = next(row for row in rows if "scales" in row)
        assert f"{layout.groups} scales" in scales
        assert f"of {layout.group} latent columns each" in scales
        behind = f"page size · {layout.row_bytes} + token · {layout.scale_bytes}"
        assert f"scales, {layout.scale}" in scales
        placed = f"{layout.code_bytes}–{layout.wide_offset - 1}" if layout.scales_inside else behind
        assert placed in scales
        assert layout.quantised == layout.d_qk or any(wide in row and "rotary columns, bf16" in row for row in rows)
    else:
        assert f"{D_LATENT * ELEMENT_BYTES}–{layout.row_bytes - 1}" in rows[1]
