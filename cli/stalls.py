"""Option --stalls of `show kernel`: the instructions that wait, by the clock of cute_mla.profiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cute_mla.manifest import KernelEntry
from cute_mla.spec.arch import ARCHS

from .output import print_table

if TYPE_CHECKING:
    from cute_mla.profiles.clock.stall_report import StallReport

_SHOWN = 40
_CODE = 44  # columns of machine code that are printed


def stalls_of(entry: KernelEntry, gpu: str | None) -> StallReport:
    """Return the waits of a kernel on a GPU, by default the one that `profile` predicts for.

    UsageError for a GPU that does not run the kernel and for a kernel without a loop over keys, ClickException for one that the clock
    cannot time.
    """
    from cute_mla.profiles.clock.constants import constants
    from cute_mla.profiles.clock.rows import REFUSALS
    from cute_mla.profiles.clock.stall_report import default_setting, stall_report
    from cute_mla.profiles.roofline import gpus_of

    fitting = [known.name for known in gpus_of([ARCHS[entry.arch]])]
    if gpu is not None and gpu not in fitting:
        raise click.UsageError(f"--gpu: {gpu} does not run {entry.name}; supported: {', '.join(fitting)}")
    values = constants(gpu or fitting[0])
    try:
        return stall_report(entry, values, default_setting(entry, values))
    except REFUSALS as reason:
        raise click.ClickException(f"--stalls: {reason}") from reason
    except ValueError as reason:
        raise click.UsageError(f"--stalls: {reason}") from reason


def stalls_as_json(report: StallReport) -> dict[str, Any]:
    """Return a report as JSON; an unknown line is null."""
    fields = asdict(report)
    for stall in fields["stalls"]:
        stall["source"] = stall["source"] or None
    return fields


def show_stalls(report: StallReport) -> None:
    """Print the longest waits of a report."""
    block = f"a block of {report.keys} {report.unit}, which takes {report.block:,.0f}"
    click.echo(f"{report.gpu} (others: --gpu NAME): predicted clocks that a warp of each role waits in {block}")
    columns = ("role", "clocks", "cause", "waits for", "address", "machine code", "PTX line", "source")
    rows = [
        (
            stall.role,
            round(stall.clocks, 1),
            stall.cause,
            stall.noted,
            f"{stall.address:#x}",
            stall.code[:_CODE],
            stall.ptx_line,
            stall.source,
        )
        for stall in report.stalls[:_SHOWN]
    ]
    print_table(columns, rows)
    if len(report.stalls) > _SHOWN:
        click.echo(f"and {len(report.stalls) - _SHOWN} shorter waits, which --json has")
    for sentence in report.missing:
        click.echo(sentence)
