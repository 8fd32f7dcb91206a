"""cute-mla verify: runs a suite of cases against the fp32 reference, on a GPU or on the simulated device."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import ARCHS, Arch

from .output import is_terminal, print_table

if TYPE_CHECKING:
    from cute_mla.testing.planned import Planned
    from cute_mla.testing.runner import Kind, Record, Schedule, Target

OPS = ("dense_decode", "sparse_decode", "sparse_prefill", "dense_prefill", "cache_write", "cache_gather")
SUITES = ("smoke", "full")

_JSON_SECONDS = 10.0  # how often the file is brought up to date, so that a run that is cut short leaves what it found
_COLUMNS = ("case", "arch", "device", "schedule", "result", "out max abs", "out cos diff", "lse max abs", "findings", "seconds")
_FINDINGS_SHOWN = 5

Job = tuple["Planned[Any]", "Target"]
Show = Callable[[int, list["Record"]], None]  # takes how many cases have ended, and the records of the last


@dataclass(frozen=True)
class Figures:
    """Counts of cases: a case passes if each of its runs does."""

    passed: int
    failed: int
    reduced: int
    not_run: int


@click.command()
@click.option("--arch", type=click.Choice([*ARCHS, "all"]), default="all", help="Architecture whose kernels are verified.")
@click.option("--op", type=click.Choice([*OPS, "all"]), default="all", help="Operation that is verified.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "sim"]),
    default="auto",
    help="Where kernels run. auto: per architecture, on a GPU if a matching one is there, else on the simulated device.",
)
@click.option("--suite", "suite_name", type=click.Choice(SUITES), default="smoke", help="Which cases.")
@click.option(
    "--schedules",
    type=click.IntRange(min=1),
    default=2,
    help="Schedules of the simulated device that each case runs under; all must give the same bits.",
)
@click.option(
    "--replay",
    metavar="CASE[/SCHEDULE[@SEED]]",
    default="",
    help="Only the case of this id, under this schedule, such as random@3. A run that failed says what to give here.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the tensors and of the schedules.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="File for the records.")
def verify(arch: str, op: str, device: str, suite_name: str, schedules: int, replay: str, seed: int, json_file: Path | None) -> None:
    """Check every artefact's sha256, then run cases and compare them with an fp32 reference.

    Succeeds if no artefact is damaged, at least one case ran and all that ran passed.
    """
    from cute_mla.testing import runner

    if json_file is not None and json_file.exists() and not json_file.is_file():
        raise click.UsageError(f"--json: {json_file} is no regular file, and would be replaced by one")
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
        jobs += [(planned, target) for each_op in ops for planned in _suite(suite_name, each_op, kind, seed)]
    if case_id:
        jobs = [(planned, target) for planned, target in jobs if planned.case.id == case_id]
        if not jobs:
            raise click.UsageError(f"--replay: the suite {suite_name} of {', '.join(ops)} has no case {case_id}")
    _check_artifacts()
    records = _run(jobs, json_file)
    figures = count(records)
    if records:
        _summarise(records, figures, suite_name)
    click.echo(f"{figures.passed} passed, {figures.failed} failed")
    if figures.failed or not figures.passed:
        raise SystemExit(1)


def _check_artifacts() -> None:
    """Says which artefacts are about to run. ArtifactError if one of their files is not what the manifest says."""
    artifacts = load_artifacts()
    artifacts.check()
    source = "built in place" if artifacts.provenance is None else f"from {artifacts.provenance.source}"
    click.echo(f"{len(artifacts.manifest.kernels)} kernels in {artifacts.folder}, {source}: the sha256 of every file is the manifest's")


def _schedule(text: str) -> Schedule:
    """What Schedule shows as, read again."""
    from cute_mla.testing import runner

    name, at, seed = text.partition("@")
    if name not in runner.SCHEDULES or (at and not seed.isdecimal()):
        raise click.UsageError(f"--replay: the schedule is {text!r}; supported: {', '.join(runner.SCHEDULES)}, each with @SEED or without")
    return runner.Schedule(name, int(seed or 0))


def _replay(record: Record, suite_name: str) -> str:
    """The command that runs a failed run again, and nothing else."""
    where = f"--op {record.op} --arch {record.arch} --device {record.device} --suite {suite_name} --seed {record.seed}"
    return f"cute-mla verify {where} --replay {record.case}" + (f"/{record.schedule}" if record.schedule else "")


def _kind(arch: Arch, device: str) -> Kind | None:
    """Where an architecture's kernels run, or None if a GPU is asked for and none matches."""
    if device == "sim":
        return "sim"
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability(0) in arch.compute_capabilities:
        return "cuda"
    return "sim" if device == "auto" else None


def _suite(name: str, op: str, kind: Kind, seed: int) -> list[Planned[Any]]:
    from cute_mla.testing.suites import suite

    return suite(name, op, simulated=kind == "sim", seed=seed)


def count(records: list[list[Record]]) -> Figures:
    """Counts cases; one list of records per case."""
    ran = [[record.passed for record in case if record.passed is not None] for case in records]
    passed = sum(bool(results) and all(results) for results in ran)
    failed = sum(bool(results) and not all(results) for results in ran)
    reduced = sum(any(record.status == "reduced" for record in case) for case in records)
    return Figures(passed, failed, reduced, not_run=len(records) - passed - failed)


def _run(jobs: list[Job], json_file: Path | None) -> list[list[Record]]:
    """Runs the jobs, shows each as it ends and writes the file. One list of records per job."""
    from cute_mla.testing import runner

    records: list[list[Record]] = [
        [runner.skipped(planned.case, target, planned.reason)] if planned.fate == "skipped" else [] for planned, target in jobs
    ]
    running = [index for index, (planned, _) in enumerate(jobs) if planned.fate != "skipped"]
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
    """Writes all records so far, at once or not at all. What JSON cannot hold, an error that is not finite, becomes null."""
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
    """How each case is shown as it ends: by a line, or on a terminal by a bar."""
    if plain:
        yield lambda ended, done: click.echo(f"[{ended}/{total}] {done[0].case}: {_result(done)}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("verify"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda ended, done: bar.update(task, completed=ended, description=f"{done[0].case}: {_result(done)}")


def _result(records: list[Record]) -> str:
    """What became of a case, or of one run of it."""
    return "FAILED" if any(record.passed is False for record in records) else records[0].status


def _row(record: Record) -> tuple[object, ...]:
    """A record as the columns of the table."""
    errors = (record.out_max_abs, record.out_cos_diff, record.lse_max_abs)
    return (
        record.case,
        record.arch,
        record.device,
        record.schedule,
        _result([record]),
        *(None if error is None else float(f"{error:.1e}") for error in errors),
        len(record.findings),
        round(record.seconds, 2),
    )


def _summarise(records: list[list[Record]], figures: Figures, suite_name: str) -> None:
    """The table; what failed and why; the worst errors, of cases with equal bounds together; what was reduced or not run, and why."""
    flat = [record for case in records for record in case]
    ran = [record for record in flat if record.passed is not None]
    print_table(_COLUMNS, [_row(record) for record in ran])
    for record in ran:
        if not record.passed:
            click.echo(f"FAILED {record.arch} {record.device} {record.schedule or ''} {record.case}: {record.reason}")
            for finding in record.findings[:_FINDINGS_SHOWN]:
                click.echo(f"    {finding}")
            click.echo(f"    again: {_replay(record, suite_name)}")
    titles = (
        ("out max abs", "out_max_abs"),
        ("out cos diff", "out_cos_diff"),
        ("lse max abs", "lse_max_abs"),
        ("max_logits max abs", "max_logits_max_abs"),
    )
    of_bounds: dict[tuple[str, str, float], list[Record]] = {}
    for record in ran:
        of_bounds.setdefault((record.arch, record.op, record.out_cos_limit or 0.0), []).append(record)
    for (arch, op, limit), alike in sorted(of_bounds.items()):
        for title, name in titles:
            errors = [(getattr(record, name), record.case) for record in alike if getattr(record, name) is not None]
            if errors:
                bound = f" of {limit:.0e}" if name == "out_cos_diff" else ""
                worst, case = max(errors)
                click.echo(f"worst {title} on {arch}, {op}: {worst:.2e}{bound} in {case}")
    fates = Counter(fate for case in records for fate in map(_fate, case[:1]) if fate is not None)
    for (fate, reason), number in sorted(fates.items()):
        click.echo(f"{number} {fate}: {reason}")
    where = ", ".join(f"{arch} on {device}" for arch, device in sorted({(record.arch, record.device) for record in flat}))
    cases = f"{figures.passed + figures.failed} cases in {len(ran)} runs"
    click.echo(f"{where}: {cases}; of these {figures.reduced} reduced; {figures.not_run} not run")


def _fate(record: Record) -> tuple[str, str] | None:
    """How a case that does not run whole is counted: what became of it, and why without the figures of the single case."""
    if record.status == "skipped":
        return "not run", record.reason
    if record.status == "reduced":
        return "reduced", record.reason.split("; ")[0].split(": ")[-1]
    return None
