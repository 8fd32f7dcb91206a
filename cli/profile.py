"""`cute-mla profile`: what a kernel asks of the machine, how little time a problem can take, and how long it takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..runtime.errors import ArtifactError, DeviceError
from ..spec.arch import ARCHS, Arch

_OPS = ("dense_decode", "combine", "split_plan")
_PIPE_WIDTH = 150  # columns when nobody's terminal says how many there are
_DEFAULT_BUDGET_S = 300.0


@click.command(name="profile")
@click.option("--arch", type=click.Choice([*ARCHS]), default="sm90", show_default=True, help="Architecture of the kernels.")
@click.option("--op", type=click.Choice(_OPS), default=None, help="One op only.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "model"]),
    default="auto",
    show_default=True,
    help="cuda: time on the GPU. model: static report and rooflines, nothing timed. auto: cuda if a matching GPU is there.",
)
@click.option("--rows", default="", help="Rows or cases, comma-separated, as in D1,D5.fixed. Default: all.")
@click.option("--budget", type=click.FloatRange(min=0), default=_DEFAULT_BUDGET_S, show_default=True, help="Seconds for timing.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything to this file.")
@click.option("--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw a roofline to this SVG file.")
def profile(
    arch: str, op: str | None, device: str, rows: str, budget: float, json_file: Path | None, plot_file: Path | None
) -> None:
    """Report static figures and rooflines of the kernels, and time the benchmark rows on a GPU.

    Exits 0 if nothing timed was wrong or failed (and, on a GPU, something was timed), 1 otherwise, 2 on bad usage.
    """
    from ..profiles import report

    target = ARCHS[arch]
    names = [name.strip() for name in rows.split(",") if name.strip()]
    try:
        report.cases_for(op, names)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        document = _document(target, op, _chosen_device(device, target), names, budget)
    except (ArtifactError, DeviceError, ValueError) as error:
        if json_file is not None:
            _write(json_file, json.dumps({"format": report.FORMAT, "device": device, "arch": arch, "error": str(error), "rows": []}) + "\n")
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        _write(json_file, json.dumps(report.plain(document), indent=1, allow_nan=False) + "\n")
    if plot_file is not None:
        _write(plot_file, report.plot(document))
    _show(document)
    if not succeeded(document):
        sys.exit(1)


def succeeded(document: dict[str, Any]) -> bool:
    """Whether the exit code is 0: no row wrong or failed and, where rows were to be timed, at least one was."""
    states = [row["status"] for row in document["rows"]]
    if document["device"] == "model":
        return True
    return "wrong" not in states and "failed" not in states and "timed" in states


def _chosen_device(device: str, arch: Arch) -> str:
    if device != "auto":
        return device
    from ..profiles.cuda_bench import matching_gpu

    problem = matching_gpu(arch)
    if problem:
        click.echo(f"{problem}: static report and rooflines only", err=True)
    return "model" if problem else "cuda"


def _document(arch: Arch, op: str | None, device: str, names: list[str], budget: float) -> dict[str, Any]:
    from ..profiles import report

    if device == "model":
        return report.model_document(arch, op, names)
    return report.cuda_document(arch, op, names, budget, _progress())


def _progress() -> Callable[[str], None]:
    return lambda name: click.echo(f"timing {name}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error


def _show(document: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH, color_system=None)
    if document["kernels"]:
        console.print(_kernel_table(document["kernels"]))
    else:
        console.print(f"no static report: {document['kernels_missing']}")
    if not document["rows"]:
        console.print("no benchmark rows for this op")
    elif document["device"] == "model":
        console.print(_roof_table(document))
        console.print("Rooflines are bounds: no time here was measured. us are least times; x is what 64-row tiles add to the arithmetic.")
    else:
        console.print(_timing_table(document))
        for row in document["rows"]:
            if row["status"] != "timed":
                console.print(f"{row['name']}: {row['status'].replace('_', ' ')}: {row['reason']}", highlight=False)


def _table(title: str, left: list[str], right: list[str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _kernel_table(kernels: list[dict[str, Any]]) -> Any:
    table = _table("Kernels, static", ["kernel"], ["threads", "cluster", "registers", "stack B", "smem B", "smem %"])
    table.add_column("instructions", overflow="fold")
    for kernel in kernels:
        table.add_row(
            kernel["name"],
            str(kernel["threads"]),
            str(kernel["cluster"]),
            str(kernel["registers"]),
            str(kernel["stack_bytes"]),
            str(kernel["smem_bytes"]),
            f"{100 * kernel['smem_share']:.0f}",
            ", ".join(f"{name} {count}" for name, count in kernel["instructions"].items()),
        )
    return table


def _roof_table(document: dict[str, Any]) -> Any:
    gpus = [gpu["name"] for gpu in document["gpus"]]
    table = _table("Rooflines", ["row", "problem"], ["GFLOP", "MB", "FLOP/B", "tiles x", *[f"{name} us" for name in gpus], "H200 goal us"])
    for row in document["rows"]:
        table.add_row(
            row["name"],
            row["text"],
            f"{row['flops'] / 1e9:.4g}",
            f"{row['bytes'] / 1e6:.4g}",
            f"{row['intensity']:.3g}",
            "" if row["tile_padding"] is None else f"{row['tile_padding']:.3g}",
            *[f"{row['roofs'][name]['us']:.4g} {row['roofs'][name]['bound'][0].upper()}" for name in gpus],
            "" if row["goal_us"] is None else f"{row['goal_us']:g}",
        )
    return table


def _timing_table(document: dict[str, Any]) -> Any:
    title = f"Timings on {document['environment']['gpu']}"
    table = _table(title, ["row", "problem"], ["us", "p10-p90", "A/A", "main us", "TFLOP/s", "GB/s", "limit us", "of limit", "goal us"])
    for row in document["rows"]:
        if row["status"] != "timed":
            continue
        cold, main = row["cold_us"], row.get("kernel_us", {}).get("dense_decode")
        table.add_row(
            row["name"],
            row["text"],
            f"{cold['median']:.4g}",
            f"{cold['p10']:.4g}-{cold['p90']:.4g}",
            f"{row['control_ratio']['median']:.3f}",
            "" if main is None else f"{main:.4g}",
            f"{row['tflops']:.4g}",
            f"{row['gbytes_per_s']:.4g}",
            f"{row['limit_us']:.4g}",
            f"{100 * row['fraction_of_limit']:.0f} %",
            "" if row["goal_us"] is None else f"{row['goal_us']:g}",
        )
    return table
