"""Command `cute-mla verify --against sim`: the bits of a GPU's results beside those of the simulated device."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import INTERRUPTED
from .options import write_file
from .output import print_table

if TYPE_CHECKING:
    from cute_mla.testing.bits import Bits
    from cute_mla.testing.runner import Job

JSON_SECONDS = 2.0  # period of writing the file, so that an interrupted run leaves its records
_COLUMNS = ("op", "result", "cases", "equal", "elements", "differing", "most ulps", "where")
_COMPARED = ("equal", "different")


def compare_devices(jobs: Sequence[Job], case_seconds: float, json_file: Path | None) -> int:
    """Compare the jobs' results on the GPU and on the simulated device, print a line an op and result, and return the exit code.

    Other bits are no failure, since hardware rounds sums inside a matrix product in its own way; a case that does not end is one.
    """
    from cute_mla.testing import bits

    done: list[Bits] = []
    written, code = 0.0, 0
    gpu = replace(bits.ON_GPU, step_seconds=case_seconds)
    try:
        with closing(bits.compare_with_sim(jobs, gpu, lambda case: click.echo(f"running {case.op} {case.id}", err=True))) as results:
            for _, found in results:
                done += found
                if json_file is not None and time.monotonic() - written > JSON_SECONDS:
                    _write(json_file, done)
                    written = time.monotonic()
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        if json_file is not None:
            _write(json_file, done)
    _summarise(done)
    lost = [one for one in done if one.status not in (*_COMPARED, "skipped")]
    return code or int(bool(lost) or not any(one.status in _COMPARED for one in done))


def _write(file: Path, done: list[Bits]) -> None:
    write_file(file, json.dumps([asdict(one) for one in done], indent=1) + "\n")


def _summarise(done: list[Bits]) -> None:
    """Print a line an op and result, and a line for each case without a comparison."""
    groups: dict[tuple[str, str], list[Bits]] = {}
    for one in done:
        if one.status in _COMPARED:
            groups.setdefault((one.op, one.result), []).append(one)
        else:
            click.echo(f"{one.status.upper()} {one.kernel} {one.op} {one.case}: {one.reason}")
    rows = []
    for (op, result), group in sorted(groups.items()):
        worst = max(group, key=lambda one: (one.ulps, one.differing))
        where = f"{worst.case} {list(worst.where)}: {worst.gpu}, simulated {worst.sim}" if worst.differing else ""
        equal = sum(one.status == "equal" for one in group)
        rows.append(
            (op, result, len(group), equal, sum(one.elements for one in group), sum(one.differing for one in group), worst.ulps, where)
        )
    if rows:
        print_table(_COLUMNS, rows)
