"""Timing by replaying CUDA graphs in interleaved rounds. Operands and checks are the caller's.

A graph holds at least 20 launches, or 5 ms of them, over rotating operands that together exceed the L2 cache several
times. Every round replays each graph once, in random order, so that drifts of clock and temperature affect all graphs alike.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

GRAPH_LAUNCHES = 20
GRAPH_US = 5000.0
ROUNDS = 12
ROUNDS_LONG = 4  # when one launch takes longer than GRAPH_US

Call = Callable[[], object]


@dataclass(frozen=True)
class Recording:
    """Calls recorded as one replayable unit. replay enqueues the calls without waiting for them."""

    name: str
    launches: int
    replay: Call


class Stopwatch(Protocol):
    """Protocol for recording and timing calls. CudaStopwatch implements it on a GPU, tests without one."""

    def record(self, name: str, calls: Sequence[Call]) -> Recording:
        """Record the calls, in order, as one replayable unit."""
        ...

    def elapsed_us(self, recording: Recording) -> float:
        """Return the device time of one replay in microseconds."""
        ...


class CudaStopwatch:
    """CUDA graphs and CUDA events on the current device."""

    def record(self, name: str, calls: Sequence[Call]) -> Recording:
        """Capture the calls in a CUDA graph, after one warm-up of each outside the graph."""
        import torch

        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(warm_up)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return Recording(name, len(calls), graph.replay)

    def elapsed_us(self, recording: Recording) -> float:
        """Return the device time of one replay in microseconds.

        Another replay runs right before it, so that the device is busy while the timed replay is enqueued.
        """
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        recording.replay()
        begin.record()
        recording.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


@dataclass(frozen=True)
class SteppedStopwatch:
    """A stopwatch that calls `begin` with the recording's name before it records or times it."""

    inner: Stopwatch
    begin: Callable[[str], None]

    def record(self, name: str, calls: Sequence[Call]) -> Recording:
        """Record the calls, in order, as one replayable unit."""
        self.begin(name)
        return self.inner.record(name, calls)

    def elapsed_us(self, recording: Recording) -> float:
        """Return the device time of one replay in microseconds."""
        self.begin(recording.name)
        return self.inner.elapsed_us(recording)


@dataclass(frozen=True)
class Spread:
    """Median and the 10th and 90th percentile of repeated measurements."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of some values. ValueError without any."""
        if not values:
            raise ValueError("got no values; a spread needs at least one")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1])

    def as_dict(self) -> dict[str, float]:
        """Return the fields for JSON, rounded to five significant digits."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}


def graph_launches(launch_us: float, sets: int) -> int:
    """Return the launches of one graph: 20, or as many as take 5 ms if fewer, rounded up to a multiple of the operand sets."""
    least = min(GRAPH_LAUNCHES, max(int(-(-GRAPH_US // max(launch_us, 1e-3))), 1))
    return -(-least // sets) * sets


def rounds_for(launch_us: float) -> int:
    """Return the number of rounds for launches of this duration."""
    return ROUNDS_LONG if launch_us > GRAPH_US else ROUNDS


def interleave(stopwatch: Stopwatch, recordings: Sequence[Recording], rounds: int, seed: int) -> dict[str, list[float]]:
    """Return microseconds per launch of every recording in every round. Within a round the order is random, from the seed."""
    generator = random.Random(seed)
    samples: dict[str, list[float]] = {recording.name: [] for recording in recordings}
    for _ in range(rounds):
        for recording in generator.sample(list(recordings), len(recordings)):
            samples[recording.name].append(stopwatch.elapsed_us(recording) / recording.launches)
    return samples


def ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return samples[i] / base[i] for every round i."""
    return [value / reference for value, reference in zip(samples, base, strict=True)]
