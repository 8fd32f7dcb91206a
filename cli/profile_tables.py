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
    timed = [row for row in document["rows"] if row["status"] == "timed"]
    peers = [name for name in _peers_of(document) if any("ratio" in row["peers"].get(name, {}) for row in timed)]
    columns = ("row", "problem", "us", "p10", "p90", "A/A", "main us", "TFLOP/s", "GB/s", "limit us", "% of limit", "H200 goal us")
    click.echo(f"{document['environment']['gpu']}: {len(timed)} rows timed, operands not in L2")
    rows = [
        (
            row["name"],
            row["text"],
            *(_short(row["cold_us"][part]) for part in ("median", "p10", "p90")),
            _short(row["control_ratio"]["median"]),
            _short(row["kernel_us"].get(row["op"])),
            _short(row["tflops"]),
            _short(row["gbytes_per_s"]),
            _short(row["limit_us"]),
            round(100 * row["fraction_of_limit"], 1),
            _short(row["goal_us"]),
            *(_short(row["peers"].get(name, {}).get("ratio", {}).get("median")) for name in peers),
        )
        for row in timed
    ]
    print_table((*columns, *(f"/ {name}" for name in peers)), rows)
    click.echo()
    click.echo(
        "limit: by the matrix product and the copy of this run. A/A: the same calls again. main: the op's own kernel without combine."
    )
    if peers:
        click.echo("/ NAME: our time over that library's, round by round; below 1 ours is faster.")
    for peer, status, reason, where in _left_out(timed):
        click.echo(f"{peer} {status.replace('_', ' ')} in {where}: {reason}")
    for row in document["rows"]:
        if row["status"] != "timed":
            click.echo(f"{row['name']} {row['status'].replace('_', ' ')}: {row['reason']}")


def _peers_of(document: dict[str, Any]) -> list[str]:
    """The peers that any row names, in that order."""
    return list(dict.fromkeys(name for row in document["rows"] for name in row.get("peers", {})))


def _left_out(timed: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(peer, status, reason, the rows) of peers that took no part, those with one reason together."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for row in timed:
        for name, peer in row["peers"].items():
            if peer["status"] != "timed":
                rows.setdefault((name, peer["status"], peer["reason"]), []).append(row["name"])
    return [(*key, ", ".join(names)) for key, names in rows.items()]


def _short(value: float | None) -> float | None:
    """Four digits."""
    return None if value is None else float(f"{value:.4g}")
