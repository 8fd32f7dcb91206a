"""Output of commands: tables with rich on a terminal, plain aligned text in a pipe; JSON; rounding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table


def is_terminal() -> bool:
    """Return whether the output is a terminal."""
    return Console().is_terminal


def json_text(value: Any) -> str:
    """Return JSON, one field a line, keys in the given order."""
    return json.dumps(value, indent=1)


def print_json(value: Any) -> None:
    """Print JSON, one field a line, keys in the given order."""
    click.echo(json_text(value))


def four_digits(value: float | None) -> float | None:
    """Round to four significant digits; None stays None."""
    return None if value is None else float(f"{value:.4g}")


def duration(seconds: float) -> str:
    """Return a time as text: "45 s", "3 min 20 s", "2 h 5 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table: numbers right-aligned, other cells left-aligned, None as "-"."""
    texts = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    numeric = [bool(rows) and all(isinstance(row[index], int | float | None) for row in rows) for index in range(len(columns))]
    if is_terminal():
        table = Table(box=None, header_style="bold")
        for name, right in zip(columns, numeric, strict=True):
            table.add_column(name, justify="right" if right else "left", overflow="fold")
        for text in texts:
            table.add_row(*text)
        Console().print(table)
        return
    widths = [max(len(line[index]) for line in ([*columns], *texts)) for index in range(len(columns))]
    for line in ([*columns], *texts):
        cells = (cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numeric, strict=True))
        click.echo("  ".join(cells).rstrip())
