"""Summary of a `cute-mla verify` run: the table of runs, failures, worst errors, and cases that were reduced or not run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from .output import print_table

if TYPE_CHECKING:
    from cute_mla.testing.runner import Record

_COLUMNS = ("case", "arch", "device", "schedule", "result", "out max abs", "out cos diff", "lse max abs", "findings", "seconds")
_ERRORS = (
    ("out max abs", "out_max_abs"),
    ("out cos diff", "out_cos_diff"),
    ("lse max abs", "lse_max_abs"),
    ("max_logits max abs", "max_logits_max_abs"),
)
_MOST_FINDINGS = 5


@dataclass(frozen=True)
class Figures:
    """Counts of cases. A case passes if each of its runs passes."""

    passed: int
    failed: int
    reduced: int
    not_run: int


def count(records: list[list[Record]]) -> Figures:
    """Count the cases; one list of records a case."""
    ran = [[record.passed for record in case if record.passed is not None] for case in records]
    passed = sum(bool(results) and all(results) for results in ran)
    failed = sum(bool(results) and not all(results) for results in ran)
    reduced = sum(any(record.status == "reduced" for record in case) for case in records)
    return Figures(passed, failed, reduced, not_run=len(records) - passed - failed)


def result_of(records: list[Record]) -> str:
    """Return the result of a case from the records of its runs, or of a single run."""
    return "FAILED" if any(record.passed is False for record in records) else records[0].status


def _row(record: Record) -> tuple[object, ...]:
    """Return a record as a row of the table."""
    errors = (record.out_max_abs, record.out_cos_diff, record.lse_max_abs)
    return (
        record.case,
        record.arch,
        record.device,
        record.schedule,
        result_of([record]),
        *(None if error is None else float(f"{error:.1e}") for error in errors),
        len(record.findings),
        round(record.seconds, 2),
    )


def _replay(record: Record, suite_name: str) -> str:
    """Return the command that repeats only this run."""
    where = f"--op {record.op} --arch {record.arch} --device {record.device} --suite {suite_name} --seed {record.seed}"
    return f"cute-mla verify {where} --replay {record.case}" + (f"/{record.schedule}" if record.schedule else "")


def summarise(records: list[list[Record]], figures: Figures, suite_name: str) -> None:
    """Print the table of runs, the failures, the worst errors, and why cases were reduced or not run. One list of records a case."""
    flat = [record for case in records for record in case]
    ran = [record for record in flat if record.passed is not None]
    print_table(_COLUMNS, [_row(record) for record in ran])
    for record in ran:
        if not record.passed:
            _print_failure(record, suite_name)
    _print_worst_errors(ran)
    outcomes = Counter(outcome for case in records for outcome in map(_left_out, case[:1]) if outcome is not None)
    for (outcome, reason), number in sorted(outcomes.items()):
        click.echo(f"{number} {outcome}: {reason}")
    where = ", ".join(f"{arch} on {device}" for arch, device in sorted({(record.arch, record.device) for record in flat}))
    cases = f"{figures.passed + figures.failed} cases in {len(ran)} runs"
    click.echo(f"{where}: {cases}; of these {figures.reduced} reduced; {figures.not_run} not run")


def _print_failure(record: Record, suite_name: str) -> None:
    click.echo(f"FAILED {record.arch} {record.device} {record.schedule or ''} {record.case}: {record.reason}")
    for finding in record.findings[:_MOST_FINDINGS]:
        click.echo(f"    {finding}")
    click.echo(f"    again: {_replay(record, suite_name)}")


def _print_worst_errors(ran: list[Record]) -> None:
    """Print the worst error of each kind, grouped by architecture, op and bound."""
    groups: dict[tuple[str, str, float], list[Record]] = {}
    for record in ran:
        groups.setdefault((record.arch, record.op, record.out_cos_limit or 0.0), []).append(record)
    for (arch, op, limit), group in sorted(groups.items()):
        for title, name in _ERRORS:
            errors = [(getattr(record, name), record.case) for record in group if getattr(record, name) is not None]
            if errors:
                bound = f" of {limit:.0e}" if name == "out_cos_diff" else ""
                worst, case = max(errors)
                click.echo(f"worst {title} on {arch}, {op}: {worst:.2e}{bound} in {case}")


def _left_out(record: Record) -> tuple[str, str] | None:
    """Return (outcome, reason) of a case that was skipped or reduced, else None. The reason omits the figures of the single case."""
    if record.status == "skipped":
        return "not run", record.reason
    if record.status == "reduced":
        return "reduced", record.reason.split("; ")[0].split(": ")[-1]
    return None
