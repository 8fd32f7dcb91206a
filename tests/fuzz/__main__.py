"""The command: many calls, counted; or one, made again."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
import torch

from cute_mla.cli.options import Finite
from cute_mla.spec.arch import ARCHS
from tests.fuzz.calls import FuzzCall
from tests.fuzz.campaign import Tally, run, shares
from tests.fuzz.judging import SUBJECTS, Failure, judge


@click.command()
@click.option("--calls", "count", default=1000, type=click.IntRange(min=1), help="So many calls, of all subjects together.")
@click.option("--seed", default=0, help="Which of them.")
@click.option("--right", default=0.15, type=Finite(0, 1), help="The part of them that nothing is broken in.")
@click.option("--op", "ops", multiple=True, type=click.Choice(sorted(SUBJECTS)), help="Of this function; again for more. Default: all.")
@click.option("--arch", "archs", multiple=True, type=click.Choice(list(ARCHS)), help="On this architecture; again for more. Default: all.")
@click.option("--replay", help="A call as a failure shows it, as JSON; nothing else is made.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Writes counts, and what failed, as JSON.")
def main(count: int, seed: int, right: float, ops: tuple[str, ...], archs: tuple[str, ...], replay: str | None, out: Path | None) -> None:
    """Call the functions that launch kernels at random: each call agrees with the reference or raises the documented error."""
    faulthandler.enable()
    torch.set_num_threads(1)
    if replay is not None:
        _replay(replay)
        return
    start = time.perf_counter()
    tallies: dict[str, Tally] = {}
    for share in shares(count, seed, right, ops or tuple(SUBJECTS), archs or tuple(ARCHS)):
        tally = tallies.setdefault(share.subject, Tally())
        before = len(tally.failures)
        run(share, tally)
        for failure in tally.failures[before:]:
            click.echo(f"FAILED {failure['shown']}\n    {failure['failure']}\n    --replay '{failure['call']}'")
        if sys.stderr.isatty():
            click.echo(f"\r{sum(tally.calls for tally in tallies.values())} of {count}", err=True, nl=False)
        if out is not None:
            _write(out, tallies, seed, time.perf_counter() - start)
    _report(tallies, seed, time.perf_counter() - start)
    if any(tally.failures for tally in tallies.values()):
        raise SystemExit(1)


def _replay(text: str) -> None:
    call = FuzzCall.from_json(text)
    click.echo(str(call))
    try:
        click.echo(str(judge(call)))
    except Failure as failure:
        raise SystemExit(f"FAILED: {failure}") from failure


def _write(out: Path, tallies: dict[str, Tally], seed: int, seconds: float) -> None:
    calls = sum(tally.calls for tally in tallies.values())
    record = {"seed": seed, "calls": calls, "seconds": seconds, "subjects": {name: asdict(tally) for name, tally in tallies.items()}}
    out.write_text(json.dumps(record, indent=1) + "\n")


def _report(tallies: dict[str, Tally], seed: int, seconds: float) -> None:
    click.echo(f"{'':26}{'calls':>7}{'right':>7}{'broken':>8}{'returned':>10}{'refused':>9}{'messages':>10}{'failed':>8}{'seconds':>9}")
    for name, tally in tallies.items():
        click.echo(
            f"{name:26}{tally.calls:7}{tally.right:7}{tally.broken:8}{tally.returned:10}{tally.refused:9}{len(tally.messages):10}"
            f"{len(tally.failures):8}{tally.seconds:9.0f}"
        )
    messages: Counter[str] = Counter()
    for tally in tallies.values():
        messages.update(tally.messages)
    for message, times in messages.most_common(12):
        click.echo(f"{times:7} {message}")
    total, failed = sum(tally.calls for tally in tallies.values()), sum(len(tally.failures) for tally in tallies.values())
    click.echo(f"{total} calls with seed {seed} in {seconds:.0f} s, {failed} failed, {len(messages)} different messages")


if __name__ == "__main__":
    main()
