"""Timing one row, and running rows in order of priority within a budget. The outcome is plain data, ready for JSON."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from .ceilings import Ceilings
from .contest import FAILED, WRONG, Entrant, admit, failure
from .peers.peer import Peer
from .roofline import GPUS, Work, roof
from .rows import Case, by_priority
from .subjects import make_subject
from .subjects.subject import Check, Subject
from .timing import Call, Recording, Spread, Stopwatch, graph_launches, interleave, ratios, rounds_for

Progress = Callable[[str, list[dict[str, Any]]], None]

TIMED, NOT_RUN = "timed", "not_run"
_ESTIMATE_LAUNCHES = 3
_CEILING_LAUNCHES = 3
_PLAN_LAUNCHES = 20


@dataclass(frozen=True)
class Bench:
    """What all rows of a run share.

    l2_bytes: of the device. state: reads clocks and power, called while the device is busy.
    kernel_times: microseconds per launch that each of our ops took in one replay, by name, or {"unavailable": why}.
    peers: what is timed beside ours. peer_kernel_times: likewise of every kernel, under its own name.
    """

    device: torch.device
    stopwatch: Stopwatch
    ceilings: Ceilings
    l2_bytes: int
    state: Callable[[], dict[str, Any]]
    kernel_times: Callable[[Recording], dict[str, Any]]
    load_us: float = 800_000.0  # of work queued while clocks and power are read
    peers: tuple[Peer, ...] = ()
    peer_kernel_times: Callable[[Recording], dict[str, Any]] = lambda recording: {}


def shape_record(case: Case) -> dict[str, Any]:
    """A case's definition and cost, timed or not."""
    work = case.work
    bound = roof(work, GPUS[case.roof_gpu])
    return {
        "row": case.row,
        "case": case.case,
        "name": case.name,
        "op": case.op,
        "title": case.title,
        "text": case.text,
        "shape": asdict(case.shape),
        "dtype": case.dtype,
        "seed": case.seed,
        "flops": work.flops,
        "bytes": work.bytes,
        "intensity": work.intensity,
        "rate": work.rate,
        "roof_gpu": case.roof_gpu,
        "roof_us": bound.us,
        "bound": bound.bound,
        "goal_us": case.goal_us,
    }


def not_run(case: Case, reason: str) -> dict[str, Any]:
    """The record of a case that was left out."""
    return {**shape_record(case), "status": NOT_RUN, "reason": reason}


def measure_case(case: Case, bench: Bench) -> dict[str, Any]:
    """Checks and times one case. `wrong` rows carry no times: a fast wrong answer is no answer."""
    subject = make_subject(case, bench.device, bench.l2_bytes)
    subject.poison()
    subject.call(subject.sets[0])
    before = subject.check_sets(subject.sets[:1], subject.sets[:1])
    if not before.passed:
        return {**shape_record(case), "status": WRONG, "reason": before.reason, "check": asdict(before)}
    entrants, peers = admit(bench.peers, subject)
    cold, others = _recordings(subject, bench)
    theirs = _peer_recordings(entrants, peers, bench)
    launch_us = bench.stopwatch.elapsed_us(cold) / cold.launches
    rounds = rounds_for(launch_us)
    samples = interleave(bench.stopwatch, [cold, *others, *theirs.values()], rounds, case.seed)
    state = _state_under_load(cold, launch_us, bench)
    after = _check_replay(subject, cold)
    if not after.passed:
        return {**shape_record(case), "status": WRONG, "reason": f"in the timed graph: {after.reason}", "check": asdict(after)}
    return {
        **shape_record(case),
        "status": TIMED,
        "reason": "",
        "check": asdict(after),
        "launches": cold.launches,
        "sets": len(subject.sets),
        "set_bytes": subject.set_bytes,
        "rounds": rounds,
        "clocks": state,
        **figures(case.work, samples, bench.ceilings),
        "peers": {name: {**record, **_peer_figures(theirs.get(name), samples)} for name, record in peers.items()},
    }


def _recordings(subject: Subject[Any], bench: Bench) -> tuple[Recording, list[Recording]]:
    """The calls over rotating sets, and what runs beside them: the same again (the noise floor), one set that stays in L2
    if it fits there, the plan, and the ceilings."""
    stopwatch, sets = bench.stopwatch, subject.sets
    estimate = stopwatch.record("estimate", _calls(subject, sets, _ESTIMATE_LAUNCHES))
    launches = graph_launches(stopwatch.elapsed_us(estimate) / estimate.launches, len(sets))
    cold = stopwatch.record("cold", _calls(subject, sets, launches))
    others = [
        stopwatch.record("control", _calls(subject, sets, launches)),
        stopwatch.record("matmul", [bench.ceilings.matmul] * _CEILING_LAUNCHES),
        stopwatch.record("copy", [bench.ceilings.copy] * _CEILING_LAUNCHES),
        stopwatch.record("l2_read", [bench.ceilings.l2_read] * _CEILING_LAUNCHES),
    ]
    if subject.has_plan:
        others.append(stopwatch.record("plan", [subject.plan] * _PLAN_LAUNCHES))
    if subject.set_bytes <= bench.l2_bytes // 2:
        others.append(stopwatch.record("warm", _calls(subject, sets[:1], launches)))
    return cold, others


def _peer_recordings(entrants: Sequence[Entrant], records: dict[str, dict[str, Any]], bench: Bench) -> dict[str, Recording]:
    """The runs of peers over their sets in turn, by peer. One that cannot be recorded is so in its record, and is left out."""
    recordings = {}
    for entrant in entrants:
        try:
            recordings[entrant.name] = _peer_recording(entrant, bench)
        except Exception as error:  # as in _guarded
            records[entrant.name] |= {"status": FAILED, "reason": failure(error)}
    return recordings


def _peer_recording(entrant: Entrant, bench: Bench) -> Recording:
    sets = len(entrant.runs)
    estimate = bench.stopwatch.record(f"{entrant.name} estimate", _in_turn(entrant.runs, _ESTIMATE_LAUNCHES))
    launches = graph_launches(bench.stopwatch.elapsed_us(estimate) / estimate.launches, sets)
    return bench.stopwatch.record(entrant.name, _in_turn(entrant.runs, launches))


def _in_turn(runs: Sequence[Call], count: int) -> list[Call]:
    return [runs[index % len(runs)] for index in range(count)]


def _peer_figures(recording: Recording | None, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Of a peer that was timed: its time, and ours over its, round by round (below 1: ours is faster)."""
    if recording is None:
        return {}
    return {
        "status": TIMED,
        "launches": recording.launches,
        "us": Spread.of(samples[recording.name]).as_dict(),
        "ratio": Spread.of(ratios(samples["cold"], samples[recording.name])).as_dict(),
    }


def _calls(subject: Subject[Any], sets: Sequence[Any], count: int) -> list[Call]:
    """Calls of the subject over the sets in turn."""
    return _in_turn([partial(subject.call, operands) for operands in sets], count)


def _state_under_load(cold: Recording, launch_us: float, bench: Bench) -> dict[str, Any]:
    replay_us = max(launch_us * cold.launches, 1.0)
    for _ in range(math.ceil(bench.load_us / replay_us)):
        cold.replay()
    return bench.state()


def _check_replay(subject: Subject[Any], cold: Recording) -> Check:
    subject.poison()
    cold.replay()
    return subject.check_sets(subject.sets, [subject.sets[0], subject.sets[-1]])


def figures(work: Work, samples: dict[str, list[float]], ceilings: Ceilings) -> dict[str, Any]:
    """Rates, ceilings of the same run and the fraction of the limit, from microseconds per launch by recording name."""
    cold = Spread.of(samples["cold"])
    matmul, copy = Spread.of(samples["matmul"]).median, Spread.of(samples["copy"]).median
    tflops, gbytes = ceilings.matmul_flops / matmul / 1e6, ceilings.copy_bytes / copy / 1e3
    limit_us = max(work.flops / (tflops * work.rate) / 1e6, work.bytes / gbytes / 1e3)
    warm = samples.get("warm")
    return {
        "cold_us": cold.as_dict(),
        "warm_us": Spread.of(warm).as_dict() if warm else None,
        "control_ratio": Spread.of(ratios(samples["control"], samples["cold"])).as_dict(),
        "plan_us": Spread.of(samples["plan"]).as_dict() if "plan" in samples else None,
        "tflops": work.flops / cold.median / 1e6,
        "gbytes_per_s": work.bytes / cold.median / 1e3,
        "matmul_tflops": tflops,
        "copy_gbytes_per_s": gbytes,
        "l2_read_gbytes_per_s": ceilings.l2_read_bytes / Spread.of(samples["l2_read"]).median / 1e3,
        "limit_us": limit_us,
        "fraction_of_limit": limit_us / cold.median,
    }


def measure_kernels(case: Case, bench: Bench, record: dict[str, Any]) -> None:
    """Adds the time per launch of each kernel alone to a timed record: ours (the main kernel as others report it, and combine),
    and those of the peers that were timed."""
    subject = make_subject(case, bench.device, bench.l2_bytes)
    launches = graph_launches(case.roof_us, len(subject.sets))
    record["kernel_us"] = bench.kernel_times(bench.stopwatch.record("kernels", _calls(subject, subject.sets, launches)))
    timed = {name for name, peer in record["peers"].items() if peer["status"] == TIMED}
    entrants, _ = admit((peer for peer in bench.peers if peer.name in timed), subject)
    for entrant in entrants:
        runs = _in_turn(entrant.runs, graph_launches(record["peers"][entrant.name]["us"]["median"], len(entrant.runs)))
        record["peers"][entrant.name]["kernel_us"] = bench.peer_kernel_times(bench.stopwatch.record("kernels", runs))


def run_rows(
    cases: Iterable[Case],
    bench: Bench,
    budget_s: float,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Measures cases by priority until the budget would be exceeded, judging by the slowest so far; the rest are named.

    progress: called before each row with its name and the records so far, so that a run that hangs has left both.
    Kernel times come in a second pass over the timed rows, since the profiler that they need may disturb what follows it.
    """
    begin, slowest = clock(), 0.0
    records: list[dict[str, Any]] = []
    timed: list[tuple[Case, dict[str, Any]]] = []
    for case in by_priority(list(cases)):
        _release(bench.device)
        started = clock()
        if started - begin + slowest > budget_s:
            records.append(not_run(case, f"the budget of {budget_s:g} s was used up"))
            continue
        progress(case.name, records)
        record = _guarded(case, bench)
        record["seconds"] = clock() - started
        slowest = max(slowest, record["seconds"])
        records.append(record)
        if record["status"] == TIMED:
            timed.append((case, record))
    for case, record in timed:
        if clock() - begin + slowest > budget_s:
            record["kernel_us"] = {"unavailable": f"the budget of {budget_s:g} s was used up"}
            continue
        progress(f"{case.name} kernels", records)
        _release(bench.device)
        try:
            measure_kernels(case, bench, record)
        except Exception as error:  # as in _guarded
            record.setdefault("kernel_us", {"unavailable": failure(error)})
    return records


def _guarded(case: Case, bench: Bench) -> dict[str, Any]:
    """A row's failure, whatever it is, is that row's outcome and not the end of a run that cannot be repeated at will."""
    try:
        return measure_case(case, bench)
    except Exception as error:
        return {**shape_record(case), "status": FAILED, "reason": failure(error)}


def _release(device: torch.device) -> None:
    """Gives memory of earlier rows back, since rows of other sizes could not use its pieces."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
