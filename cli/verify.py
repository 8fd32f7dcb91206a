"""Command `cute-mla verify`: compares a suite of cases with the fp64 reference, on a GPU or on the simulated device."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import repeat
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from cute_mla.runtime.artifacts import Artifacts, load_artifacts
from cute_mla.runtime.errors import ArtifactError
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.kernel_ops import OPS

from .options import ALL, ARCH, Finite, Name, check_writable, did_you_mean, selected, write_file
from .output import print_table
from .verify_bits import JSON_SECONDS, compare_devices
from .verify_progress import progress_of
from .verify_summary import Run, Verdict, summarise

if TYPE_CHECKING:
    from cute_mla.testing.runner import Kind, Record, Schedule, Target
    from cute_mla.testing.suites.entries import SuiteEntry

SUITES = ("quick", "smoke", "full")

_MOST_NAMES = 5
_CODES = ("ptx", "sass")
_BOTH = "both"

Job = tuple["SuiteEntry[Any]", "Target"]


@dataclass(frozen=True)
class Options:
    """The options of the command, by the names of its parameters."""

    arch: str
    op: tuple[str, ...]
    device: str
    suite: str
    schedules: int | None
    code: str
    replay: str | None
    sample: str | None
    seed: int
    case_seconds: float
    against: str | None
    json: Path | None
    listed: bool
    stale_ok: bool
    verbose: bool

    @property
    def archs(self) -> list[Arch]:
        """Return the architectures whose kernels are verified."""
        return list(ARCHS.values()) if self.arch == ALL else [ARCHS[self.arch]]

    @property
    def ops(self) -> list[str]:
        """Return the ops that are verified."""
        return selected(self.op, OPS)


@click.command()
@click.option("--arch", type=ARCH, default=ALL, help="Architecture whose kernels are verified.")
@click.option("--op", type=Name([*OPS, ALL]), multiple=True, help="Operation that is verified; may be repeated. Default: all.")
@click.option(
    "--device",
    type=Name(["auto", "cuda", "sim"]),
    default="auto",
    help="Where kernels run. auto: for each architecture, on a matching GPU if there is one, else on the simulated device.",
)
@click.option("--suite", type=Name(SUITES), default="smoke", help="Which cases: quick takes half a minute, smoke minutes, full an hour.")
@click.option(
    "--schedules",
    type=click.IntRange(1, 1000),
    show_default="2 in the quick suite and with --replay, else 1: round_robin and lazy in turn over the cases of a kernel",
    help="Number of schedules of the simulated device that each case runs under; all must give the same bits.",
)
@click.option(
    "--code",
    type=Name([*_CODES, _BOTH]),
    default=_CODES[0],
    help="What the simulated device runs: the PTX of the kernels, the machine code (SASS) of their cubins, or both, with the same bits.",
)
@click.option(
    "--replay",
    metavar="CASE[/SCHEDULE[@SEED][:CODE]]",
    show_default="all cases",
    help="Run only the case with this id, under this schedule, such as random@3 or lazy:sass. A failed run prints the value to use.",
)
@click.option(
    "--sample",
    metavar="N[@TEXT]",
    show_default="all cases",
    help="Run only N cases, drawn by the text, such as a commit: equal texts draw equal cases.",
)
@click.option("--seed", type=click.IntRange(0, (1 << 32) - 1), default=0, help="Seed of the tensors and of the schedules.")
@click.option(
    "--case-seconds",
    type=Finite(min=0, min_open=True),
    default=20.0,
    help="Time of a case on a GPU, after which its process is killed and the case is recorded as hung.",
)
@click.option(
    "--against",
    type=Name(["sim"]),
    show_default="the fp64 reference",
    help="With --device cuda: compare the bits of the GPU's results with those of the simulated device with as many SMs.",
)
@click.option("--json", type=click.Path(dir_okay=False, path_type=Path), show_default="none", help="File for the records.")
@click.option("--list", "listed", is_flag=True, help="List the cases of the suite and run nothing.")
@click.option("--stale-ok", is_flag=True, help="Go on although the sources of this tree are not those of the built kernels.")
@click.option("--verbose", "-v", is_flag=True, help="Print every run, the worst errors, and why cases were reduced or not run.")
def verify(**chosen: Any) -> None:
    """Check every artefact's sha256, then run cases and compare their results with an fp64 reference.

    Succeeds if no artefact is damaged or stale, at least one case ran and every case that ran passed. A case whose kernel is missing or
    damaged fails; the others run. Nor does a kernel that hangs, faults or ends its process keep the others from running.
    """
    options = Options(**chosen)
    if options.against and options.device != "cuda":
        raise click.UsageError(f"--against {options.against}: the device is {options.device}; supported: --device cuda")
    check_writable("--json", options.json)
    jobs = _jobs(options)
    if options.listed:
        _list(jobs)
        return
    damages = _check_artifacts(options)
    if options.against:
        raise SystemExit(
            compare_devices([_runner_job(job) for job in jobs if job[0].mode != "skipped"], options.case_seconds, options.json)
        )
    begin = time.monotonic()
    run = _run(jobs, options)
    verdict = Verdict.of(run, time.monotonic() - begin, damages)
    summarise(run, verdict, options.suite, verbose=options.verbose)
    if verdict.exit_code:
        raise SystemExit(verdict.exit_code)


def _jobs(options: Options) -> list[Job]:
    """Return the entries of the suite for each architecture that has a device. UsageError for a --replay without a case."""
    from cute_mla.testing import runner
    from cute_mla.testing.suite import suite

    case_id, slash, schedule = (options.replay or "").partition("/")
    if options.replay is not None and not case_id:
        raise click.UsageError(f"--replay: {options.replay!r} names no case; supported: the id of a case, as --list prints it")
    order = _schedule(schedule) if slash else None
    jobs: list[Job] = []
    for arch in options.archs:
        kind = _kind(arch, options.device)
        if kind is None:
            click.echo(f"{arch.name}: no GPU of compute capability {arch.capabilities_text} here, nothing is run", err=True)
            continue
        for op in options.ops:
            simulated = kind == "sim" or bool(options.against)
            entries = suite(options.suite, op, simulated=simulated, arch=arch, seed=options.seed)
            orders = _orders([entry for entry in entries if entry.mode != "skipped"], arch, options, order)
            jobs += [(entry, runner.Target(arch.name, kind, () if entry.mode == "skipped" else next(orders))) for entry in entries]
    if options.sample is not None:
        return _sampled(jobs, options.sample, options)
    if not case_id:
        return jobs
    found = [(entry, target) for entry, target in jobs if entry.case.id == case_id]
    if not found:
        near = did_you_mean(case_id, (entry.case.id for entry, _ in jobs))
        raise click.UsageError(f"--replay: the suite {options.suite} of {', '.join(options.ops)} has no case {case_id}{near}")
    return found


def _sampled(jobs: list[Job], sample: str, options: Options) -> list[Job]:
    """Return the jobs that a sample draws, in their order, and print the command that draws them again. UsageError for a wrong one."""
    number, _, text = sample.partition("@")
    if not (number.isascii() and number.isdecimal() and int(number)):
        raise click.UsageError(f"--sample: {sample!r}; supported: N or N@TEXT, N at least 1")
    if options.replay is not None:
        raise click.UsageError("--sample draws cases and --replay names one: only one of them is supported at a time")
    running = [job for job in jobs if job[0].mode != "skipped"]
    drawn = sorted(running, key=lambda job: sha256(f"{text}/{job[1].arch}/{job[0].case.op}/{job[0].case.id}".encode()).digest())[
        : int(number)
    ]
    named = [
        f"--{name} {value}"
        for name in ("arch", "device", "suite", "schedules", "code", "seed", "against")
        if (value := getattr(options, name))
    ]
    ops = [f"--op {op}" for op in options.op]
    click.echo(f"{len(drawn)} of {len(running)} cases; again: cute-mla verify {' '.join([*ops, *named])} --sample {quote(sample)}")
    return [job for job in running if job in drawn]


def _orders(entries: list[SuiteEntry[Any]], arch: Arch, options: Options, order: Schedule | None) -> Iterator[tuple[Schedule, ...]]:
    """Return the schedules of each entry, all of which run: the one of --replay, the first ones, or one of the usual ones in turn."""
    from cute_mla.testing import runner

    codes = _CODES if options.code == _BOTH else (options.code,)
    if order is not None:
        return repeat((order,))
    if options.schedules is None and options.suite != "quick" and options.replay is None:
        return iter(runner.schedules_in_turn([entry.case for entry in entries], arch, options.seed, codes))
    return repeat(runner.schedules(options.schedules or runner.USUAL_SCHEDULES, options.seed, codes))


def _list(jobs: list[Job]) -> None:
    """Print the cases, one line each, with the devices that they run on."""
    where: dict[tuple[str, str, int, str], list[str]] = {}
    for entry, target in jobs:
        runs = f"{entry.mode}: {entry.reason}" if entry.reason else entry.mode
        where.setdefault((entry.case.op, entry.case.id, entry.case.tiles, runs), []).append(f"{target.arch} on {target.kind}")
    print_table(("op", "case", "tiles", "runs", "where"), [(*case, ", ".join(devices)) for case, devices in where.items()])
    click.echo(f"{len(where)} cases")


def _check_artifacts(options: Options) -> int:
    """Check the hashes of all artefacts, print their origin and what is damaged, and return how many damages there are.

    ArtifactError without --stale-ok if the sources of this tree are not those of a kernel.
    """
    artifacts = load_artifacts()
    damages = artifacts.damages()
    for damage in damages:
        click.echo(f"DAMAGED {damage}", err=True)
    source = "built in place" if artifacts.provenance is None else f"from {artifacts.provenance.source}"
    found = f"{len(damages)} damaged" if damages else "the sha256 of every file is the manifest's"
    click.echo(f"{len(artifacts.manifest.kernels)} kernels in {artifacts.folder}, {source}: {found}")
    stale = _stale_kernels(artifacts, options)
    if not stale:
        return len(damages)
    names = ", ".join(stale[:_MOST_NAMES]) + (f" and {len(stale) - _MOST_NAMES} more" if len(stale) > _MOST_NAMES else "")
    said = f"{len(stale)} of the built kernels have other sources than this tree: {names}"
    if not options.stale_ok:
        raise ArtifactError(f"{said}; build them again with `cute-mla build`, or go on with --stale-ok")
    click.echo(f"warning: {said}", err=True)
    return len(damages)


def _stale_kernels(artifacts: Artifacts, options: Options) -> list[str]:
    """Return the built kernels of these architectures whose sources have changed. Those of a wheel have its commit's sources."""
    if artifacts.provenance is not None:
        return []
    from cute_mla.aot_build.staleness import changed_kernels

    return changed_kernels(artifacts.manifest, [arch.name for arch in options.archs])


def _schedule(text: str) -> Schedule:
    """Parse a schedule from its text, NAME[@SEED][:CODE]. UsageError for an unknown name or code, or a bad seed."""
    from cute_mla.testing import runner

    order, colon, code = text.partition(":")
    name, at, seed = order.partition("@")
    if name not in runner.SCHEDULES or (at and not seed.isdecimal()) or (colon and code not in _CODES):
        supported = f"{', '.join(runner.SCHEDULES)}, each with or without @SEED, and :{' or :'.join(_CODES)}"
        raise click.UsageError(f"--replay: the schedule is {text!r}; supported: {supported}{did_you_mean(name, runner.SCHEDULES)}")
    return runner.Schedule(name, int(seed or 0), code or _CODES[0])


def _kind(arch: Arch, device: str) -> Kind | None:
    """Return where an architecture's kernels run, or None if --device cuda finds no matching GPU."""
    if device == "sim":
        return "sim"
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability(0) in arch.compute_capabilities:
        return "cuda"
    return "sim" if device == "auto" else None


def _run(jobs: list[Job], options: Options) -> Run:
    """Run the jobs, show the progress, and write the file. An interruption ends the workers and returns what was done so far."""
    from cute_mla.testing import runner

    records: list[list[Record]] = [
        [runner.skipped(entry.case, target, entry.reason)] if entry.mode == "skipped" else [] for entry, target in jobs
    ]
    to_run = [index for index, (entry, _) in enumerate(jobs) if entry.mode != "skipped"]
    gpu = replace(runner.GPU_WORK, step_seconds=options.case_seconds)
    written, interrupted = time.monotonic(), False
    try:
        with (
            progress_of([jobs[index][0].case for index in to_run]) as progress,
            closing(runner.run_all([_runner_job(jobs[index]) for index in to_run], on_start=progress.start, gpu=gpu)) as results,
        ):
            for position, done in results:
                records[to_run[position]] = done
                progress.end(position, done)
                if time.monotonic() - written > JSON_SECONDS:
                    _write(options.json, records)
                    written = time.monotonic()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        _write(options.json, records)
    return Run(records, interrupted=interrupted)


def _runner_job(job: Job) -> tuple[Any, Target, str]:
    """Return a job as the runner takes it: the case, its target, and what was reduced."""
    entry, target = job
    return entry.case, target, entry.reason


def _write(json_file: Path | None, records: list[list[Record]]) -> None:
    """Write all records so far, atomically. An error that is not finite becomes null, because JSON has no such number."""
    if json_file is None:
        return
    entries = [{name: _json_value(value) for name, value in asdict(record).items()} for case in records for record in case]
    write_file(json_file, json.dumps(entries, indent=1, allow_nan=False) + "\n")


def _json_value(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
