"""Traces for Perfetto: processes, tracks, slices and their arguments."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from cute_mla.profiles.clock.timeline import timeline
from tests.profiles.clock.recordings import TILE, recorded

TRACKS = ["load, warp 0", "score, warp 4", "tensor core", "shared-memory port", "TMA 1", "TMA 2", "mbarrier kv_ready[1]"]


def names(trace: dict[str, Any], kind: str, process: int | None = None) -> list[str]:
    """Return the names that metadata of a kind gives, in order."""
    found = [event for event in trace["traceEvents"] if event["name"] == kind and process in (None, event["pid"])]
    return [event["args"]["name"] for event in found]


def slices(trace: dict[str, Any], process: int, track: str) -> list[dict[str, Any]]:
    """Return the slices of a track."""
    thread = names(trace, "thread_name", process).index(track) + 1
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and (event["pid"], event["tid"]) == (process, thread)]


def test_every_cta_of_every_case_is_a_process() -> None:
    trace = timeline([recorded(), recorded("D5.fixed")])
    assert names(trace, "process_name") == [f"{case}: k on H200, CTA {rank}" for case in ("D1.fixed", "D5.fixed") for rank in range(2)]
    for process in range(1, 5):
        assert names(trace, "thread_name", process) == TRACKS
    assert json.loads(json.dumps(trace)) == trace
    assert "not measured" in trace["otherData"]["unit"]
    assert trace["otherData"]["missing"] == "no tables of one kind"


def test_all_warps_on_demand() -> None:
    tracks = names(timeline([recorded()], every_warp=True), "thread_name", 1)
    assert tracks[:8] == [f"load, warp {warp}" for warp in range(4)] + [f"score, warp {warp}" for warp in range(4, 8)]


def test_slices_of_a_track_follow_each_other() -> None:
    events = [event for event in timeline([recorded()])["traceEvents"] if event["ph"] == "X"]
    tracks = defaultdict(list)
    for event in events:
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for found in tracks.values():
        assert found == sorted(found)
        assert all(one[1] <= two[0] for one, two in pairwise(found))


def test_a_warp_shows_lines_and_waits() -> None:
    first, second, third, *_ = slices(timeline([recorded()]), 1, "score, warp 4")
    assert first == {
        "ph": "X", "pid": 1, "tid": 2, "name": "kernels/score.py:9", "cat": "issue", "ts": 0, "dur": 10,
        "args": {"instructions": 1, "address": "0x10", "code": "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24", "ptx_line": 9,
                 "source": "kernels/score.py:9"},
    }  # fmt: skip
    assert (second["name"], second["cat"], second["ts"], second["dur"]) == ("waits: products", "wait", 10, 50)
    assert second["args"]["cause"] == "products"
    # Two instructions of one line are one slice.
    assert (third["name"], third["ts"], third["dur"], third["args"]["instructions"]) == ("kernels/score.py:11", 60, 8, 2)


def test_units_and_barriers_have_slices() -> None:
    trace = timeline([recorded()])
    product, *more = slices(trace, 2, "tensor core")
    assert (product["name"], product["ts"], product["dur"], len(more)) == ("m64n64k16 SS of warps 4 to 7", 4, 32, 7)
    assert product["args"]["address"] == "0x10"
    phases = slices(trace, 1, "mbarrier kv_ready[1]")
    assert [(event["name"], event["ts"] + event["dur"]) for event in phases] == [(f"phase {tile}", tile * TILE + 80) for tile in range(8)]
    assert phases[0]["args"] == {}
