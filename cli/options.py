"""Option types that several commands share: names with a suggestion for a misspelt one, architectures, and files to write."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import click

from cute_mla.spec.arch import ALIASES, ARCHS

ALL = "all"
_MOST_SUGGESTIONS = 3


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean A or B?" for the known names nearest to a misspelt one; empty if none is near."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(given, names, n=_MOST_SUGGESTIONS) or [name for name in names if given and given in name]
    return f"; did you mean {' or '.join(near[:_MOST_SUGGESTIONS])}?" if near else ""


class Name(click.Choice[str]):
    """A choice from names, which suggests the nearest ones for a misspelt name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the chosen name. BadParameter for an unknown one."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            raise click.BadParameter(error.message.rstrip(".") + did_you_mean(str(value), map(str, self.choices)), ctx, param) from error


class Finite(click.FloatRange):
    """A finite number of a range. click takes nan for a number of every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. BadParameter for text, nan, inf and numbers beyond the range."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class Hardware(Name):
    """A choice of architectures or GPUs. Another name is not supported, rather than misspelt: an A100 is no H100.

    A board's alias, such as sm103, is answered as the architecture whose cubins it runs.
    """

    def __init__(self, names: Iterable[str]) -> None:
        known = [*names]
        super().__init__([*known, ALL])
        self.listed = ", ".join([*known, *(alias for alias, name in ALIASES.items() if name in known), ALL])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the chosen name. BadParameter for one that is not supported."""
        chosen = ALIASES.get(value, value)
        if chosen not in self.choices:
            self.fail(f"not supported: {value}; supported: {self.listed}", param, ctx)
        return super().convert(chosen, param, ctx)


ARCH = Hardware(ARCHS)


def selected(names: Collection[str], known: Iterable[str]) -> list[str]:
    """Return the known names that a repeated option chose, in their own order; all of them if it was not given or has "all"."""
    return [name for name in known if not names or ALL in names or name in names]


def check_writable(option: str, path: Path | None, *, make_folder: bool = False) -> None:
    """Raise UsageError unless a file can be written at `path`, by writing an empty one beside it. None: no file was asked for.

    make_folder: make the folder of the file if it does not exist.
    """
    if path is None:
        return
    probe = partial_path(path)
    try:
        if path.exists() and not path.is_file():
            raise click.UsageError(f"{option}: {path} is no regular file, and would be replaced by a regular one")
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise click.UsageError(f"{option}: cannot write {path}: {error.strerror}") from error


def partial_path(path: Path) -> Path:
    """Return the file beside `path` that this process writes before it replaces `path`."""
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def write_file(path: Path, text: str) -> None:
    """Write a whole file atomically. ClickException, which is exit code 1, if it cannot be written."""
    partial = partial_path(path)
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
