"""Tables of `profile --device clock`: clocks of a block and waits by kernel, the time of every row, and the peer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from .output import four_digits, print_table

_NOTE = (
    "Predicted by the clock of profiles/clock from the kernels' machine code, not measured. low and high: two further runs, with every "
    "constant of profiles/definitions/machines.toml at its fast and at its slow end. binds: a unit that is busy for 90 % of a block; "
    "latency: none is; fixed: most of the call is no block."
)


def show_clock(document: dict[str, Any], gpus: Sequence[str]) -> None:
    """Print the tables of these GPUs of a document."""
    if not document["rows"] and document["peer"] is None:
        click.echo("no benchmark rows chosen")
    for gpu in gpus:
        if document["rows"]:
            _show_kernels(document["rows"], gpu)
            _show_rows(document["rows"], gpu)
        if document["peer"] is not None:
            _show_peer(document["peer"][gpu], gpu)
    click.echo(_NOTE)


def _show_kernels(rows: Sequence[Mapping[str, Any]], gpu: str) -> None:
    """Print the clocks of a block for each kernel in its first row, and what its warps wait for."""
    kernels: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["clock"][gpu].get("kernel"):
            kernels.setdefault(row["clock"][gpu]["kernel"], row["clock"][gpu])
    if not kernels:
        return
    units = list(next(iter(kernels.values()))["use"])
    click.echo(f"{gpu}: predicted clocks of a block of keys, and the share of them in which each unit is busy")
    print_table(
        ("kernel", "keys", "clocks", "low", "high", *(f"{unit} %" for unit in units), "binds", "fixed part", "seam"),
        [_kernel(name, found, units) for name, found in kernels.items()],
    )
    click.echo()
    click.echo(f"{gpu}: share of a block in which a warp of each role waits, %")
    _show_waits([(name, found["waits"]) for name, found in kernels.items()])


def _kernel(name: str, found: Mapping[str, Any], units: Sequence[str]) -> tuple[object, ...]:
    block = found["block_clocks"]
    return (
        name,
        found["keys_of_block"],
        *(round(block[end]) for end in ("nominal", "low", "high")),
        *(round(100 * found["use"][unit]) for unit in units),
        found["binding_unit"],
        round(found["fixed_clocks"]),
        round(found["seam_clocks"]) if found["seam_clocks"] else None,
    )


def _show_waits(kernels: Sequence[tuple[str, Mapping[str, Mapping[str, float]]]]) -> None:
    """Print the waits of every role, with a column for each cause that takes 1 % anywhere."""
    shares = [of_role for _, waits in kernels for of_role in waits.values()]
    causes = sorted({cause for of_role in shares for cause, share in of_role.items() if share >= 0.01})
    rows = [
        (name, role, *(round(100 * of_role.get(cause, 0.0)) for cause in causes))
        for name, waits in kernels
        for role, of_role in waits.items()
    ]
    print_table(("kernel", "role", *causes), rows)
    click.echo()


def _show_rows(rows: Sequence[Mapping[str, Any]], gpu: str) -> None:
    click.echo(f"{gpu}: predicted microseconds of a call")
    columns = (
        "row",
        "problem",
        "roof us",
        "clock us",
        "low",
        "high",
        "% of roof",
        "GHz",
        "clocks a block",
        "binds",
    )
    print_table(columns, [_row(row, gpu) for row in rows])
    for row in rows:
        if "reason" in row["clock"][gpu]:
            click.echo(f"{row['name']}: {row['clock'][gpu]['reason']}")
    click.echo()


def _row(row: Mapping[str, Any], gpu: str) -> tuple[object, ...]:
    found = row["clock"][gpu]
    start = (row["name"], row["text"], four_digits(row["roofs"][gpu]))
    if "reason" in found:
        return (*start, None, None, None, None, None, None, None)
    block = round(found["block_clocks"]["nominal"]) if found["kernel"] else None
    times = (four_digits(found[key]) for key in ("us", "low_us", "high_us"))
    return (*start, *times, round(100 * found["fraction_of_roof"], 1), round(found["ghz"], 3), block, found["binds"])


def _show_peer(peer: Mapping[str, Any], gpu: str) -> None:
    units = list(peer["use"])
    click.echo(f"{gpu}: predicted clocks of {peer['name']}: each launch, a block of keys, and the share in which each unit is busy")
    clocks = ", ".join(f"{number:,}" for number in peer["clocks"])
    block = None if peer["block_clocks"] is None else round(peer["block_clocks"])
    use = [round(100 * peer["use"][unit]) for unit in units]
    print_table(("kernel", "clocks", "clocks a block", *(f"{unit} %" for unit in units)), [(peer["name"], clocks, block, *use)])
    click.echo()
    _show_waits([(peer["name"], peer["waits"])])
    for finding in peer["findings"][:3]:
        click.echo(f"the simulator finds: {finding}")
    if len(peer["findings"]) > 3:
        click.echo(f"and {len(peer['findings']) - 3} more findings, which --json has")
