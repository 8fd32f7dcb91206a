"""griffe extension: arguments in docstrings, aligned in columns there, as definition lists of Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe

_ENTRY = re.compile(r" {0,4}\S.*? {2,}(?=\S)")
_NAMES = re.compile(r" {0,4}[^\s,]+(?:, [^\s,]+)*\s*")
_LEAST_COLUMN = 8  # descriptions begin further right than any indentation of a paragraph

Entries = list[tuple[str, str]]


def _in_columns(lines: list[str]) -> Entries:
    """Return (names, description) for a block with names on the left and descriptions in a column, nothing for any other block."""
    entry = next(filter(None, map(_ENTRY.match, lines)), None)
    column = entry.end() if entry else 0
    if column < _LEAST_COLUMN:
        return []
    entries: Entries = []
    for line in lines:
        left, text = line[:column], line[column:]
        if entries and not left.strip():
            entries[-1] = (entries[-1][0], f"{entries[-1][1]} {text.strip()}".strip())
        elif left.endswith(" ") and _NAMES.fullmatch(left):
            entries.append((left.strip(), text.strip()))
        elif _NAMES.fullmatch(line):
            entries.append((line.strip(), ""))
        else:
            return []
    return entries


def _by_name(lines: list[str], names: Collection[str]) -> Entries:
    """Return (names, description) for a block of sentences like "name, name: text.", nothing for any other block."""
    if not names:
        return []
    known = "|".join(sorted(names, key=len, reverse=True))
    parts = re.split(rf"(?:^|(?<=\. ))((?:{known})(?:, (?:{known}))*): ", " ".join(line.strip() for line in lines))
    return [] if parts[0] else list(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


def markdown_of(text: str, names: Collection[str] = ()) -> str:
    """Return a docstring as Markdown: lists of arguments become definition lists, other paragraphs stay. names: of arguments, fields."""
    blocks = []
    for block in re.split(r"\n[ \t]*\n", text):
        entries = _in_columns(block.splitlines()) or _by_name(block.splitlines(), names)
        blocks.append("\n\n".join(f"`{named}`\n:   {described}" for named, described in entries) if entries else block)
    return "\n\n".join(blocks)


class ArgumentLists(griffe.Extension):
    """Rewriter of every docstring that mkdocstrings shows."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        del loader, kwargs
        if obj.docstring is not None:
            parameters = [parameter.name for parameter in obj.parameters] if isinstance(obj, griffe.Function | griffe.Class) else []
            members = list(obj.members) if isinstance(obj, griffe.Class) else []
            obj.docstring.value = markdown_of(obj.docstring.value, {*parameters, *members})
