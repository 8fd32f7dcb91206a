"""Tables of `cute-mla profile`: static figures, then predictions or times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from .model_table import show_goals, show_model
from .output import four_digits, print_table


def show(document: dict[str, Any], gpus: Sequence[str], *, static: bool) -> None:
    """Print a document of cute_mla.profiles.report. gpus: those whose predictions are printed. static: print the static figures, too."""
    if static:
        if document["kernels"]:
            _show_kernels(document["kernels"])
        else:
            click.echo(f"no static report: {document['kernels_missing']}")
        click.echo()
    if not document["rows"]:
        click.echo("no benchmark rows chosen")
    elif document["device"] == "model":
        show_model(document, gpus)
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
    timed = [row for row in document["rows"] if row["status"] == "timed"]
    baselines = [name for name in _baselines_of(document) if any("ratio" in row["peers"].get(name, {}) for row in timed)]
    columns = ("row", "problem", "us", "p10", "p90", "A/A", "main us", "TFLOP/s", "GB/s", "limit us", "% of limit")
    click.echo(f"{document['environment']['gpu']}: {len(timed)} rows timed, operands not in L2")
    rows = [
        (
            row["name"],
            row["text"],
            *(four_digits(row["cold_us"][part]) for part in ("median", "p10", "p90")),
            four_digits(row["control_ratio"]["median"]),
            four_digits(row["kernel_us"].get(row["op"])),
            four_digits(row["tflops"]),
            four_digits(row["gbytes_per_s"]),
            four_digits(row["limit_us"]),
            round(100 * row["fraction_of_limit"], 1),
            *(four_digits(row["peers"].get(name, {}).get("ratio", {}).get("median")) for name in baselines),
        )
        for row in timed
    ]
    print_table((*columns, *(f"/ {name}" for name in baselines)), rows)
    click.echo()
    click.echo(
        "limit: by the matmul and copy rates of this run. A/A: the same calls timed twice. main: the op's own kernel without combine."
    )
    if baselines:
        click.echo("/ NAME: our time over that library's, round by round; below 1 ours is faster.")
    show_goals("measured us", [(row, row["cold_us"]["median"], row["cold_us"]["median"]) for row in timed])
    for baseline, status, reason, where in _left_out(timed):
        click.echo(f"{baseline} {status.replace('_', ' ')} in {where}: {reason}")
    for row in document["rows"]:
        if row["status"] != "timed":
            click.echo(f"{row['name']} {row['status'].replace('_', ' ')}: {row['reason']}")


def _baselines_of(document: dict[str, Any]) -> list[str]:
    """Return the names of the baselines in any row, in order of appearance."""
    return list(dict.fromkeys(name for row in document["rows"] for name in row.get("peers", {})))


def _left_out(timed: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """Return (baseline, status, reason, rows) of the baselines that were not timed, grouped by reason."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for row in timed:
        for name, baseline in row["peers"].items():
            if baseline["status"] != "timed":
                rows.setdefault((name, baseline["status"], baseline["reason"]), []).append(row["name"])
    return [(*key, ", ".join(names)) for key, names in rows.items()]
