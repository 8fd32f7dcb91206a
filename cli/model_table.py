"""Tables of `profile --device model`: clocks of a block by kernel, the prediction of every row, and the goals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from .output import four_digits, print_table

GOAL_GPU = "H200"  # the GPU that the definitions' goals are for
_NOTE = (
    "Predicted by the clock of profiles/clock from the kernels' machine code, not measured: low and high have every constant of "
    "profiles/definitions/machines.toml at its best and at its worst. binds: the cause of most of the time, in either case."
)


def show_model(document: dict[str, Any], gpus: Sequence[str]) -> None:
    """Print both tables for these GPUs of a document, then the goals if their GPU is among them."""
    for gpu in gpus:
        _show_blocks(document["rows"], gpu)
        _show_rows(document["rows"], gpu)
    if GOAL_GPU in gpus:
        models = ((row, row["model"][GOAL_GPU]) for row in document["rows"])
        show_goals("predicted us", [(row, model.get("low_us"), model.get("high_us")) for row, model in models])
    click.echo(_NOTE)
    stale = {row["name"] for row in document["rows"] for gpu in gpus if row["model"][gpu].get("current") is False}
    if stale:
        click.echo(f"Recorded with other kernels than the built ones: {', '.join(sorted(stale))}. --device clock predicts them anew.")
    others = [gpu["name"] for gpu in document["gpus"] if gpu["name"] not in gpus]
    if others:
        click.echo(f"For other GPUs: --gpu {' or '.join(others)}, or --gpu all.")


def show_goals(what: str, rows: Sequence[tuple[dict[str, Any], float | None, float | None]]) -> None:
    """Print the goals of the rows that have one, beside the least and the greatest time in microseconds that each may need.

    what: heading of the times.
    """
    aims = [(row, low, high) for row, low, high in rows if row["goal_us"] is not None]
    if not aims:
        return
    click.echo(f"{GOAL_GPU}: goals in microseconds")
    cells = [
        (row["name"], row["text"], four_digits(row["goal_us"]), _times(low, high), _against(row, low, high)) for row, low, high in aims
    ]
    print_table(("row", "problem", "goal us", what, "within the goal"), cells)
    click.echo()


def _times(low: float | None, high: float | None) -> str | None:
    if low is None or high is None:
        return None
    return f"{four_digits(low)}" if low == high else f"{four_digits(low)} to {four_digits(high)}"


def _against(row: dict[str, Any], low: float | None, high: float | None) -> str | None:
    """Return "yes", "perhaps" or "no": both times, only the least one, or none of them are within the goal."""
    if low is None or high is None:
        return None
    return "yes" if high <= row["goal_us"] else "perhaps" if low <= row["goal_us"] else "no"


def _show_blocks(rows: list[dict[str, Any]], gpu: str) -> None:
    """Print the clocks of a block for each kernel, and for how many of them each unit is busy.

    A kernel's first row counts, because the share of HBM depends on how many CTAs run.
    """
    kernels: dict[str, dict[str, Any]] = {}
    for row in rows:
        model = row["model"][gpu]
        if model.get("best", {}).get("clocks"):
            kernels.setdefault(model["kernel"], model)
    if not kernels:
        return
    units = list(next(iter(kernels.values()))["best"]["clocks"])
    click.echo(f"{gpu}: clocks of an SM for a block of keys")
    print_table(
        ("kernel", *units),
        [
            (name, *(_ends(model["best"]["clocks"][what], model["worst"]["clocks"][what]) for what in units))
            for name, model in kernels.items()
        ],
    )
    click.echo()


def _show_rows(rows: list[dict[str, Any]], gpu: str) -> None:
    columns = ("row", "problem", "roof us", "us", "low us", "high us", "binds", "% of roof", "measured us", "error %")
    click.echo(f"{gpu}: microseconds of a call")
    print_table(columns, [_row(row, row["model"][gpu], row["roofs"][gpu]["us"]) for row in rows])
    for row in rows:
        if "reason" in row["model"][gpu]:
            click.echo(f"{row['name']}: {row['model'][gpu]['reason']}")
    click.echo()


def _row(row: dict[str, Any], model: dict[str, Any], roof_us: float) -> tuple[object, ...]:
    if "reason" in model:
        return row["name"], row["text"], four_digits(roof_us), None, None, None, None, None, None, None
    error = model["error"]
    return (
        row["name"],
        row["text"],
        four_digits(roof_us),
        four_digits(model["us"]),
        four_digits(model["low_us"]),
        four_digits(model["high_us"]),
        ", ".join(dict.fromkeys(model["binds"])),
        _ends(*(100 * share for share in model["fraction_of_roof"])),
        four_digits(model["measured_us"]),
        None if error is None else round(100 * error, 1),
    )


def _ends(low: float, high: float) -> str:
    first, last = (f"{number:.0f}" for number in sorted((low, high)))
    return first if first == last else f"{first}-{last}"
