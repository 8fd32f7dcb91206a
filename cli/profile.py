"""Command `cute-mla profile`: static figures of the kernels, rooflines with predictions, and measured times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cute_mla.runtime.errors import ArtifactError, DeviceError
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.kernel_ops import OPS as PUBLIC_OPS

from .clock_tables import show_clock
from .options import ALL, ARCH, Finite, Hardware, Name, check_writable, did_you_mean, selected, write_file
from .peer import read_peer, time_peer_on
from .profile_tables import show
from .timeline import write_timeline

if TYPE_CHECKING:
    from cute_mla.profiles.rows import Case

OPS = (*PUBLIC_OPS, "combine", "split_plan")  # also of kernels that run inside other calls, of which rows exist or figures are shown
GPUS = ("H200", "H100", "H800", "B200", "B300", "RTX PRO 6000", "RTX 5090", "GB10")

CLOCK = "clock"
_DEFAULT_BUDGET_S = 300.0
_DEFAULT_ROW_S = 20.0
_FILE = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True)
class Options:
    """The options of the command, by the names of its parameters."""

    arch: str
    op: tuple[str, ...]
    device: str
    gpu: tuple[str, ...]
    rows: str | None
    budget: float
    row_seconds: float
    json: Path | None
    plot: Path | None
    timeline: Path | None
    peer_cubin: Path | None
    peer_launch: tuple[Path, ...]

    @property
    def archs(self) -> list[Arch]:
        """Return the architectures to report."""
        return list(ARCHS.values()) if self.arch == ALL else [ARCHS[self.arch]]

    @property
    def ops(self) -> list[str]:
        """Return the ops to report."""
        return selected(self.op, OPS)


@click.command()
@click.option("--arch", type=ARCH, default=ALL, help="Architecture of the kernels to report.")
@click.option("--op", type=Name([*OPS, ALL]), multiple=True, help="Operation to report; may be repeated. Default: all.")
@click.option(
    "--device",
    type=Name(["auto", "cuda", "model", "clock"]),
    default="auto",
    help="cuda: time on the GPU. model: static figures and recorded predictions of the clock, nothing is timed. clock: predictions from "
    "machine code, clock by clock, which takes 10 to 20 s a row. auto: cuda if there is a matching GPU, else model.",
)
@click.option(
    "--gpu",
    type=Hardware(GPUS),
    multiple=True,
    help="GPU to predict for; may be repeated. Default: H200, or with --arch the first that runs its kernels.",
)
@click.option("--rows", show_default="all", help="Rows or cases, comma-separated, such as D1,D5.fixed; prints them without static figures.")
@click.option("--budget", type=Finite(min=0), default=_DEFAULT_BUDGET_S, help="Time limit in seconds; rows that were not run are named.")
@click.option(
    "--row-seconds",
    type=Finite(min=1),
    default=_DEFAULT_ROW_S,
    help="On a GPU: time limit in seconds for each step of a row, such as its set-up or the first run of a peer; beyond it, the row hangs.",
)
@click.option("--json", type=_FILE, show_default="none", help="File for the whole document, which has every GPU.")
@click.option("--plot", type=_FILE, show_default="none", help="SVG file for the roofline.")
@click.option(
    "--timeline",
    type=_FILE,
    show_default="none",
    help="With --device clock: JSON trace for ui.perfetto.dev of one cluster of each row's kernel, on the first GPU.",
)
@click.option("--peer-cubin", type=_FILE, show_default="none", help="With --device clock: cubin of another kernel to time as well.")
@click.option(
    "--peer-launch",
    type=_FILE,
    multiple=True,
    show_default="none",
    help="JSON description of a launch of that kernel; given twice, the difference is the time of a block.",
)
def profile(**chosen: Any) -> None:
    """Report static figures of the built kernels and the bounds of each problem, and time problems on a GPU.

    On a GPU this succeeds if at least one row was timed, and every row was timed or not run. Rows run in a child process. One that hangs,
    faults or dies is recorded, and the next goes on in a fresh process.
    """
    from cute_mla.profiles import report

    options = Options(**chosen)
    check_writable("--json", options.json, make_folder=True)
    check_writable("--plot", options.plot, make_folder=True)
    check_writable("--timeline", options.timeline, make_folder=True)
    cases = _cases(options)
    gpus = _shown_gpus(options)
    if bool(options.peer_cubin) != bool(options.peer_launch) or (options.peer_cubin and options.device != CLOCK):
        raise click.UsageError("--peer-cubin, --peer-launch and --device clock belong together")
    if options.timeline is not None and options.device != CLOCK:
        raise click.UsageError(f"--timeline needs --device {CLOCK}; given: --device {options.device}")
    if options.device == CLOCK:
        _profile_clock(options, cases, gpus)
        return
    try:
        if _is_timed(options.device, options.archs):
            progress = partial(_show_progress, options.json)
            document = report.cuda_document(options.archs, options.ops, cases, report.Limits(options.budget, options.row_seconds), progress)
        else:
            live = gpus if options.rows else ()
            document = report.model_document(options.archs, options.ops, cases, live)
    except (ArtifactError, DeviceError) as error:
        refusal = {"format": report.FORMAT, "device": options.device, "error": str(error), "rows": []}
        _write(options.json, json.dumps(refusal) + "\n")
        raise
    _write_document(options.json, document)
    if options.plot is not None:
        _write(options.plot, report.plot(document, gpus[0]))
    show(document, gpus, static=options.rows is None)
    if not succeeded(document):
        raise SystemExit(1)


def _profile_clock(options: Options, cases: list[Case], gpus: list[str]) -> None:
    """Predict the rows by the clock, one after the other. Exit 1 if the clock could time none of them, or not the peer."""
    from cute_mla.profiles import report

    if options.plot is not None:
        raise click.UsageError("--plot: --device clock draws nothing; supported: --device model, cuda")
    launches, cubin = read_peer(options.peer_cubin, options.peer_launch)
    rows: list[dict[str, Any]] = []
    for case in cases:
        click.echo(f"predicting {case.name}", err=True)
        rows.append(report.clock_row(case, gpus))
        _write_document(options.json, report.clock_document([arch.name for arch in options.archs], gpus, rows, None))
    peer = {gpu: time_peer_on(gpu, cubin, launches) for gpu in gpus} if launches else None
    document = report.clock_document([arch.name for arch in options.archs], gpus, rows, peer)
    _write_document(options.json, document)
    if options.timeline is not None:
        write_timeline(options.timeline, cases, gpus[0])
    show_clock(document, gpus)
    if not options.gpu:
        click.echo(f"For other GPUs than {gpus[0]}: --gpu NAME, or --gpu all.")
    if not succeeded(document):
        raise SystemExit(1)


def _cases(options: Options) -> list[Case]:
    """Return the cases to report. UsageError for an unknown row or case, with the nearest names."""
    from cute_mla.profiles import report

    names = [name.strip() for name in (options.rows or "").split(",") if name.strip()]
    if options.rows is not None and not names:
        raise click.UsageError(f"--rows: {options.rows!r} names no row; supported: rows and cases, such as D1,D5.fixed")
    try:
        return report.cases_for(options.ops, names)
    except ValueError as error:
        every = report.cases_for(OPS, [])
        known = [*(case.row for case in every), *(case.name for case in every)]
        near = "".join(did_you_mean(name, known) for name in names if name not in known)
        raise click.UsageError(f"{error}{near}") from error


def _shown_gpus(options: Options) -> list[str]:
    """Return the GPUs whose predictions are printed. UsageError for one that does not run the chosen architectures."""
    from cute_mla.profiles.roofline import gpus_of

    names = [gpu.name for gpu in gpus_of(options.archs)]
    if not options.gpu:
        return names[:1]
    if ALL in options.gpu:
        return names
    for name in options.gpu:
        if name not in names:
            raise click.UsageError(f"--gpu: {name} does not run kernels of {options.arch}; supported: {', '.join(names)}")
    return list(dict.fromkeys(options.gpu))


def succeeded(document: dict[str, Any]) -> bool:
    """Return whether a document counts as success: nothing to time, or rows timed and the others not run.

    Of the clock: a row or the peer was timed on each GPU, or nothing was asked for.
    """
    if document["device"] == "model":
        return True
    if document["device"] == CLOCK:
        return all(any("us" in row["clock"][gpu] for row in document["rows"]) or not document["rows"] for gpu in document["constants"])
    states = {row["status"] for row in document["rows"]}
    return "timed" in states and states <= {"timed", "not_run"}


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
    """Name the row about to be timed, and write the document so far, so that it outlives the process."""
    click.echo(f"timing {name}", err=True)
    _write_document(json_file, so_far)


def _write_document(json_file: Path | None, document: dict[str, Any]) -> None:
    from cute_mla.profiles.report import plain

    _write(json_file, json.dumps(plain(document), indent=1, allow_nan=False) + "\n")


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        write_file(path, text)
