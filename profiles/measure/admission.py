"""Admission of baselines to a row: a baseline is timed if it is installed, supports the case and passes the check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..baselines.baseline import Baseline, Run
from ..workloads.workload import Workload

READY, ABSENT, NOT_COVERED, WRONG, FAILED = "ready", "absent", "not_covered", "wrong", "failed"


@dataclass(frozen=True)
class AdmittedBaseline:
    """A baseline that passed the check. runs: one for each operand set of the workload."""

    name: str
    runs: Sequence[Run]


def installed(baseline: Baseline) -> tuple[str, str]:
    """Return (version, "") of a baseline, or ("", reason) if it cannot be imported."""
    try:
        return baseline.version(), ""
    except ImportError as error:
        return "", f"not installed: {error}"
    except Exception as error:  # another library's initialisation may raise anything, and must not end the run
        return "", f"cannot be imported: {type(error).__name__}: {error}"


def admit(
    baselines: Iterable[Baseline], workload: Workload, begin: Callable[[str], None]
) -> tuple[list[AdmittedBaseline], dict[str, dict[str, Any]]]:
    """Return the baselines that may be timed, and a record for each baseline of the op: status, reason, outcome of its check.

    begin: called with the name of a baseline before it is imported and run.
    """
    admitted: list[AdmittedBaseline] = []
    records: dict[str, dict[str, Any]] = {}
    for baseline in baselines:
        if workload.case.op not in baseline.ops:
            continue
        begin(baseline.name)
        passed, records[baseline.name] = _examine(baseline, workload)
        if passed is not None:
            admitted.append(passed)
    return admitted, records


def _examine(baseline: Baseline, workload: Workload) -> tuple[AdmittedBaseline | None, dict[str, Any]]:
    version, reason = installed(baseline)
    if reason:
        return None, _record(ABSENT, reason)
    reason = baseline.unsupported_reason(workload.case)
    if reason:
        return None, _record(NOT_COVERED, reason)
    try:
        candidate = AdmittedBaseline(baseline.name, baseline.runs(workload))
        _poison_free_memory(workload)
        first_and_last = sorted({0, len(candidate.runs) - 1})
        found = [(workload.sets[index], candidate.runs[index]()) for index in first_and_last]
        check = workload.check([results for _, results in found], found)
    except Exception as error:  # recorded as this baseline's outcome
        return None, {**_record(FAILED, failure(error)), "version": version}
    record = {**_record(READY if check.passed else WRONG, check.reason), "version": version, "check": asdict(check)}
    return (candidate if check.passed else None), record


def _poison_free_memory(workload: Workload) -> None:
    """Fill and free NaN tensors as large as the results: a baseline that allocates its outputs is likely to receive this memory."""
    for tensor in workload.results(workload.sets[0]).values():
        torch.full_like(tensor, math.nan)


def _record(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason}


def failure(error: Exception) -> str:
    """Format an exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
