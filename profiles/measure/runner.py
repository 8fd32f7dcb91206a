"""Check and time one benchmark row. Records are plain data, ready for JSON."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from cute_mla.testing.processes import Step

from ..baselines.baseline import Baseline
from ..roofline import GPUS, Work, roof
from ..rows import Case
from ..workloads import make_workload
from ..workloads.workload import Check, Workload
from .admission import FAILED, WRONG, AdmittedBaseline, admit, failure
from .ceilings import Ceilings
from .timing import Call, Recording, Spread, SteppedStopwatch, Stopwatch, graph_launches, interleave, ratios, rounds_for

TIMED, NOT_RUN = "timed", "not_run"
PEER = "peer "  # begins the step of a baseline
_ESTIMATE = " estimate"  # ends the name of a baseline's first recording
_ESTIMATE_LAUNCHES = 3
_CEILING_LAUNCHES = 3
_PLAN_LAUNCHES = 20


@dataclass(frozen=True)
class Bench:
    """Device, stopwatch and baselines that all rows of a run share.

    l2_bytes: size of the device's L2 cache. state: reads clocks and power; called while the device is busy.
    kernel_times: microseconds per launch of one replay, by op, our kernels only, or {"unavailable": reason}.
    baselines: libraries to time in the same rounds. baseline_kernel_times: microseconds per launch of one replay, by kernel name.
    probe: waits for the device, and raises if it is broken. begin: called with the name of what begins, ours or a baseline's.
    """

    device: torch.device
    stopwatch: Stopwatch
    ceilings: Ceilings
    l2_bytes: int
    state: Callable[[], dict[str, Any]]
    kernel_times: Callable[[Recording], dict[str, Any]]
    load_us: float = 400_000.0  # work queued before clocks and power are read
    baselines: tuple[Baseline, ...] = ()
    baseline_kernel_times: Callable[[Recording], dict[str, Any]] = lambda recording: {}
    probe: Callable[[], None] = lambda: None
    begin: Callable[[str], None] = lambda name: None


def shape_record(case: Case) -> dict[str, Any]:
    """Return the fields that every record of a case has: definition, work and roofline."""
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
    """Return the record of a case that was not run."""
    return {**shape_record(case), "status": NOT_RUN, "reason": reason}


def measure_case(case: Case, bench: Bench) -> dict[str, Any]:
    """Check and time one case. A `wrong` row carries no times.

    The answer is checked twice: one call before the timing, and one replay of the timed graph after it.
    """
    workload = make_workload(case, bench.device, bench.l2_bytes)
    workload.poison()
    workload.call(workload.sets[0])
    before = workload.check_sets(workload.sets[:1], workload.sets[:1])
    if not before.passed:
        return {**shape_record(case), "status": WRONG, "reason": before.reason, "check": asdict(before)}
    admitted, baselines = admit(bench.baselines, workload, bench.begin)
    cold, others = _recordings(workload, bench)
    theirs = _baseline_recordings(admitted, baselines, bench)
    launch_us = bench.stopwatch.elapsed_us(cold) / cold.launches
    rounds = rounds_for(launch_us)
    samples = interleave(bench.stopwatch, [cold, *others, *theirs.values()], rounds, case.seed)
    bench.begin("clocks")
    state = _state_under_load(cold, launch_us, bench)
    bench.begin("check")
    after = _check_replay(workload, cold)
    if not after.passed:
        return {**shape_record(case), "status": WRONG, "reason": f"in the timed graph: {after.reason}", "check": asdict(after)}
    return {
        **shape_record(case),
        "status": TIMED,
        "reason": "",
        "check": asdict(after),
        "launches": cold.launches,
        "sets": len(workload.sets),
        "set_bytes": workload.set_bytes,
        "rounds": rounds,
        "clocks": state,
        **figures(case.work, samples, bench.ceilings),
        "peers": {name: {**record, **_baseline_figures(theirs.get(name), samples)} for name, record in baselines.items()},
    }


def _recordings(workload: Workload, bench: Bench) -> tuple[Recording, list[Recording]]:
    """Record the timed calls over rotating operand sets ("cold") and their companions.

    Companions: "control", the same calls again (the noise floor); "warm", one set, if it fits in half of L2; "plan"; the ceilings.
    """
    stopwatch, sets = bench.stopwatch, workload.sets
    estimate = stopwatch.record("estimate", _calls(workload, sets, _ESTIMATE_LAUNCHES))
    launches = graph_launches(stopwatch.elapsed_us(estimate) / estimate.launches, len(sets))
    cold = stopwatch.record("cold", _calls(workload, sets, launches))
    others = [
        stopwatch.record("control", _calls(workload, sets, launches)),
        stopwatch.record("matmul", [bench.ceilings.matmul] * _CEILING_LAUNCHES),
        stopwatch.record("copy", [bench.ceilings.copy] * _CEILING_LAUNCHES),
        stopwatch.record("l2_read", [bench.ceilings.l2_read] * _CEILING_LAUNCHES),
    ]
    if workload.has_plan:
        others.append(stopwatch.record("plan", [workload.plan] * _PLAN_LAUNCHES))
    if workload.set_bytes <= bench.l2_bytes // 2:
        others.append(stopwatch.record("warm", _calls(workload, sets[:1], launches)))
    return cold, others


def _baseline_recordings(admitted: Sequence[AdmittedBaseline], records: dict[str, dict[str, Any]], bench: Bench) -> dict[str, Recording]:
    """Record the runs of each baseline over its operand sets. A baseline that cannot be recorded is marked `failed` in its record."""
    recordings = {}
    for baseline in admitted:
        try:
            recordings[baseline.name] = _baseline_recording(baseline, bench)
        except Exception as error:  # as in _guarded
            records[baseline.name] |= {"status": FAILED, "reason": failure(error)}
    return recordings


def _baseline_recording(baseline: AdmittedBaseline, bench: Bench) -> Recording:
    sets = len(baseline.runs)
    estimate = bench.stopwatch.record(baseline.name + _ESTIMATE, _in_turn(baseline.runs, _ESTIMATE_LAUNCHES))
    launches = graph_launches(bench.stopwatch.elapsed_us(estimate) / estimate.launches, sets)
    return bench.stopwatch.record(baseline.name, _in_turn(baseline.runs, launches))


def _in_turn(runs: Sequence[Call], count: int) -> list[Call]:
    return [runs[index % len(runs)] for index in range(count)]


def _baseline_figures(recording: Recording | None, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return a timed baseline's time, and the ratio of our time to it round by round (below 1: ours is faster)."""
    if recording is None:
        return {}
    return {
        "status": TIMED,
        "launches": recording.launches,
        "us": Spread.of(samples[recording.name]).as_dict(),
        "ratio": Spread.of(ratios(samples["cold"], samples[recording.name])).as_dict(),
    }


def _calls(workload: Workload, sets: Sequence[Any], count: int) -> list[Call]:
    """Return `count` calls of the workload that cycle through the sets."""
    return _in_turn([partial(workload.call, operands) for operands in sets], count)


def _state_under_load(cold: Recording, launch_us: float, bench: Bench) -> dict[str, Any]:
    replay_us = max(launch_us * cold.launches, 1.0)
    for _ in range(math.ceil(bench.load_us / replay_us)):
        cold.replay()
    return bench.state()


def _check_replay(workload: Workload, cold: Recording) -> Check:
    workload.poison()
    cold.replay()
    return workload.check_sets(workload.sets, [workload.sets[0], workload.sets[-1]])


def figures(work: Work, samples: dict[str, list[float]], ceilings: Ceilings) -> dict[str, Any]:
    """Return rates, the ceilings of the same run and the fraction of the limit.

    samples: microseconds per launch of every round, by recording name. limit_us: the greater of the arithmetic over the measured matmul
    rate and the bytes over the measured copy rate.
    """
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
    """Add the time per launch of each single kernel to a timed record.

    Our kernels appear by op, so that the main kernel is separate from combine, as other libraries report it. Timed baselines follow.
    """
    workload = make_workload(case, bench.device, bench.l2_bytes)
    launches = graph_launches(case.roof_us, len(workload.sets))
    record["kernel_us"] = bench.kernel_times(bench.stopwatch.record("kernels", _calls(workload, workload.sets, launches)))
    timed = {name for name, theirs in record["peers"].items() if theirs["status"] == TIMED}
    admitted, _ = admit((baseline for baseline in bench.baselines if baseline.name in timed), workload, bench.begin)
    for baseline in admitted:
        theirs = record["peers"][baseline.name]
        runs = _in_turn(baseline.runs, graph_launches(theirs["us"]["median"], len(baseline.runs)))
        theirs["kernel_us"] = bench.baseline_kernel_times(bench.stopwatch.record(baseline.name, runs))


@dataclass(frozen=True)
class Task:
    """A row to measure, or if `timed`, its record, is given, to time the single kernels of. left_out: baselines that do not run."""

    case: Case
    left_out: frozenset[str] = frozenset()
    timed: dict[str, Any] | None = None


def row_worker(make_bench: Callable[[], Bench], step: Step) -> Callable[[Task], tuple[dict[str, Any], bool]]:
    """Return the function of a worker process that answers tasks with records.

    step: takes the name of the step that begins, of a baseline PEER and its name.
    A fault of the device is raised in the step that caused it: no step begins before the device has passed the probe.
    """
    made = make_bench()
    names = {baseline.name for baseline in made.baselines}

    def begin(name: str) -> None:
        made.probe()
        owner = name.removesuffix(_ESTIMATE)
        step(PEER + owner if owner in names else name)

    def work(task: Task) -> tuple[dict[str, Any], bool]:
        begin("set-up")
        _release(made.device)
        kept = tuple(baseline for baseline in made.baselines if baseline.name not in task.left_out)
        bench = replace(made, stopwatch=SteppedStopwatch(made.stopwatch, begin), begin=begin, baselines=kept)
        record = _guarded(task.case, bench) if task.timed is None else _with_kernels(task.case, bench, task.timed)
        made.probe()
        return record, True

    return work


def _with_kernels(case: Case, bench: Bench, record: dict[str, Any]) -> dict[str, Any]:
    try:
        measure_kernels(case, bench, record)
    except Exception as error:  # as in _guarded
        record.setdefault("kernel_us", {"unavailable": failure(error)})
    return record


def _guarded(case: Case, bench: Bench) -> dict[str, Any]:
    """Measure a case; any exception becomes its record. GPU time is scarce, so one failing row must not end the run."""
    try:
        return measure_case(case, bench)
    except Exception as error:
        return {**shape_record(case), "status": FAILED, "reason": failure(error)}


def _release(device: torch.device) -> None:
    """Return cached memory to the device: cached blocks of earlier rows have other sizes and would fragment."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
