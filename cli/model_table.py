"""Tables of `profile --device model`: clocks of a block by kernel, then the prediction of every row."""

from __future__ import annotations

from typing import Any

import click

from .output import four_digits, print_table

_NOTE = (
    "Predicted by the model of profiles/model, not measured: low and high have every constant of profiles/definitions/machines.toml at its "
    "best and at its worst. binds: the cause of most of the time, in either case."
)


def show_model(document: dict[str, Any]) -> None:
    """Print both tables for each GPU of a document."""
    for gpu in document["gpus"]:
        _show_blocks(document["rows"], gpu["name"])
        _show_rows(document["rows"], gpu["name"])
    click.echo(_NOTE)


def _show_blocks(rows: list[dict[str, Any]], gpu: str) -> None:
    """Print the clocks of a block for each kernel. Its first row counts, because L2 and HBM depend on how many CTAs run."""
    kernels: dict[str, dict[str, Any]] = {}
    for row in rows:
        model = row["model"][gpu]
        if model.get("best", {}).get("clocks"):
            kernels.setdefault(model["kernel"], model)
    if not kernels:
        return
    resources = list(next(iter(kernels.values()))["best"]["clocks"])
    click.echo(f"{gpu}: clocks of an SM for a block of keys")
    print_table(
        ("kernel", *resources),
        [
            (name, *(_ends(model["best"]["clocks"][what], model["worst"]["clocks"][what]) for what in resources))
            for name, model in kernels.items()
        ],
    )
    click.echo()


def _show_rows(rows: list[dict[str, Any]], gpu: str) -> None:
    columns = ("row", "problem", "roof us", "low us", "high us", "binds", "% of roof", "measured us", "error %", "H200 goal us")
    click.echo(f"{gpu}: microseconds of a call")
    print_table(columns, [_row(row, row["model"][gpu], row["roofs"][gpu]["us"]) for row in rows])
    for row in rows:
        if "reason" in row["model"][gpu]:
            click.echo(f"{row['name']}: {row['model'][gpu]['reason']}")
    click.echo()


def _row(row: dict[str, Any], model: dict[str, Any], roof_us: float) -> tuple[object, ...]:
    if "reason" in model:
        return row["name"], row["text"], four_digits(roof_us), None, None, None, None, None, None, four_digits(row["goal_us"])
    error = model["error"]
    return (
        row["name"],
        row["text"],
        four_digits(roof_us),
        four_digits(model["low_us"]),
        four_digits(model["high_us"]),
        ", ".join(dict.fromkeys(model["binds"])),
        _ends(*(100 * share for share in model["fraction_of_roof"])),
        four_digits(model["measured_us"]),
        None if error is None else round(100 * error, 1),
        four_digits(row["goal_us"]),
    )


def _ends(low: float, high: float) -> str:
    first, last = (f"{number:.0f}" for number in sorted((low, high)))
    return first if first == last else f"{first}-{last}"
