"""Run of rows by priority within a time budget, in child processes: what hangs, faults or dies is a record, not the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from cute_mla.testing.processes import START, Loss

from ..rows import Case, by_priority
from .runner import NOT_RUN, PEER, TIMED, Task, not_run, shape_record

Progress: TypeAlias = Callable[[str, list[dict[str, Any]]], None]
Ask: TypeAlias = Callable[[Task, float], Any]  # a task and the seconds left for it -> its record, or Loss

MOST_LOST_ROWS = 3  # of an op: each costs its time limit and the start of a process
MOST_LOST_PEERS = 2  # rows that a peer may lose
_MOST_LOST_STARTS = 2


def run_rows(
    cases: Iterable[Case], ask: Ask, budget_s: float, progress: Progress, clock: Callable[[], float] = time.monotonic
) -> list[dict[str, Any]]:
    """Measure cases by priority until the budget of seconds ends; return a record for every case.

    A row without an answer has its status: hung, faulted, died. If a peer was the cause, the peer's record in the row has it, and the
    row is measured again without that peer. Further rows of an op that lost MOST_LOST_ROWS are `not_run`; so are peers that lost
    MOST_LOST_PEERS.
    progress: called before each row with its name and the records so far, so that both survive whatever happens.
    Kernel times come in a second pass over the timed rows, because the profiler may disturb the timings after it.
    """
    run = _Run(ask, budget_s, clock)
    records: list[dict[str, Any]] = []
    timed: list[tuple[Case, dict[str, Any]]] = []
    for case in by_priority(list(cases)):
        reason = run.refusal(case)
        if reason:
            records.append(not_run(case, reason))
            continue
        progress(case.name, records)
        started = clock()
        records.append({**run.row(case), "seconds": clock() - started})
        if records[-1]["status"] == TIMED:
            timed.append((case, records[-1]))
    for case, record in timed:
        reason = run.refusal(case)
        if not reason:
            progress(f"{case.name} kernels", records)
            reason = run.kernels(case, record)
        if reason:
            record["kernel_us"] = {"unavailable": reason}
    return records


class _Run:
    """State of a run: when it ends, and what was lost so far, by op, peer and start."""

    def __init__(self, ask: Ask, budget_s: float, clock: Callable[[], float]) -> None:
        self._ask, self._budget_s, self._clock = ask, budget_s, clock
        self._end = clock() + budget_s
        self._losses: Counter[str] = Counter()
        self._last_start = ""

    def refusal(self, case: Case) -> str:
        """Return why a row is not begun, or ""."""
        if self._clock() >= self._end:
            return f"the budget of {self._budget_s:g} s was used up"
        if self._losses[START] >= _MOST_LOST_STARTS:
            return f"{_MOST_LOST_STARTS} processes did not start: {self._last_start}"
        return f"{MOST_LOST_ROWS} rows of {case.op} were lost" if self._losses[case.op] >= MOST_LOST_ROWS else ""

    def row(self, case: Case) -> dict[str, Any]:
        """Return the record of a row."""
        answer, peers = self._answer(case, None)
        if not isinstance(answer, Loss):
            return {**answer, "peers": {**answer["peers"], **peers}} if "peers" in answer else answer
        if answer.status == "skipped" or answer.step == START:
            return not_run(case, f"in step {answer.step}: {answer.reason}")
        return {**shape_record(case), **_outcome(answer)}

    def kernels(self, case: Case, record: dict[str, Any]) -> str:
        """Add the times of the single kernels to a record; return why there are none, or ""."""
        answer, peers = self._answer(case, record)
        if isinstance(answer, Loss):
            return _outcome(answer)["reason"]
        record |= answer
        for name in peers:
            if record["peers"].get(name, {}).get("status") == TIMED:
                record["peers"][name]["kernel_us"] = {"unavailable": peers[name]["reason"]}
        return ""

    def _answer(self, case: Case, record: dict[str, Any] | None) -> tuple[Any, dict[str, dict[str, str]]]:
        """Ask until no peer and no start is lost. Return the record or Loss of ours, and the records of the peers left out."""
        peers = {
            name.removeprefix(PEER): {"status": NOT_RUN, "reason": f"{MOST_LOST_PEERS} rows were lost by it"}
            for name, count in self._losses.items()
            if name.startswith(PEER) and count >= MOST_LOST_PEERS
        }
        while True:
            answer = self._ask(Task(case, frozenset(peers), record), self._end - self._clock())
            if not isinstance(answer, Loss) or answer.status == "skipped":
                return answer, peers
            cause = answer.step if answer.step == START or answer.step.startswith(PEER) else case.op
            self._losses[cause] += 1
            if cause == START:
                self._last_start = answer.reason
            if cause == case.op or self._losses[START] >= _MOST_LOST_STARTS:
                return answer, peers
            if cause != START:
                peers[cause.removeprefix(PEER)] = _outcome(answer)


def _outcome(lost: Loss) -> dict[str, str]:
    return {"status": lost.status, "reason": f"in step {lost.step}: {lost.reason}"}
