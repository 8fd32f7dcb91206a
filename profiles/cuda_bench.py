"""The measuring bench of a CUDA device, and the record of the machine that goes with its results."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..manifest import KernelEntry, manifest_sha256
from ..runtime.artifacts import artifacts_folder, load_artifacts
from ..runtime.errors import DeviceError
from ..spec.arch import Arch, arch_for
from .ceilings import make_ceilings
from .contest import installed
from .machine import commit, gpu_state, now, wheel_commit
from .measure import Bench
from .peers import PEERS
from .timing import CudaStopwatch, Recording


class GpuMismatch(DeviceError):
    """There is no GPU here that can run the kernels."""


def matching_arch(archs: Sequence[Arch]) -> Arch:
    """The architecture, of those wanted, of the current CUDA device. GpuMismatch if it is none of them."""
    if not torch.cuda.is_available():
        raise GpuMismatch("no CUDA GPU is available to torch")
    found = torch.cuda.get_device_capability()
    arch = arch_for(found)
    if arch is not None and arch in archs:
        return arch
    wanted = ", ".join(f"{arch.name} ({arch.capabilities_text})" for arch in archs)
    raise GpuMismatch(f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}; wanted is {wanted}")


def cuda_bench(arch: Arch) -> Bench:
    """The bench of the current CUDA device, which matches the architecture."""
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
        peers=PEERS,
        peer_kernel_times=lambda recording: times_by_name(profiled(recording), recording.launches),
    )


def profiled(recording: Recording) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel of one replay, by torch's profiler.

    Kernels overlap where one starts before its predecessor ends, so these may add up to more than the whole.
    """
    from torch.profiler import ProfilerActivity, profile

    recording.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        recording.replay()
        torch.cuda.synchronize()
    return [(event.name, float(event.device_time_total)) for event in trace.events() or []]


def kernel_times(durations: Iterable[tuple[str, float]], launches: int, entries: Iterable[KernelEntry]) -> dict[str, Any]:
    """Per-launch sums by op from (kernel name, microseconds) pairs; kernels that are not ours are left out."""
    op_of = {entry.entry: entry.op for entry in entries}
    ours = times_by_name(((op_of[name], microseconds) for name, microseconds in durations if name in op_of), launches)
    return ours or {"unavailable": "the profiler reported none of our kernels"}


def times_by_name(durations: Iterable[tuple[str, float]], launches: int) -> dict[str, Any]:
    """Per-launch sums by name from (name, microseconds) pairs."""
    totals: dict[str, float] = {}
    for name, microseconds in durations:
        totals[name] = totals.get(name, 0.0) + microseconds / launches
    return totals


def environment() -> dict[str, Any]:
    """All that one needs to know of the machine to repeat a measurement, or to doubt it."""
    record: dict[str, Any] = {
        "date": now(),
        "arch": None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(Path(__file__).resolve().parents[1]) or wheel_commit(artifacts_folder()),
        "manifest_sha256": manifest_sha256(artifacts_folder()),
        "gpu": None,
        "peers": {peer.name: version or reason for peer in PEERS for version, reason in [installed(peer)]},
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        arch = arch_for(torch.cuda.get_device_capability())
        record |= {
            "arch": None if arch is None else arch.name,
            "gpu": properties.name,
            "sm_count": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
            "idle": gpu_state(torch.cuda.current_device()),
        }
    return record
