"""Baselines beside ours in a row: who may take part, what is recorded of each, and that none of them ends a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_mla.profiles.measure.run_rows import run_rows
from cute_mla.profiles.measure.runner import TIMED, measure_case
from cute_mla.profiles.measure.timing import Recording
from cute_mla.profiles.workloads.workload import Results
from tests.profiles import benching
from tests.profiles.benching import FakeBaseline, FakeKernel, asking, bench, install, small_case


def record_with(monkeypatch: pytest.MonkeyPatch, *baselines: FakeBaseline) -> dict[str, Any]:
    """Return the record of a small row with these baselines beside ours, which takes 100 us."""
    install(monkeypatch, FakeKernel())
    return measure_case(small_case(), bench(baselines=baselines))


def test_a_right_baseline_is_timed_in_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benching.CALL_US, "Theirs", 125.0)
    timed: list[str] = []
    elapsed = benching.FakeStopwatch.elapsed_us

    def recorded(self: benching.FakeStopwatch, recording: Recording) -> float:
        timed.append(recording.name)
        return elapsed(self, recording)

    monkeypatch.setattr(benching.FakeStopwatch, "elapsed_us", recorded)
    record = record_with(monkeypatch, FakeBaseline())
    assert record["status"] == TIMED
    theirs = record["peers"]["Theirs"]
    assert (theirs["status"], theirs["reason"], theirs["version"], theirs["launches"]) == (TIMED, "", "1.2.3", 3)
    assert theirs["us"]["median"] == pytest.approx(125.0)
    assert theirs["ratio"] == {"median": pytest.approx(0.8), "p10": pytest.approx(0.8), "p90": pytest.approx(0.8)}
    assert theirs["check"]["out_max_abs"] > 0
    rounds = timed[-12 * 8 :]  # cold, control, plan, three ceilings, warm, and theirs
    assert {tuple(sorted(rounds[start : start + 8])) for start in range(0, 96, 8)} == {
        ("Theirs", "cold", "control", "copy", "l2_read", "matmul", "plan", "warm")
    }


def test_a_slower_baseline_gets_fewer_launches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(benching.CALL_US, "estimate", 100.0)
    monkeypatch.setitem(benching.CALL_US, "Theirs estimate", 5000.0)
    record = record_with(monkeypatch, FakeBaseline())
    assert (record["launches"], record["peers"]["Theirs"]["launches"]) == (21, 3)


def off(call: int, results: Results) -> Results:
    return {**results, "out": results["out"] * 1.02}


def lse_in_base_2(call: int, results: Results) -> Results:
    return {**results, "lse": results["lse"] * 1.4427}


def unwritten(call: int, results: Results) -> Results:
    return {**results, "lse": torch.full_like(results["lse"], float("nan"))}


@pytest.mark.parametrize(("spoil", "reason"), [(off, "out[0]"), (lse_in_base_2, "lse[0]"), (unwritten, "a result has NaN")])
def test_a_wrong_baseline_is_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch, spoil: object, reason: str) -> None:
    baseline = FakeBaseline(spoil=spoil)  # type: ignore[arg-type]
    record = record_with(monkeypatch, baseline)
    assert record["status"] == TIMED
    theirs = record["peers"]["Theirs"]
    assert (theirs["status"], theirs["reason"][: len(reason)]) == ("wrong", reason)
    assert "us" not in theirs
    assert baseline.calls == 2  # the first set and the last


def test_a_baseline_without_lse_is_compared_in_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    without = FakeBaseline(spoil=lambda call, results: {"out": results["out"]})
    assert record_with(monkeypatch, without)["peers"]["Theirs"]["status"] == TIMED


def failing(at: int) -> Callable[[int, Results], Results]:
    def spoil(call: int, results: Results) -> Results:
        if call == at:
            raise AssertionError("not on this GPU\nsecond line")
        return results

    return spoil


@pytest.mark.parametrize(
    ("baseline", "status", "reason"),
    [
        (FakeBaseline(absent=ImportError("No module named 'theirs'")), "absent", "not installed: No module named 'theirs'"),
        (FakeBaseline(absent=OSError("libtheirs.so")), "absent", "cannot be imported: OSError: libtheirs.so"),
        (FakeBaseline(refuses="it takes one KV head"), "not_covered", "it takes one KV head"),
        (FakeBaseline(spoil=failing(1)), "failed", "AssertionError: not on this GPU"),
    ],
)
def test_a_baseline_that_takes_no_part_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, baseline: FakeBaseline, status: str, reason: str
) -> None:
    record = record_with(monkeypatch, baseline, FakeBaseline(name="Others"))
    assert record["status"] == TIMED
    theirs = record["peers"]["Theirs"]
    assert (theirs["status"], theirs["reason"]) == (status, reason)
    assert "us" not in theirs
    assert record["peers"]["Others"]["status"] == TIMED


def test_a_baseline_that_cannot_be_recorded_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeKernel())
    with_baselines = bench(baselines=(FakeBaseline(), FakeBaseline(name="Others")))
    record_call = with_baselines.stopwatch.record

    def refusing(name: str, calls: Any) -> Any:
        if name == "Theirs":
            raise RuntimeError("operation not permitted when stream is capturing")
        return record_call(name, calls)

    monkeypatch.setattr(with_baselines.stopwatch, "record", refusing)
    record = measure_case(small_case(), with_baselines)
    assert record["peers"]["Theirs"]["status"] == "failed"
    assert "stream is capturing" in record["peers"]["Theirs"]["reason"]
    assert record["peers"]["Others"]["status"] == TIMED


def test_a_baseline_of_another_op_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert record_with(monkeypatch, FakeBaseline(ops=("dense_prefill",)))["peers"] == {}


def test_baselines_that_were_timed_get_their_kernel_times(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeKernel())
    baselines = (FakeBaseline(), FakeBaseline(name="Others", refuses="no"))
    (record,) = run_rows([small_case()], asking(bench(baselines=baselines)), 1000.0, lambda name, records: None)
    assert record["kernel_us"] == {"dense_decode": 90.0}
    assert record["peers"]["Theirs"]["kernel_us"] == {"their_kernel": 80.0}
    assert "kernel_us" not in record["peers"]["Others"]
