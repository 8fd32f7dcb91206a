"""Summary of a `cute-mla verify` run: a line an op, the failures in full, the verdict; verbose: every run and the worst errors."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from cute_mla.spec.arch import ARCHS

from . import INTERRUPTED
from .output import duration, print_table

if TYPE_CHECKING:
    from cute_mla.testing.runner import Record

_COLUMNS = ("case", "arch", "device", "schedule", "result", "out max abs", "out cos diff", "lse max abs", "findings", "seconds")
_OP_COLUMNS = ("op", "result", "cases", "failed", "reduced", "not run", "runs", "cos diff", "bound", "seconds")
_IF_ANY = ("failed", "reduced", "not run")  # columns that are left out if every op has 0 there
_ERRORS = (
    ("out max abs", "out_max_abs"),
    ("out cos diff", "out_cos_diff"),
    ("lse max abs", "lse_max_abs"),
    ("max_logits max abs", "max_logits_max_abs"),
    ("lse_indexer max abs", "lse_indexer_max_abs"),
)
_LOST = ("hung", "faulted", "died")
_DEVICES = {"sim": "the simulated device", "cuda": "a GPU"}


@dataclass(frozen=True)
class Run:
    """Records of a run: one list a case, empty for a case that an interruption has kept from running."""

    records: list[list[Record]]
    interrupted: bool = False


@dataclass(frozen=True)
class Figures:
    """Counts of cases. A case passes if each of its runs passes."""

    passed: int
    failed: int
    reduced: int
    not_run: int

    @property
    def ran(self) -> int:
        """Number of cases that ran."""
        return self.passed + self.failed


@dataclass(frozen=True)
class Verdict:
    """Outcome of a run. text: in words, with the counts of cases, the devices and the time."""

    figures: Figures
    exit_code: int
    text: str

    @classmethod
    def of(cls, run: Run, seconds: float, damages: int = 0) -> Verdict:
        """Judge a run that took so many seconds. damages: of the artefacts, any of which is failure."""
        figures = count(run.records)
        ran = [record for case in run.records for record in case if record.passed is not None]
        where = _devices(ran)
        behind = f"{where}; {duration(seconds)}" if where else duration(seconds)
        if run.interrupted:
            text = f"INTERRUPTED: {figures.ran} of {len(run.records)} cases ran, {figures.failed} failed; {behind}"
            return cls(figures, INTERRUPTED, text)
        if not figures.ran:
            return cls(figures, 1, f"FAILED: no case ran; {behind}")
        if figures.failed or damages:
            damaged = f", {damages} damaged artefacts" if damages else ""
            return cls(figures, 1, f"FAILED: {figures.failed} of {_cases(figures.ran)}{damaged}; {behind}")
        return cls(figures, 0, f"PASSED: {_all(figures.ran)}; {behind}")


def _devices(ran: list[Record]) -> str:
    """Return where the runs were, such as "sm90 and sm100 on the simulated device"."""
    archs: dict[str, list[str]] = {}
    for arch, device in sorted({(record.arch, record.device) for record in ran}, key=lambda target: list(ARCHS).index(target[0])):
        archs.setdefault(_DEVICES[device], []).append(arch)
    return ", ".join(f"{' and '.join(names)} on {device}" for device, names in archs.items())


def _cases(number: int) -> str:
    return f"{number} case" if number == 1 else f"{number} cases"


def _all(number: int) -> str:
    return "1 case agrees with the fp64 reference" if number == 1 else f"all {number} cases agree with the fp64 reference"


def count(records: list[list[Record]]) -> Figures:
    """Count the cases; one list of records a case."""
    ran = [[record.passed for record in case if record.passed is not None] for case in records]
    passed = sum(bool(results) and all(results) for results in ran)
    failed = sum(bool(results) and not all(results) for results in ran)
    reduced = sum(any(record.status == "reduced" for record in case) for case in records)
    return Figures(passed, failed, reduced, not_run=len(records) - passed - failed)


def summarise(run: Run, verdict: Verdict, suite_name: str, *, verbose: bool) -> None:
    """Print a line an op, the failures and the verdict. verbose: also every run, the worst errors, and why cases did not run whole."""
    flat = [record for case in run.records for record in case]
    ran = [record for record in flat if record.passed is not None]
    if verbose and ran:
        print_table(_COLUMNS, [_row(record) for record in ran])
        _print_worst_errors(ran)
        _print_left_out(run.records)
        click.echo()
    if ran:
        _print_ops(run.records)
    _print_kernels(flat)
    for record in ran:
        if not record.passed:
            _print_failure(record, suite_name)
    click.echo(verdict.text)


def _print_ops(records: list[list[Record]]) -> None:
    """Print a line an op."""
    rows = [_op_row(op, records) for op in dict.fromkeys(record.op for case in records for record in case)]
    shown = [i for i, name in enumerate(_OP_COLUMNS) if name not in _IF_ANY or any(row[i] for row in rows)]
    print_table([_OP_COLUMNS[i] for i in shown], [[row[i] for i in shown] for row in rows])


def failure(record: Record) -> str:
    """Return how a record failed: FAILED, or what its process did."""
    return record.status.upper() if record.status in _LOST else "FAILED"


def _print_kernels(records: list[Record]) -> None:
    """Print for each kernel with a failed run how many of its runs failed, hung, faulted, ended their process, passed or were left out."""
    outcomes: dict[str, Counter[str]] = {}
    for record in records:
        outcome = "not run" if record.passed is None else "passed" if record.passed else failure(record).lower()
        outcomes.setdefault(record.kernel, Counter())[outcome] += 1
    for kernel, numbers in outcomes.items():
        if set(numbers) & {"failed", *_LOST}:
            click.echo(f"{kernel}: {', '.join(f'{number} {outcome}' for outcome, number in sorted(numbers.items()))}")


def _op_row(op: str, records: list[list[Record]]) -> tuple[object, ...]:
    """Return the line of an op. The error is the one nearest to its bound."""
    cases = [case for case in records if case and case[0].op == op]
    ran = [record for case in cases for record in case if record.passed is not None]
    figures = count(cases)
    errors = [
        (record.out_cos_diff / record.out_cos_limit if record.out_cos_limit else 0.0, record.out_cos_diff, record.out_cos_limit)
        for record in ran
        if record.out_cos_diff is not None and record.out_cos_limit is not None
    ]
    _, error, bound = max(errors, default=(0.0, None, None))
    result = "FAILED" if figures.failed else "passed" if figures.passed else "not run"
    digits = (None if number is None else float(f"{number:.1e}") for number in (error, bound))
    seconds = round(sum(record.seconds for record in ran), 1)
    return op, result, figures.ran, figures.failed, figures.reduced, figures.not_run, len(ran), *digits, seconds


def _row(record: Record) -> tuple[object, ...]:
    """Return a record as a row of the table."""
    errors = (record.out_max_abs, record.out_cos_diff, record.lse_max_abs)
    return (
        record.case,
        record.arch,
        record.device,
        record.schedule,
        failure(record) if record.passed is False else record.status,
        *(None if error is None else float(f"{error:.1e}") for error in errors),
        len(record.findings),
        round(record.seconds, 2),
    )


def _replay(record: Record, suite_name: str) -> str:
    """Return the command that repeats only this run."""
    where = f"--op {record.op} --arch {record.arch} --device {record.device} --suite {suite_name} --seed {record.seed}"
    return f"cute-mla verify {where} --replay {record.case}" + (f"/{record.schedule}" if record.schedule else "")


def _print_failure(record: Record, suite_name: str) -> None:
    """Print a failed run with its reason, all of its findings, and the command that repeats it."""
    click.echo(f"{failure(record)} {record.arch} {record.device} {record.schedule or ''} {record.case}: {record.reason}")
    for finding in record.findings:
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


def _print_left_out(records: list[list[Record]]) -> None:
    """Print why cases were reduced or not run, with their number."""
    outcomes = Counter(outcome for case in records for outcome in map(_left_out, case[:1]) if outcome is not None)
    for (outcome, reason), number in sorted(outcomes.items()):
        click.echo(f"{number} {outcome}: {reason}")


def _left_out(record: Record) -> tuple[str, str] | None:
    """Return (outcome, reason) of a case that was skipped or reduced, else None. The reason omits the figures of the single case."""
    if record.status == "skipped":
        return "not run", record.reason
    if record.status == "reduced":
        return "reduced", record.reason.split("; ")[0].split(": ")[-1]
    return None
