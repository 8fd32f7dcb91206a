"""Grouping, ordering and summarising of launches, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from cute_mla.profiles.measure.timing import (
    Call,
    CudaStopwatch,
    Recording,
    Spread,
    graph_launches,
    interleave,
    ratios,
    rounds_for,
)
from cute_mla.profiles.workloads.workload import LEAST_ROTATION_BYTES, rotation_sets

MIB = 1 << 20


def test_tiny_operands_do_not_take_minutes_to_make() -> None:
    assert rotation_sets(2304, 50 * MIB) == 4096


@pytest.mark.parametrize(
    ("set_bytes", "l2_bytes", "sets"),
    [(640_000_000, 50 * MIB, 2), (4_754_000, 50 * MIB, 57), (64 * MIB, 50 * MIB, 4), (64 * MIB, 128 * MIB, 8), (64 * 1024, 50 * MIB, 4096)],
)
def test_rotation_exceeds_l2_several_times(set_bytes: int, l2_bytes: int, sets: int) -> None:
    assert rotation_sets(set_bytes, l2_bytes) == sets
    assert sets * set_bytes >= max(4 * l2_bytes, LEAST_ROTATION_BYTES)


@pytest.mark.parametrize(
    ("launch_us", "sets", "launches"),
    [(8.0, 2, 20), (8.0, 57, 57), (1500.0, 2, 4), (1500.0, 3, 6), (9000.0, 1, 1), (0.0, 1, 20), (249.0, 7, 21)],
)
def test_a_graph_holds_twenty_launches_or_five_milliseconds(launch_us: float, sets: int, launches: int) -> None:
    assert graph_launches(launch_us, sets) == launches
    assert launches >= 20 or launches * launch_us >= 5000
    assert launches % sets == 0


def test_long_launches_get_fewer_rounds() -> None:
    assert (rounds_for(100.0), rounds_for(5001.0)) == (12, 4)


class Scripted:
    """Returns planned times, and keeps the order of what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def record(self, name: str, calls: Sequence[Call]) -> Recording:
        raise AssertionError("nothing is recorded here")

    def elapsed_us(self, recording: Recording) -> float:
        self.asked.append(recording.name)
        return 10.0 * len(self.asked)


def test_rounds_interleave_in_random_order_and_divide_by_launches() -> None:
    recordings = [Recording(name, launches, lambda: None) for name, launches in (("a", 1), ("b", 2), ("c", 4))]
    stopwatch = Scripted()
    samples = interleave(stopwatch, recordings, rounds=8, seed=3)
    rounds = [stopwatch.asked[start : start + 3] for start in range(0, 24, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    position_of_b = [10.0 * (index + 1) / 2 for index, name in enumerate(stopwatch.asked) if name == "b"]
    assert samples["b"] == position_of_b
    again = Scripted()
    interleave(again, recordings, rounds=8, seed=3)
    assert again.asked == stopwatch.asked


class FakeCuda:
    """Enough of torch.cuda for a stopwatch: notes in `log` what happens, in order. Events hold the length of the log."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        log = self.log

        class Graph:
            def replay(self) -> None:
                log.append("replay")

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.place = len(log)

            def synchronize(self) -> None:
                log.append("synchronize")

            def elapsed_time(self, end: Event) -> float:
                return float(end.place - self.place)

        @contextmanager
        def within(what: object) -> Iterator[None]:
            log.append("begin capture" if isinstance(what, Graph) else "begin warm-up")
            yield
            log.append("end")

        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in {
            "Stream": lambda: stream, "current_stream": lambda: stream, "stream": within, "synchronize": lambda: log.append("synchronize"),
            "CUDAGraph": Graph, "graph": within, "Event": Event,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


def test_the_cuda_stopwatch_captures_after_a_warm_up_and_times_the_second_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    stopwatch = CudaStopwatch()
    recording = stopwatch.record("two", [lambda: fake.log.append("a"), lambda: fake.log.append("b")])
    assert fake.log == ["begin warm-up", "a", "b", "end", "synchronize", "begin capture", "a", "b", "end"]
    assert recording.launches == 2
    fake.log.clear()
    assert stopwatch.elapsed_us(recording) == 1000.0  # one of the two replays, in the milliseconds of an event
    assert fake.log == ["replay", "replay", "synchronize"]


def test_spread_is_median_and_outer_tenths() -> None:
    spread = Spread.of([float(value) for value in range(1, 12)])
    assert (spread.median, spread.p10, spread.p90) == (6.0, 2.0, 10.0)
    assert Spread.of([4.0]) == Spread(4.0, 4.0, 4.0)
    assert Spread(1.0, 123456.789, 2.0).as_dict() == {"median": 1.0, "p10": 123460.0, "p90": 2.0}
    with pytest.raises(ValueError, match="got no values"):
        Spread.of([])


def test_ratios_are_taken_round_by_round() -> None:
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="argument 2"):
        ratios([1.0], [1.0, 2.0])
