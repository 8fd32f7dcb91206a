"""Bench of a CUDA device, with kernel times from torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.errors import DeviceError
from cute_mla.spec.arch import Arch, arch_for

from ..baselines import BASELINES
from .ceilings import make_ceilings
from .environment import gpu_state
from .runner import Bench
from .timing import CudaStopwatch, Recording


class GpuMismatchError(DeviceError):
    """No GPU of this machine can run the kernels."""


def matching_arch(archs: Sequence[Arch]) -> Arch:
    """Return the architecture of the current CUDA device. GpuMismatchError unless it is one of `archs`."""
    if not torch.cuda.is_available():
        raise GpuMismatchError("no CUDA GPU is available to torch")
    found = torch.cuda.get_device_capability()
    arch = arch_for(found)
    if arch is not None and arch in archs:
        return arch
    wanted = ", ".join(f"{arch.name} ({arch.capabilities_text})" for arch in archs)
    raise GpuMismatchError(f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}; wanted is {wanted}")


def cuda_bench(arch: Arch) -> Bench:
    """Return the bench of the current CUDA device, whose architecture must be `arch`."""
    device = torch.device("cuda", torch.cuda.current_device())
    entries = [entry for entry in load_artifacts().manifest.kernels.values() if entry.arch == arch.name]
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return Bench(
        device=device,
        stopwatch=CudaStopwatch(),
        ceilings=make_ceilings(device, l2_bytes),
        l2_bytes=l2_bytes,
        state=lambda: gpu_state(device.index),
        kernel_times=lambda recording: kernel_times(profiled(recording), recording.launches, entries),
        baselines=BASELINES,
        probe=torch.cuda.synchronize,
        baseline_kernel_times=lambda recording: times_by_name(profiled(recording), recording.launches),
    )


def profiled(recording: Recording) -> list[tuple[str, float]]:
    """Return (name, microseconds) of every kernel of one replay, by torch's profiler.

    With programmatic dependent launch kernels overlap, so their times may add up to more than the replay's.
    """
    from torch.profiler import ProfilerActivity, profile

    recording.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        recording.replay()
        torch.cuda.synchronize()
    return [(event.name, float(event.device_time_total)) for event in trace.events() or []]


def kernel_times(durations: Iterable[tuple[str, float]], launches: int, entries: Iterable[KernelEntry]) -> dict[str, Any]:
    """Return microseconds per launch by op from (kernel name, microseconds) pairs, ignoring kernels outside `entries`."""
    op_of = {entry.entry: entry.op for entry in entries}
    ours = times_by_name(((op_of[name], microseconds) for name, microseconds in durations if name in op_of), launches)
    return ours or {"unavailable": "the profiler reported none of our kernels"}


def times_by_name(durations: Iterable[tuple[str, float]], launches: int) -> dict[str, Any]:
    """Return microseconds per launch by name from (name, microseconds) pairs."""
    totals: dict[str, float] = {}
    for name, microseconds in durations:
        totals[name] = totals.get(name, 0.0) + microseconds / launches
    return totals
