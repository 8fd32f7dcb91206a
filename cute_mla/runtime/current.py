"""The current device: where kernels run on a tensor, its CUDA device or inside simulate() the simulated device.

The only module that imports both devices. Each import waits for the first use: a CUDA device needs no simulator, and simulate() no driver.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from ..spec.arch import ALIASES, ARCHS, Arch, arch_for
from ..spec.kernel_ops import ARCHS_OF
from .device import Device
from .errors import DeviceError
from .scope import Scope

if TYPE_CHECKING:
    from .simulated_device import SimulatedDevice

_simulated: ContextVar[Scope | None] = ContextVar("cute_mla_simulated_device", default=None)
_cuda: dict[torch.device, Device] = {}
_CPU = torch.device("cpu")


def device_for(device: torch.device, op: str | None = None) -> Device:
    """Return the device that runs kernels on tensors of this torch device. ValueError if there is none, or it has none of the op."""
    if device == _CPU:
        scope = _simulated.get()
        found = scope.device if scope is not None and scope.is_plain else None
    else:
        found = _cuda.get(device)
    found = _first_use(device) if found is None else found
    if op is not None and found.arch not in ARCHS_OF[op]:
        raise ValueError(f"the device is {found.arch.name}; supported for {op}: {', '.join(arch.name for arch in ARCHS_OF[op])}")
    return found


def _simulated_device() -> Device | None:
    """Return the device of CPU tensors, or None outside simulate()."""
    scope = _simulated.get()
    return None if scope is None else scope.active_device()


def _first_use(device: torch.device) -> Device:
    """Open a CUDA device. ValueError for any other device."""
    if device.type == "cuda":
        from .cuda_device import cuda_device

        index = _current_index() if device.index is None else device.index
        return _cuda.setdefault(torch.device("cuda", index), cuda_device(index))
    if device.type == "cpu":
        simulated = _simulated_device()
        if simulated is not None:
            return simulated
        raise ValueError("got CPU tensors: supported are CUDA tensors, and CPU tensors inside `with cute_mla.simulate(arch):`")
    raise ValueError(f"got tensors on {device}: supported are CUDA tensors, and CPU tensors inside `with cute_mla.simulate(arch):`")


def _current_index() -> int:
    """Return the index of torch's current CUDA device. DeviceError if torch has none."""
    try:
        return torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:  # torch built without CUDA; no driver, or no device
        message = f"there is no CUDA device: {error}; supported: a GPU, and the simulated device inside `with cute_mla.simulate(arch):`"
        raise DeviceError(message) from error


def default_device() -> torch.device:
    """Return the device of a call that names none: the simulated device inside simulate(), else the current CUDA device."""
    return torch.device("cuda") if _simulated_device() is None else _CPU


def kernel_arch(device: torch.device) -> Arch | None:
    """Return the architecture whose kernels run on tensors of this torch device, a GPU or the CPU inside simulate(); None without any."""
    if device.type == "cuda":
        return arch_for(torch.cuda.get_device_capability(device))
    simulated = _simulated_device() if device.type == "cpu" else None
    return None if simulated is None else simulated.arch


def has_kernels(device: torch.device, op: str) -> bool:
    """Return whether an op's kernels run on tensors of this torch device."""
    return kernel_arch(device) in ARCHS_OF[op]


@contextmanager
def simulate(
    arch: str | Arch = "sm90",
    sm_count: int | None = None,
    schedule: str = "round_robin",
    seed: int = 0,
    on_finding: str = "raise",
    code: str = "ptx",
    ignored: Collection[str] = (),
) -> Iterator[SimulatedDevice]:
    """Run kernels on CPU tensors on a simulated device, in this thread or task only.

    While a generator that holds the block is suspended, the code that iterates over the generator is outside of the block.

    arch: "sm90", "sm100" or its alias "sm103", "sm120" or its alias "sm121", or the Arch. sm_count: streaming multiprocessors of the
    device; default those of the usual board (132 on sm90, 148 on sm100, 188 on sm120).
    schedule: the order in which warps advance and asynchronous work completes: "round_robin", "lazy", "random" or
    "adversarial". seed: seed of the random schedules; a run is repeatable.
    on_finding: "raise" raises SimulationError at the launch that did something wrong, "collect" fills device.findings.

    code: "ptx" runs the PTX of the kernels, "sass" the machine code of their cubins, which takes nvdisasm (the build extra). Kernels with
    instructions that the simulator does not know are refused with the list.
    ignored: kinds of findings that are not reported, such as "poison" where an undefined result is meant to be.

    Yields the SimulatedDevice, with findings, instructions (warp instructions executed) and seconds. Raises ValueError on
    bad arguments and ArtifactError if the built kernels cannot be used.
    """
    from .simulated_device import SimulatedDevice

    if not isinstance(arch, Arch):
        if not isinstance(arch, str) or arch not in (*ARCHS, *ALIASES):
            raise ValueError(f"arch is {arch!r}; supported: {', '.join((*ARCHS, *ALIASES))}")
        arch = ARCHS[ALIASES.get(arch, arch)]
    device = SimulatedDevice(arch, arch.sm_count if sm_count is None else sm_count, schedule, seed, on_finding, code, ignored)
    with cpu_tensors_on(device):
        yield device


@contextmanager
def cpu_tensors_on(device: Device) -> Iterator[None]:
    """Run kernels on CPU tensors on this device, in this thread or task only."""
    scope = Scope(device, _simulated.get(), sys._getframe(1))
    _simulated.set(scope)
    try:
        yield
    finally:
        scope.close()
        current = _simulated.get()
        _simulated.set(None if current is None else current.innermost_open())
