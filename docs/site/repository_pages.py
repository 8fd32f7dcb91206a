"""mkdocs hooks: pages for documents outside docs/, and a check that the site loads nothing from the network.

The README is the front page. The READMEs of the kernels and of the simulator, CONTRIBUTING, CHANGELOG and the measurements become pages as
well. Any other file of the repository that a document links to is copied to the site, so that links work on the site as in the repository.
"""

from __future__ import annotations

import os
import posixpath
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = "docs/"
KERNEL_README = re.compile(r"cute_mla/kernels/(\w+)/README\.md")
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "profiles/NOTES.md": "measurements.md",
    "profiles/clock/README.md": "clock.md",
    "cute_mla/simulator/README.md": "simulator.md",
}

_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|//)([^)#\s]+)(?=[)#])")
_RESOURCE_ATTRIBUTES = {"src", "srcset", "poster", "data", "background"}
_LINKS_THAT_LOAD_NOTHING = {"canonical", "alternate", "prev", "next", "author", "license"}
_REMOTE = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
_REMOTE_IN_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)


def site_path(path: str) -> str:
    """Return the path in the site of a file of the repository. A page ends in .md."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    kernel = KERNEL_README.fullmatch(path)
    return f"kernels/{kernel[1]}.md" if kernel else PAGES.get(path, f"source/{path}")


def linked_files(text: str, path: str) -> set[str]:
    """Return the repository paths of the files that a document links to."""
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in _LINK.findall(text)}


def rewrite_links(text: str, path: str) -> str:
    """Return a document of the repository with its links as they are in the site."""
    here = posixpath.dirname(site_path(path))

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link[0]))
        return posixpath.relpath(site_path(target), here or ".")

    return _LINK.sub(rewritten, text)


def documents(root: Path) -> list[str]:
    """Return the repository paths of all documents of the site."""
    kernels = sorted((root / "cute_mla" / "kernels").glob("*/README.md"))
    pages = sorted((root / "docs").rglob("*.md"))
    return [*PAGES, *(path.relative_to(root).as_posix() for path in (*kernels, *pages))]


class _Resources(HTMLParser):
    """Collector of the addresses that a browser loads with a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the resources of a tag. Links to follow by hand are none."""
        given = {name: value or "" for name, value in attrs}
        self.found += [given[name] for name in _RESOURCE_ATTRIBUTES & set(given)]
        self.found += _REMOTE_IN_STYLE.findall(given.get("style", ""))
        if tag == "link" and not _LINKS_THAT_LOAD_NOTHING & set(given.get("rel", "").split()):
            self.found.append(given.get("href", ""))

    def handle_data(self, data: str) -> None:
        """Collect the resources of a style sheet within the page."""
        if self.cdata_elem == "style":
            self.found += _REMOTE_IN_STYLE.findall(data)


def remote_resources(html: str) -> list[str]:
    """Return the addresses outside the site that a browser would load with a page."""
    parser = _Resources()
    parser.feed(html)
    parser.close()
    return [address for address in parser.found if _REMOTE.match(address)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents outside docs/, and the files that documents link to."""
    from mkdocs.structure.files import File

    root = Path(config.docs_dir).parent
    listed = documents(root)
    linked = {target for path in listed for target in linked_files((root / path).read_text(), path)}
    for path in sorted({*listed, *linked}):
        source = root / path
        if not path.startswith(DOCS) and source.is_file():
            files.append(File.generated(config, site_path(path), abs_src_path=os.fspath(source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page."""
    del files
    source = Path(page.file.abs_src_path or "")
    return rewrite_links(markdown, source.relative_to(Path(config.docs_dir).parent).as_posix())


def on_post_build(config: MkDocsConfig) -> None:
    """Check pages and style sheets for resources outside the site. PluginError names the first of each file."""
    from mkdocs.exceptions import PluginError

    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in {".html", ".css"}:
            text = path.read_text()
            remote = remote_resources(text) if path.suffix == ".html" else _REMOTE_IN_STYLE.findall(text)
            if remote:
                raise PluginError(f"{path.relative_to(config.site_dir)} loads {remote[0]}; supported: files of the site alone")
