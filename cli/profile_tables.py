"""The tables of `profile`: static figures, limits, and times."""

from __future__ import annotations

from typing import Any

import click

from .output import print_table

_BOUND_LETTER = {"compute": "C", "memory": "M"}


def show(document: dict[str, Any]) -> None:
    """A document of cute_mla.profiles.report: static figures, then limits or times."""
    if document["kernels"]:
        _show_kernels(document["kernels"])
    else:
        click.echo(f"no static report: {document['kernels_missing']}")
    click.echo()
    if not document["rows"]:
        click.echo("no benchmark rows chosen")
    elif document["device"] == "model":
        _show_rooflines(document)
    else:
        _show_timings(document)


def _show_kernels(kernels: list[dict[str, Any]]) -> None:
    columns = ("kernel", "threads", "cluster", "registers", "stack", "smem", "smem %", "SASS", *kernels[0]["mix"])
    rows = [
        (
            kernel["name"],
            kernel["threads"],
            kernel["cluster"],
            kernel["registers"],
            kernel["stack_bytes"],
            kernel["smem_bytes"],
            round(100 * kernel["smem_share"], 1),
            sum(kernel["instructions"].values()),
            *kernel["mix"].values(),
        )
        for kernel in kernels
    ]
    print_table(columns, rows)


def _show_rooflines(document: dict[str, Any]) -> None:
    gpus = [gpu["name"] for gpu in document["gpus"]]
    bounds = [name for gpu in gpus for name in (f"{gpu} us", "by")]
    archs = document["archs"]
    padding = [f"{arch} tiles x" for arch in archs]
    columns = ("row", "problem", "GFLOP", "MB", "FLOP/B", *padding, *bounds, "H200 goal us")
    rows = []
    for row in document["rows"]:
        roofs = [row["roofs"][gpu] for gpu in gpus]
        rows.append(
            (
                row["name"],
                row["text"],
                _short(row["flops"] / 1e9),
                _short(row["bytes"] / 1e6),
                _short(row["intensity"]),
                *(_short(row["tile_padding"].get(arch)) for arch in archs),
                *(cell for roof in roofs for cell in (_short(roof["us"]), _BOUND_LETTER[roof["bound"]])),
                _short(row["goal_us"]),
            )
        )
    print_table(columns, rows)
    click.echo()
    click.echo("Least times by compute (C) or memory (M): bounds and goals, nothing measured. tiles x: arithmetic in whole tiles of rows.")


def _show_timings(document: dict[str, Any]) -> None:
    columns = ("row", "problem", "us", "p10", "p90", "A/A", "main us", "TFLOP/s", "GB/s", "limit us", "% of limit", "H200 goal us")
    timed = [row for row in document["rows"] if row["status"] == "timed"]
    click.echo(f"{document['environment']['gpu']}: {len(timed)} rows timed, KV not in L2")
    rows = [
        (
            row["name"],
            row["text"],
            *(_short(row["cold_us"][part]) for part in ("median", "p10", "p90")),
            _short(row["control_ratio"]["median"]),
            _short(row["kernel_us"].get("dense_decode")),
            _short(row["tflops"]),
            _short(row["gbytes_per_s"]),
            _short(row["limit_us"]),
            round(100 * row["fraction_of_limit"], 1),
            _short(row["goal_us"]),
        )
        for row in timed
    ]
    print_table(columns, rows)
    click.echo()
    click.echo("limit: by the matrix product and the copy of this run. A/A: the same calls again. main: dense_decode without combine.")
    for row in document["rows"]:
        if row["status"] != "timed":
            click.echo(f"{row['name']} {row['status'].replace('_', ' ')}: {row['reason']}")


def _short(value: float | None) -> float | None:
    """Four digits."""
    return None if value is None else float(f"{value:.4g}")
