"""cute-mla profile: what kernels ask of the machine, how little time a problem can take, and how long it takes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from cute_mla.runtime.errors import ArtifactError, DeviceError
from cute_mla.spec.arch import ARCHS, Arch

from .output import print_table

OPS = ("dense_decode", "combine", "split_plan")

_DEFAULT_BUDGET_S = 300.0
_BOUND_LETTER = {"compute": "C", "memory": "M"}


@click.command()
@click.option("--arch", type=click.Choice([*ARCHS, "all"]), default="all", help="Architecture whose kernels are reported.")
@click.option("--op", type=click.Choice([*OPS, "all"]), default="all", help="Operation that is reported.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "model"]),
    default="auto",
    help="cuda: times on the GPU. model: static report and rooflines, nothing is timed. auto: cuda if a matching GPU is there.",
)
@click.option("--rows", default="", help="Rows or cases, comma-separated, as in D1,D5.fixed; default all.")
@click.option("--budget", type=click.FloatRange(min=0), default=_DEFAULT_BUDGET_S, help="Seconds; rows not run are named.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for everything found.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="SVG file for a roofline.")
def profile(arch: str, op: str, device: str, rows: str, budget: float, json_file: Path | None, plot_file: Path | None) -> None:
    """Report on the built kernels and the limits of each problem, and time problems on a GPU.

    On a GPU this succeeds if at least one row was timed and none was wrong or failed.
    """
    from cute_mla.profiles import report

    archs = [ARCHS[arch]] if arch != "all" else list(ARCHS.values())
    ops = [op] if op != "all" else list(OPS)
    names = [name.strip() for name in rows.split(",") if name.strip()]
    try:
        cases = report.cases_for(ops, names)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        if _is_timed(device, archs):
            document = report.cuda_document(archs, ops, cases, budget, partial(_show_progress, json_file))
        else:
            document = report.model_document(archs, ops, cases)
    except (ArtifactError, DeviceError) as error:
        _write(json_file, json.dumps({"format": report.FORMAT, "device": device, "error": str(error), "rows": []}) + "\n")
        raise
    _write_document(json_file, document)
    if plot_file is not None:
        _write(plot_file, report.plot(document))
    _show(document)
    if not succeeded(document):
        raise SystemExit(1)


def succeeded(document: dict[str, Any]) -> bool:
    """Whether the exit code is 0."""
    if document["device"] == "model":
        return True
    states = {row["status"] for row in document["rows"]}
    return "timed" in states and not states & {"wrong", "failed"}


def _is_timed(device: str, archs: list[Arch]) -> bool:
    """Whether there is a GPU to time on. DeviceError if one is demanded and none matches."""
    if device == "model":
        return False
    from cute_mla.profiles.cuda_bench import GpuMismatch, matching_arch

    try:
        matching_arch(archs)
    except GpuMismatch as mismatch:
        if device == "cuda":
            raise
        click.echo(f"{mismatch}: static report and rooflines only", err=True)
        return False
    return True


def _show_progress(json_file: Path | None, name: str, so_far: dict[str, Any]) -> None:
    """Names the row about to be timed, and keeps what was found so far: a kernel that hangs takes the process with it."""
    click.echo(f"timing {name}", err=True)
    _write_document(json_file, so_far)


def _write_document(json_file: Path | None, document: dict[str, Any]) -> None:
    from cute_mla.profiles.report import plain

    _write(json_file, json.dumps(plain(document), indent=1, allow_nan=False) + "\n")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def _show(document: dict[str, Any]) -> None:
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
