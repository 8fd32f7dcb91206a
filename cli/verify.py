"""Command `cute-mla verify`: compares a suite of cases with the fp32 reference, on a GPU or on the simulated device."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import ARCHS, Arch

from .output import is_terminal
from .verify_summary import count, result_of, summarise

if TYPE_CHECKING:
    from cute_mla.testing.runner import Kind, Record, Schedule, Target
    from cute_mla.testing.suites.entries import SuiteEntry

OPS = ("dense_decode", "sparse_decode", "sparse_prefill", "dense_prefill", "cache_write", "cache_gather")
SUITES = ("smoke", "full")

_JSON_SECONDS = 10.0  # period of writing the file, so that an interrupted run leaves its records

Job = tuple["SuiteEntry[Any]", "Target"]
Show = Callable[[int, list["Record"]], None]  # takes the number of finished cases, and the records of the last one


@click.command()
@click.option("--arch", type=click.Choice([*ARCHS, "all"]), default="all", help="Architecture whose kernels are verified.")
@click.option("--op", type=click.Choice([*OPS, "all"]), default="all", help="Operation that is verified.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "sim"]),
    default="auto",
    help="Where kernels run. auto: for each architecture, on a matching GPU if there is one, else on the simulated device.",
)
@click.option("--suite", "suite_name", type=click.Choice(SUITES), default="smoke", help="Which cases.")
@click.option(
    "--schedules",
    type=click.IntRange(min=1),
    default=2,
    help="Number of schedules of the simulated device that each case runs under; all must give the same bits.",
)
@click.option(
    "--replay",
    metavar="CASE[/SCHEDULE[@SEED]]",
    default="",
    help="Run only the case with this id, under this schedule, such as random@3. A failed run prints the value to use.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the tensors and of the schedules.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the records.")
def verify(arch: str, op: str, device: str, suite_name: str, schedules: int, replay: str, seed: int, json_file: Path | None) -> None:
    """Check every artefact's sha256, then run cases and compare their results with an fp32 reference.

    Succeeds if no artefact is damaged, at least one case ran and every case that ran passed.
    """
    from cute_mla.testing import runner

    if json_file is not None and json_file.exists() and not json_file.is_file():
        raise click.UsageError(f"--json: {json_file} is no regular file, and would be replaced by a regular one")
    archs = [ARCHS[arch]] if arch != "all" else list(ARCHS.values())
    ops = [op] if op != "all" else list(OPS)
    case_id, _, schedule = replay.partition("/")
    orders = (_schedule(schedule),) if schedule else runner.schedules(schedules, seed)
    jobs: list[Job] = []
    for each in archs:
        kind = _kind(each, device)
        if kind is None:
            click.echo(f"{each.name}: no GPU of compute capability {each.capabilities_text} here, nothing is run", err=True)
            continue
        target = runner.Target(each.name, kind, orders)
        jobs += [(entry, target) for each_op in ops for entry in _suite(suite_name, each_op, kind, seed)]
    if case_id:
        jobs = [(entry, target) for entry, target in jobs if entry.case.id == case_id]
        if not jobs:
            raise click.UsageError(f"--replay: the suite {suite_name} of {', '.join(ops)} has no case {case_id}")
    _check_artifacts()
    records = _run(jobs, json_file)
    figures = count(records)
    if records:
        summarise(records, figures, suite_name)
    click.echo(f"{figures.passed} passed, {figures.failed} failed")
    if figures.failed or not figures.passed:
        raise SystemExit(1)


def _check_artifacts() -> None:
    """Check the hashes of all artefacts, and print their origin. ArtifactError if a file differs from the manifest."""
    artifacts = load_artifacts()
    artifacts.check()
    source = "built in place" if artifacts.provenance is None else f"from {artifacts.provenance.source}"
    click.echo(f"{len(artifacts.manifest.kernels)} kernels in {artifacts.folder}, {source}: the sha256 of every file is the manifest's")


def _schedule(text: str) -> Schedule:
    """Parse a schedule from its text, NAME or NAME@SEED. UsageError for an unknown name or a bad seed."""
    from cute_mla.testing import runner

    name, at, seed = text.partition("@")
    if name not in runner.SCHEDULES or (at and not seed.isdecimal()):
        raise click.UsageError(f"--replay: the schedule is {text!r}; supported: {', '.join(runner.SCHEDULES)}, each with or without @SEED")
    return runner.Schedule(name, int(seed or 0))


def _kind(arch: Arch, device: str) -> Kind | None:
    """Return where an architecture's kernels run, or None if --device cuda finds no matching GPU."""
    if device == "sim":
        return "sim"
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability(0) in arch.compute_capabilities:
        return "cuda"
    return "sim" if device == "auto" else None


def _suite(name: str, op: str, kind: Kind, seed: int) -> list[SuiteEntry[Any]]:
    from cute_mla.testing.suites import suite

    return suite(name, op, simulated=kind == "sim", seed=seed)


def _run(jobs: list[Job], json_file: Path | None) -> list[list[Record]]:
    """Run the jobs, show each as it finishes, and write the file. Returns one list of records a job."""
    from cute_mla.testing import runner

    records: list[list[Record]] = [
        [runner.skipped(entry.case, target, entry.reason)] if entry.mode == "skipped" else [] for entry, target in jobs
    ]
    running = [index for index, (entry, _) in enumerate(jobs) if entry.mode != "skipped"]
    results = runner.run_all(
        [(jobs[i][0].case, jobs[i][1], jobs[i][0].reason) for i in running],
        on_start=lambda case: click.echo(f"running {case.id}", err=True),
    )
    written = time.monotonic()
    try:
        with _progress(len(running), plain=json_file is not None or not is_terminal()) as show:
            for ended, (position, done) in enumerate(results, start=1):
                records[running[position]] = done
                show(ended, done)
                if time.monotonic() - written > _JSON_SECONDS:
                    _write(json_file, records)
                    written = time.monotonic()
    finally:
        _write(json_file, records)
    return records


def _write(json_file: Path | None, records: list[list[Record]]) -> None:
    """Write all records so far, atomically. An error that is not finite becomes null, because JSON has no such number."""
    if json_file is None:
        return
    entries = [{name: _json_value(value) for name, value in asdict(record).items()} for case in records for record in case]
    partial = json_file.with_name(f"{json_file.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(entries, indent=1, allow_nan=False) + "\n")
    partial.replace(json_file)


def _json_value(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _progress(total: int, *, plain: bool) -> Iterator[Show]:
    """Yield the function that shows each finished case: as a line, or on a terminal as a progress bar."""
    if plain:
        yield lambda ended, done: click.echo(f"[{ended}/{total}] {done[0].case}: {result_of(done)}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda ended, done: bar.update(task, completed=ended, description=f"{done[0].case}: {result_of(done)}")
