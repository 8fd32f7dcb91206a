"""The tables of `profile`: static figures, predictions, and times."""

from __future__ import annotations

from typing import Any

import click

from .model_table import show_model
from .output import print_table


def show(document: dict[str, Any]) -> None:
    """A document of cute_mla.profiles.report: static figures, then predictions or times."""
    if document["kernels"]:
        _show_kernels(document["kernels"])
    else:
        click.echo(f"no static report: {document['kernels_missing']}")
    click.echo()
    if not document["rows"]:
        click.echo("no benchmark rows chosen")
    elif document["device"] == "model":
        show_model(document)
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
