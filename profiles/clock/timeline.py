"""Timelines for Perfetto and other viewers of Chrome's trace format: a process for each CTA of a case, a track for each warp and unit.

A microsecond of the viewer stands for a clock of the SM. All of it is predicted. Warps have a slice for each run of instructions of one
source line and one for each wait; mbarriers have one for each phase. Overlapping copies of TMA go to tracks of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.errors import ArtifactError

from ..launches.launch import Combine, NoLaunchError
from ..launches.of_rows import launch_on
from ..rows import Case
from .constants import constants
from .recorded import Recorded, merged, record
from .rows import setting_of
from .spans import ISSUE, TMA, Span

Event = dict[str, Any]

BLOCKS = 8  # of keys in a recorded run
UNIT = "1 us stands for 1 clock of the SM; predicted by the clock of cute_mla.profiles, not measured"


def timeline(runs: Sequence[Recorded], *, every_warp: bool = False) -> dict[str, Any]:
    """Return the trace of some runs as the JSON object of Chrome's format. every_warp: not only the first warp of each role."""
    events: list[Event] = []
    for run in runs:
        for rank in range(run.ctas):
            process = 1 + len([event for event in events if event["name"] == "process_name"])
            cta = f", CTA {rank}" if run.ctas > 1 else ""
            events += [
                {"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{run.title}: {run.kernel} on {run.gpu}{cta}"}},
                {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
            ]
            for thread, (name, slices) in enumerate(_tracks(run, rank, every_warp), 1):
                place = {"pid": process, "tid": thread}
                events += [
                    {"ph": "M", **place, "name": "thread_name", "args": {"name": name}},
                    {"ph": "M", **place, "name": "thread_sort_index", "args": {"sort_index": thread}},
                    *({"ph": "X", **place, **slice_} for slice_ in slices),
                ]
    missing = [sentence for run in runs for sentence in run.lines.missing]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"unit": UNIT, "missing": "; ".join(dict.fromkeys(missing))}}


def record_case(case: Case, gpu: str) -> Recorded:
    """Run the kernel of a benchmark case over BLOCKS blocks and keep what it does.

    NoLaunchError, UnknownTimeError or ArtifactError for a case whose kernel cannot be timed, or has no loop over keys.
    """
    values = constants(gpu)
    launch = launch_on(case, gpu)
    if isinstance(launch, Combine):
        raise NoLaunchError(f"{case.name}: {case.op} has no loop over keys")
    entry = load_artifacts().manifest.kernels.get(launch.kernel)
    if entry is None:
        raise ArtifactError(f"{launch.kernel} is not built")
    return record(entry, values, setting_of(case, launch, entry, values), BLOCKS, case.name)


def _tracks(run: Recorded, rank: int, every_warp: bool) -> Iterator[tuple[str, Iterator[Event]]]:
    """Yield the tracks of a CTA by name: warps by role, units, mbarriers."""
    for role, warps in run.roles():
        for warp in warps if every_warp else warps[:1]:
            yield f"{role}, warp {warp}", _of_warp(run, run.of(rank, str(warp)))
    for track in run.units():
        lanes = _lanes(run.of(rank, track)) if track == TMA else [run.of(rank, track)]
        for number, lane in enumerate(lanes, 1):
            yield f"{track} {number}" if track == TMA else track, (_slice(run, span, span.name, track) for span in lane)
    for track, name in run.mbarriers():
        yield f"mbarrier {name}", (_slice(run, span, span.name, "mbarrier") for span in run.of(rank, track))


def _of_warp(run: Recorded, spans: list[Span]) -> Iterator[Event]:
    """Yield the slices of a warp: waits by cause, and instructions joined by source line."""
    places = {address: run.lines.where(address) or address for address in run.code}
    for span, number in merged(spans, places):
        if span.name == ISSUE:
            name = run.lines.where(span.address) or run.code[span.address].partition(" ")[0]
            yield _slice(run, span, name, "issue", instructions=number)
        else:
            yield _slice(run, span, f"waits: {span.name}", "wait", cause=span.name)


def _slice(run: Recorded, span: Span, name: str, category: str, **more: Any) -> Event:
    """Return a complete event. Its arguments are the instruction's address, code and lines, where they are known."""
    arguments: dict[str, Any] = dict(more)
    if span.address >= 0:
        arguments |= {"address": f"{span.address:#x}", "code": run.code[span.address]}
        if span.address in run.lines.ptx:
            arguments["ptx_line"] = run.lines.ptx[span.address]
        if run.lines.where(span.address):
            arguments["source"] = run.lines.where(span.address)
    return {"name": name, "cat": category, "ts": span.start, "dur": span.end - span.start, "args": arguments}


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Split spans that overlap over as few tracks as they need."""
    lanes: list[list[Span]] = []
    for span in spans:
        free = next((lane for lane in lanes if lane[-1].end <= span.start), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes
