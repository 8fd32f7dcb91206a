"""The commands of the campaigns: run breaks kernels and records what was noticed, report judges the records."""

from __future__ import annotations

import json
import re
from concurrent.futures import as_completed
from dataclasses import asdict
from pathlib import Path

import click

from cute_mla.runtime.artifacts import load_artifacts
from tests.mutation.bench import processes
from tests.mutation.campaign import CAMPAIGNS, kernels_of, read
from tests.mutation.report import FLOORS, REASONS, below_floors, current, explanations, table, unexplained, unused

BATCH = 24  # mutations of a kernel that a process takes at a time
_CAMPAIGN = click.argument("campaign", type=click.Choice(tuple(CAMPAIGNS)))
_OUT = click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Records; what is there stays. CAMPAIGN.jsonl if left out."
)


@click.group()
def main() -> None:
    """Break shipped kernels, and see whether the simulator notices."""


@main.command()
@_CAMPAIGN
@click.option("--kernel", default="", help="Only kernels whose name has this regular expression.")
@click.option("--kind", default="", help="Only kinds whose name contains this.")
@click.option("--sample", type=click.IntRange(min=1), help="Mutations of a kernel; of each kind, in synchronisation, which else has all.")
@click.option("--seed", default=0, help="Which of them, and which kernel of each structure.")
@click.option("--seeds", default=2, help="Seeds of the random and adversarial schedules.")
@click.option("--jobs", default=2, help="Processes.")
@_OUT
def run(campaign: str, kernel: str, kind: str, sample: int | None, seed: int, seeds: int, jobs: int, out: Path | None) -> None:
    """Break kernels, one mutation at a time."""
    out = out or Path(f"{campaign}.jsonl")
    done, chosen = {line.key for line in read(out)}, CAMPAIGNS[campaign]
    batches = []
    for entry in kernels_of(chosen, load_artifacts(), seed):
        if re.search(kernel, entry.name):
            mutations = [mutation for mutation in chosen.draw(entry, sample, seed) if kind in mutation.kind]
            left = [mutation for mutation in mutations if chosen.key(entry, mutation) not in done]
            batches += [(entry.name, left[start : start + BATCH]) for start in range(0, len(left), BATCH)]
    total, ended = sum(len(batch) for _, batch in batches), 0
    with processes(jobs) as pool, out.open("a") as file:
        futures = {pool.submit(chosen.judge, name, batch, seeds): name for name, batch in batches}
        for future in as_completed(futures):
            lines = future.result()
            file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)
            file.flush()
            ended += len(lines)
            survivors = sum(not line.noticed for line in lines)
            click.echo(f"[{ended}/{total}] {futures[future]}: {len(lines)} broken, {survivors} not noticed")


@main.command()
@_CAMPAIGN
@_OUT
def report(campaign: str, out: Path | None) -> None:
    """Print the score by kernel and kind, and the survivors. Exit 1 if one has no reason, or a kernel is below its floor."""
    lines = current(read(out or Path(f"{campaign}.jsonl")))
    known = explanations(REASONS[campaign]) if campaign in REASONS else []
    open_ones = unexplained(lines, known)
    click.echo(table("kernel", lines, open_ones, lambda line: line.kernel))
    click.echo(table("kind", lines, open_ones, lambda line: line.kind))
    for line in open_ones:
        where = f"PTX line {line.line}" if CAMPAIGNS[campaign].code == "ptx" else f"{line.line:#x}"
        click.echo(f"not noticed: {line.kernel}, {line.kind} #{line.number}, {line.place}, {where}: {line.code}")
    for item in unused(lines, known):
        click.echo(f"explains nothing: {item.kernel.pattern}, {item.kind.pattern}, {item.place.pattern}, {item.code.pattern}")
    low = [] if campaign in REASONS else below_floors(lines, FLOORS)
    for text in low:
        click.echo(text)
    if low or (campaign in REASONS and open_ones):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
