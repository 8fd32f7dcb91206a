"""Command `cute-mla profile`: static figures of the kernels, rooflines with predictions, and measured times."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import click

from cute_mla.runtime.errors import ArtifactError, DeviceError
from cute_mla.spec.arch import ARCHS, Arch

from .profile_tables import show

OPS = ("dense_decode", "sparse_decode", "sparse_prefill", "dense_prefill", "combine", "merge_states", "split_plan")

_DEFAULT_BUDGET_S = 300.0


@click.command()
@click.option("--arch", type=click.Choice([*ARCHS, "all"]), default="all", help="Architecture of the kernels to report.")
@click.option("--op", type=click.Choice([*OPS, "all"]), default="all", help="Operation to report.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "model"]),
    default="auto",
    help="cuda: time on the GPU. model: static figures and predictions, nothing is timed. auto: cuda if there is a matching GPU.",
)
@click.option("--rows", default="", help="Rows or cases, comma-separated, such as D1,D5.fixed. Default: all.")
@click.option(
    "--budget", type=click.FloatRange(min=0), default=_DEFAULT_BUDGET_S, help="Time limit in seconds; rows that were not run are named."
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the whole document.")
@click.option(
    "--plot",
    "plot_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="SVG file for the roofline. Times against batch and length go to NAME-latency.svg in the same folder.",
)
def profile(arch: str, op: str, device: str, rows: str, budget: float, json_file: Path | None, plot_file: Path | None) -> None:
    """Report static figures of the built kernels and the bounds of each problem, and time problems on a GPU.

    On a GPU this succeeds if at least one row was timed and no row was wrong or failed.
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
        latency = report.latency_plot(document)
        if latency is not None:
            _write(plot_file.with_stem(f"{plot_file.stem}-latency"), latency)
    show(document)
    if not succeeded(document):
        raise SystemExit(1)


def succeeded(document: dict[str, Any]) -> bool:
    """Return whether a document counts as success: nothing to time, or rows timed and none wrong or failed."""
    if document["device"] == "model":
        return True
    states = {row["status"] for row in document["rows"]}
    return "timed" in states and not states & {"wrong", "failed"}


def _is_timed(device: str, archs: list[Arch]) -> bool:
    """Return whether to time on a GPU. DeviceError if --device cuda finds no matching GPU."""
    if device == "model":
        return False
    from cute_mla.profiles.measure.cuda_bench import GpuMismatchError, matching_arch

    try:
        matching_arch(archs)
    except GpuMismatchError as mismatch:
        if device == "cuda":
            raise
        click.echo(f"{mismatch}: static report and predictions only", err=True)
        return False
    return True


def _show_progress(json_file: Path | None, name: str, so_far: dict[str, Any]) -> None:
    """Name the row about to be timed, and write the document so far, because a kernel that hangs ends the process."""
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
