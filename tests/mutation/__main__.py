"""The commands: run and report of synchronisation; numbers, numbers-report and numbers-attack of numbers; machine, machine-report."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from cute_mla.cli.options import Finite
from cute_mla.runtime.artifacts import load_artifacts
from tests.mutation.attack import attack, drawn
from tests.mutation.bench import prepare, processes
from tests.mutation.campaign import (
    Line,
    coverage,
    explanations,
    judge_batch,
    judge_machine_code,
    judge_numbers,
    one_of_each_structure,
    read,
    unexplained,
    wanted,
    wanted_numbers,
)
from tests.mutation.sites import KINDS
from tests.mutation.verdicts import (
    NOTICED,
    OF_MACHINE_CODE,
    OPEN,
    Verdict,
    current,
    judged,
    judged_machine_code,
    mutation_of,
    table,
    unused,
)

T = TypeVar("T")
BATCH = 24  # mutations of a kernel that a process takes at a time


@click.group()
def main() -> None:
    """Break shipped kernels, and see whether the simulator notices."""


@main.command()
@click.option("--kernel", default="", help="Only kernels whose name has this regular expression.")
@click.option("--kind", default="", help="Only kinds whose name contains this.")
@click.option("--sample", type=click.IntRange(min=1), help="So many mutations of each kind and kernel, instead of all.")
@click.option("--seed", default=0, help="Which of them.")
@click.option("--seeds", default=2, help="Seeds of the random and adversarial schedules.")
@click.option("--jobs", default=2, help="Processes.")
@click.option("--out", default="mutations.jsonl", type=click.Path(dir_okay=False, path_type=Path), help="Records; what is there stays.")
def run(kernel: str, kind: str, sample: int | None, seed: int, seeds: int, jobs: int, out: Path) -> None:
    """Break kernels, one mutation at a time."""
    done = {line.key for line in read(out)}
    entries = {name: entry for name, entry in load_artifacts().manifest.kernels.items() if re.search(kernel, name)}
    batches = []
    for name, mutations in wanted(entries.values(), sample, seed, kind):
        ptx = entries[name].ptx_sha256[:12]
        left = [mutation for mutation in mutations if (name, ptx, mutation.kind, mutation.number) not in done]
        batches += [(name, left[start : start + BATCH]) for start in range(0, len(left), BATCH)]
    work(batches, partial(judge_batch, seeds=seeds), jobs, out)


def work(batches: Sequence[tuple[str, Sequence[T]]], judge: Callable[[str, Sequence[T]], list[Line]], jobs: int, out: Path) -> None:
    """Judge batches in processes of their own; append a record for each mutation as a batch ends."""
    total, ended = sum(len(batch) for _, batch in batches), 0
    with processes(jobs) as pool, out.open("a") as file:
        futures = {pool.submit(judge, name, batch): name for name, batch in batches}
        for future in as_completed(futures):
            lines = future.result()
            file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)
            file.flush()
            ended += len(lines)
            survivors = sum(not line.noticed for line in lines)
            click.echo(f"[{ended}/{total}] {futures[future]}: {len(lines)} broken, {survivors} not noticed")


@main.command()
@click.option("--kernel", default="", help="Only kernels whose name has this regular expression.")
@click.option("--sample", type=click.IntRange(min=1), default=100, help="So many mutations of each kernel, over all kinds.")
@click.option("--seed", default=0, help="Which of them, and which kernel of each structure.")
@click.option("--jobs", default=2, help="Processes.")
@click.option("--suite", type=click.Choice(("smoke", "full")), default="smoke", help="Whose cases run.")
@click.option("--out", default="numbers.jsonl", type=click.Path(dir_okay=False, path_type=Path), help="Records; what is there stays.")
def numbers(kernel: str, sample: int, seed: int, jobs: int, suite: str, out: Path) -> None:
    """Break numbers and indices of one kernel of each structure, and run its cases of a suite."""
    done = {line.key for line in read(out) if line.noticed != "no case"}
    artifacts = load_artifacts()
    entries = [entry for entry in one_of_each_structure(artifacts, seed) if re.search(kernel, entry.name)]
    batches = []
    for name, mutations in wanted_numbers(entries, sample, seed):
        ptx = artifacts.manifest.kernels[name].ptx_sha256[:12]
        left = [mutation for mutation in mutations if (name, ptx, mutation.kind, mutation.number) not in done]
        batches += [(name, left[start : start + BATCH]) for start in range(0, len(left), BATCH)]
    click.echo(f"seed {seed}: {sum(len(batch) for _, batch in batches)} mutations left of {len(entries)} kernels")
    work(batches, partial(judge_numbers, suite=suite), jobs, out)


@main.command()
@click.option("--out", default="numbers.jsonl", type=click.Path(dir_okay=False, path_type=Path), help="Records of runs.")
@click.option("--survivors", is_flag=True, help="List the mutations that no case noticed, with what is known of them.")
def numbers_report(out: Path, survivors: bool) -> None:
    """Print the verdicts on numeric mutations by kernel and by kind. Exit 1 if a survivor is open."""
    verdicts = _verdicts(out)
    click.echo(table("kernel", verdicts, lambda line: line.kernel))
    click.echo(table("kind", verdicts, lambda line: line.kind))
    open_ones = [item for item in verdicts if item.verdict == OPEN]
    for item in verdicts if survivors else open_ones:
        if item.verdict != NOTICED:
            line = item.line
            click.echo(f"{item.verdict}: {line.kernel}, {line.kind} #{line.number}, {line.place}, PTX line {line.line}: {item.code}")
    for known in unused(verdicts):
        click.echo(f"explains nothing: {known.kernel.pattern}, {known.kind.pattern}, {known.code.pattern}")
    if open_ones:
        raise SystemExit(1)


@main.command()
@click.option("--out", default="numbers.jsonl", type=click.Path(dir_okay=False, path_type=Path), help="Records of runs.")
@click.option("--number", type=click.IntRange(min=1), default=20, help="So many survivors.")
@click.option("--seed", default=0, help="Which of them, and which calls.")
@click.option("--seconds", type=Finite(min=1), default=30.0, help="CPU time for each.")
def numbers_attack(out: Path, number: int, seed: int, seconds: float) -> None:
    """Search for calls that show survivors which are explained or proved equal. Exit 1 if there are any."""
    prepare()
    shown = 0
    for item in drawn(_verdicts(out), number, seed):
        line = item.line
        result = attack(load_artifacts().manifest.kernels[line.kernel], mutation_of(line), seconds, seed)
        shown += bool(result.shown)
        found = result.shown or f"unseen in {result.calls} calls"
        click.echo(f"{found}: {item.verdict}, {line.kernel}, {line.kind} #{line.number}, PTX line {line.line}")
    click.echo(f"seed {seed}: {shown} of {number} shown")
    if shown:
        raise SystemExit(1)


def _verdicts(out: Path) -> list[Verdict]:
    """Judge the records of a file; tell of those that are about other builds of a kernel."""
    lines = [line for line in read(out) if line.noticed != "no case"]
    now = current(lines)
    if len(now) < len(lines):
        click.echo(f"{len(lines) - len(now)} records are about other builds of the kernels; they are left out")
    return list(judged(now))


@main.command()
@click.option("--kernel", default="_sm90_", help="Only kernels whose name has this regular expression.")
@click.option("--sample", type=click.IntRange(min=1), default=40, help="So many mutations of each kernel, over all kinds.")
@click.option("--seed", default=0, help="Which of them, and which kernel of each structure.")
@click.option("--seeds", default=1, help="Seeds of the random and adversarial schedules.")
@click.option("--jobs", default=2, help="Processes.")
@click.option("--out", default="machine.jsonl", type=click.Path(dir_okay=False, path_type=Path), help="Records; what is there stays.")
def machine(kernel: str, sample: int, seed: int, seeds: int, jobs: int, out: Path) -> None:
    """Break the machine code of one kernel of each structure: control codes, synchronisation and operands."""
    done = frozenset(line.key for line in read(out))
    names = [entry.name for entry in one_of_each_structure(load_artifacts(), seed) if re.search(kernel, entry.name)]
    turns = [range(start, min(start + BATCH, sample)) for start in range(0, sample, BATCH)]
    batches = [(name, part) for name in names for part in turns]
    work(batches, partial(judge_machine_code, seed=seed, seeds=seeds, done=done), jobs, out)


@main.command()
@click.option("--out", default="machine.jsonl", type=click.Path(dir_okay=False, path_type=Path), help="Records of runs.")
def machine_report(out: Path) -> None:
    """Print the verdicts on mutations of machine code by kernel and by kind. Exit 1 if a survivor is open."""
    verdicts = list(judged_machine_code(read(out)))
    click.echo(table("kernel", verdicts, lambda line: line.kernel))
    click.echo(table("kind", verdicts, lambda line: line.kind))
    open_ones = [item.line for item in verdicts if item.verdict == OPEN]
    for line in open_ones:
        click.echo(f"{line.kernel}, {line.kind}, {line.place}, {line.line:#x}: {line.code}")
    for known in unused(verdicts, OF_MACHINE_CODE):
        click.echo(f"explains nothing: {known.kernel.pattern}, {known.kind.pattern}, {known.code.pattern}")
    if open_ones:
        raise SystemExit(1)


@main.command()
@click.option("--out", default="mutations.jsonl", type=click.Path(dir_okay=False, path_type=Path), help="Records of runs.")
def report(out: Path) -> None:
    """Print the score by kind and architecture, and the unexplained survivors."""
    lines = [line for line in read(out) if line.noticed != "no case"]
    open_ones = unexplained(lines)
    rows: dict[str, Counter[str]] = {kind.name: Counter() for kind in KINDS}
    for line in lines:
        arch = "sm90" if "_sm90_" in line.kernel else "sm100"
        state = "caught" if line.noticed else "open" if line in open_ones else "equivalent"
        rows[line.kind][f"{arch} {state}"] += 1
    click.echo(by_architecture(rows))
    for line in open_ones:
        click.echo(f"not noticed: {line.kernel}, {line.kind}, {line.place}, PTX line {line.line}: {line.code}")
    for item in explanations():
        covered = [line for line in lines if item.covers(line)]
        if covered and all(line.noticed for line in covered):
            click.echo(f"explained, but noticed: {item.kernel.pattern}, {item.kind.pattern}, {item.place.pattern}")
    caught = sum(bool(line.noticed) for line in lines)
    real = caught + len(open_ones)
    click.echo(f"{caught} of {real} caught ({100 * caught / max(real, 1):.1f} %), {len(lines) - real} equivalent")
    click.echo(str(coverage(lines, load_artifacts())))
    if open_ones:
        raise SystemExit(1)


def by_architecture(rows: dict[str, Counter[str]]) -> str:
    """Kinds by architecture: caught / not noticed / equivalent."""

    def cell(counts: Any, arch: str) -> str:
        return " / ".join(str(counts[f"{arch} {state}"]) for state in ("caught", "open", "equivalent"))

    head = f"{'':28}{'sm90':>16}{'sm100':>16}   caught / not noticed / equivalent"
    body = [f"{name:28}{cell(counts, 'sm90'):>16}{cell(counts, 'sm100'):>16}" for name, counts in rows.items() if counts]
    return "\n".join([head, *body])


if __name__ == "__main__":
    main()
