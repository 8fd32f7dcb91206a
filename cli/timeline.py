"""Option --timeline of `profile --device clock`: the trace of some rows in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import write_file

if TYPE_CHECKING:
    from cute_mla.profiles.rows import Case


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
    trace = timeline(runs)
    for sentence in dict.fromkeys(sentence for run in runs for sentence in run.lines.missing):
        click.echo(f"--timeline: {sentence}", err=True)
    write_file(path, json.dumps(trace) + "\n")
