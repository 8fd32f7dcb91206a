"""Option --timeline: the trace of some rows (`profile --device clock`), or of a launch of any kernel (`simulate`), in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import write_file

if TYPE_CHECKING:
    from cute_mla.profiles.rows import Case
    from cute_mla.simulator.engine.launch_file import LaunchFile


def write_timeline(path: Path, cases: Sequence[Case], gpu: str) -> None:
    """Record the kernel of each case on a GPU and write the trace. A case that cannot be recorded is named, and left out."""
    from cute_mla.profiles.clock.rows import REFUSALS
    from cute_mla.profiles.clock.timeline import record_case, timeline

    runs = []
    for case in cases:
        click.echo(f"recording {case.name}", err=True)
        try:
            runs.append(record_case(case, gpu))
        except REFUSALS as reason:
            click.echo(f"--timeline: {case.name} is left out: {reason}", err=True)
    for sentence in dict.fromkeys(sentence for run in runs for sentence in run.lines.missing):
        click.echo(f"--timeline: {sentence}", err=True)
    write_file(path, json.dumps(timeline(runs)) + "\n")


def write_launch_timeline(path: Path, code: bytes, launch: LaunchFile, most_instructions: int) -> None:
    """Time the first cluster of a launch and write its trace. ClickException, which is exit code 1, if it cannot be timed."""
    from cute_mla.profiles.clock.peer import gpu_for, record_peer
    from cute_mla.profiles.clock.timeline import timeline
    from cute_mla.profiles.plots.svg import with_article
    from cute_mla.simulator.engine.launch_file import LaunchFileError

    try:
        run = record_peer(code, launch, gpu_for(code, launch.kernel), most_instructions)
    except LaunchFileError as error:
        raise click.ClickException(f"--timeline: {error}") from error
    write_file(path, json.dumps(timeline([run], every_warp=not launch.roles)) + "\n")
    click.echo(f"{run.end:,} clocks on {with_article(run.gpu)}, predicted; timeline in {path}")
