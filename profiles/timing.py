"""Timing by replaying CUDA graphs in interleaved rounds. What is timed, and whether its answer is right, is not known here.

A graph holds at least 20 launches, or 5 ms of them, over rotating operands that together exceed the L2 cache several
times; every round replays each graph once, in a random order, so that drifts of clock and temperature hit all alike.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

GRAPH_LAUNCHES = 20
GRAPH_US = 5000.0
ROUNDS = 30
ROUNDS_LONG = 8  # when one launch takes longer than GRAPH_US
L2_MULTIPLE = 4
LEAST_ROTATION_BYTES = 256 << 20

Call = Callable[[], object]


@dataclass(frozen=True)
class Recording:
    """Calls recorded to be replayed as one. replay enqueues them without waiting."""

    name: str
    launches: int
    replay: Call


class Stopwatch(Protocol):
    """How calls are recorded and timed. The CUDA one is CudaStopwatch; tests bring their own."""

    def record(self, name: str, calls: Sequence[Call]) -> Recording:
        """Records the calls, in order, as one replayable unit."""
        ...

    def elapsed_us(self, recording: Recording) -> float:
        """Device time of one replay."""
        ...


class CudaStopwatch:
    """CUDA graphs and CUDA events on the current device."""

    def record(self, name: str, calls: Sequence[Call]) -> Recording:
        """Captures the calls in a CUDA graph, after one warm-up of each outside it."""
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
        """Device time of one replay, taken right behind another that keeps the device busy while this one is enqueued."""
        import torch

        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        recording.replay()
        begin.record()
        recording.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3


@dataclass(frozen=True)
class Spread:
    """Median and the 10th and 90th percentile of repeated measurements."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if not values:
            raise ValueError("got no values; a spread needs at least one")
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1])

    def as_dict(self) -> dict[str, float]:
        """For JSON, to five digits."""
        return {name: float(f"{value:.5g}") for name, value in asdict(self).items()}


def rotation_sets(set_bytes: int, l2_bytes: int) -> int:
    """Operand sets to rotate over so that a launch finds nothing of its own in L2: two at least."""
    wanted = max(L2_MULTIPLE * l2_bytes, LEAST_ROTATION_BYTES)
    return max(-(-wanted // set_bytes), 2)


def graph_launches(launch_us: float, sets: int) -> int:
    """Launches of one graph: 20, or 5 ms of them if those are fewer, rounded up to whole turns of the rotation."""
    least = min(GRAPH_LAUNCHES, max(int(-(-GRAPH_US // max(launch_us, 1e-3))), 1))
    return -(-least // sets) * sets


def rounds_for(launch_us: float) -> int:
    """Rounds to run when one launch takes this long."""
    return ROUNDS_LONG if launch_us > GRAPH_US else ROUNDS


def interleave(stopwatch: Stopwatch, recordings: Sequence[Recording], rounds: int, seed: int) -> dict[str, list[float]]:
    """Microseconds per launch of every recording in every round; the order within a round is random, from the seed."""
    generator = random.Random(seed)
    samples: dict[str, list[float]] = {recording.name: [] for recording in recordings}
    for _ in range(rounds):
        for recording in generator.sample(list(recordings), len(recordings)):
            samples[recording.name].append(stopwatch.elapsed_us(recording) / recording.launches)
    return samples


def ratios(samples: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round, one measurement over another."""
    return [value / reference for value, reference in zip(samples, base, strict=True)]
