"""Where a tensor's kernels run: its CUDA device, or inside simulate() the simulated one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from ..manifest import KernelEntry
from ..spec.arch import ARCHS, Arch, arch_for
from ..spec.tensor_map import TensorMap
from .arguments import Argument, Memory, Span
from .kept_calls import KeptCalls

if TYPE_CHECKING:
    from .simulated import SimulatedDevice


class Place(NamedTuple):
    """Memory of a call: a tensor of it, by its number among the call's tensors, or `nbytes` bytes from `offset` of that tensor."""

    tensor: int
    offset: int = 0
    nbytes: int | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> Memory:
        """The memory, in one call."""
        tensor = tensors[self.tensor]
        return tensor if self.nbytes is None else Span(tensor, self.offset, self.nbytes)


class MappedTensor(NamedTuple):
    """A tensor map over a tensor of a call. layout: the map of that tensor at address 0."""

    tensor: int
    layout: TensorMap


class Step(NamedTuple):
    """One of the launches of a call.

    maps, pointers, scalars: its arguments, in the order of its parameters; None: the null pointer. pdl: as in Device.launch.
    """

    kernel: KernelEntry
    grid: tuple[int, int, int]
    maps: tuple[MappedTensor, ...]
    pointers: tuple[Place | None, ...]
    scalars: tuple[int | float, ...]
    pdl: bool


class CallSteps(NamedTuple):
    """The launches of a call, whatever memory it gives them. tensors: how many it gives. undefined: those of them whose contents do not
    matter, as in Device.undefined."""

    steps: tuple[Step, ...]
    tensors: int
    undefined: tuple[int, ...]


class Launches(Protocol):
    """Launches of a few kernels, one behind the other on the current stream, that may be repeated."""

    def start(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Launches them on these tensors, whose addresses are given, too."""
        ...


class Device(Protocol):
    """Something that runs kernels.

    arch: whose kernels it runs. sm_count: streaming multiprocessors, which every schedule is made for. kept_calls: what was checked and
    prepared for it.
    """

    kept_calls: KeptCalls

    @property
    def arch(self) -> Arch: ...

    @property
    def sm_count(self) -> int: ...

    def kernel(self, op: str, config_name: str) -> KernelEntry:
        """The manifest entry of a variant for this device. ArtifactError if it was not built."""
        ...

    def launch(
        self,
        kernel: KernelEntry,
        grid: tuple[int, int, int],
        args: Sequence[Argument],
        *,
        stream: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Launches a kernel with its parameters in order, on the current stream unless another is given."""
        ...

    def prepare(self, call: CallSteps) -> Launches:
        """Makes the launches of a call ready but for their memory."""
        ...

    def undefined(self, *tensors: torch.Tensor) -> None:
        """Says that the contents of these tensors do not matter: whoever reads them before writing them is wrong."""
        ...


class SingleLaunches(NamedTuple):
    """Launches on a device that has nothing to prepare."""

    device: Device
    call: CallSteps

    def start(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """As Launches."""
        self.device.undefined(*(tensors[i] for i in self.call.undefined))
        for step in self.call.steps:
            maps = [replace(mapped.layout, address=addresses[mapped.tensor]) for mapped in step.maps]
            pointers = [None if place is None else place.of(tensors) for place in step.pointers]
            self.device.launch(step.kernel, step.grid, (*maps, *pointers, *step.scalars), pdl=step.pdl)


_simulated: ContextVar[Device | None] = ContextVar("cute_mla_simulated_device", default=None)


_cuda: dict[torch.device, Device] = {}
_CPU = torch.device("cpu")


def device_for(device: torch.device) -> Device:
    """The device that runs kernels on tensors of this torch device. ValueError if there is none."""
    found = _simulated.get() if device == _CPU else _cuda.get(device)
    return _first_use(device) if found is None else found


def _first_use(device: torch.device) -> Device:
    if device.type == "cuda":
        from .cuda import cuda_device

        index = torch.cuda.current_device() if device.index is None else device.index
        return _cuda.setdefault(torch.device("cuda", index), cuda_device(index))
    if device.type == "cpu":
        simulated = _simulated.get()
        if simulated is not None:
            return simulated
        raise ValueError("got CPU tensors: supported are CUDA tensors, and CPU tensors inside `with cute_mla.simulate(arch):`")
    raise ValueError(f"got tensors on {device}: supported are CUDA tensors, and CPU tensors inside `with cute_mla.simulate(arch):`")


def has_kernels(device: torch.device) -> bool:
    """Whether there are kernels for tensors of this torch device: on GPUs of their architectures, and on the CPU inside simulate()."""
    if device.type == "cuda":
        return arch_for(torch.cuda.get_device_capability(device)) is not None
    return device.type == "cpu" and _simulated.get() is not None


@contextmanager
def simulate(
    arch: str | Arch = "sm90",
    sm_count: int | None = None,
    schedule: str = "round_robin",
    seed: int = 0,
    on_finding: str = "raise",
) -> Iterator[SimulatedDevice]:
    """Makes CPU tensors run on a simulated device, in this thread or task only.

    arch: "sm90" or "sm100", or the Arch. sm_count: streaming multiprocessors of the device; default those of the usual
    board (132 on sm90, 148 on sm100).
    schedule: the order in which warps advance and asynchronous work completes: "round_robin", "lazy", "random" or
    "adversarial". seed: of the random ones; a run is repeatable.
    on_finding: "raise" gives a SimulationError at the launch that did something wrong, "collect" fills device.findings.
    Yields the SimulatedDevice, with findings, instructions (warp instructions executed) and seconds. Raises ValueError on
    bad arguments and ArtifactError if the built kernels cannot be used.
    """
    from .simulated import SimulatedDevice

    if not isinstance(arch, Arch):
        if not isinstance(arch, str) or arch not in ARCHS:
            raise ValueError(f"arch is {arch!r}; supported: {', '.join(ARCHS)}")
        arch = ARCHS[arch]
    device = SimulatedDevice(arch, arch.sm_count if sm_count is None else sm_count, schedule, seed, on_finding)
    with cpu_tensors_on(device):
        yield device


@contextmanager
def cpu_tensors_on(device: Device) -> Iterator[None]:
    """Makes CPU tensors run on this device, in this thread or task only."""
    token = _simulated.set(device)
    try:
        yield
    finally:
        _simulated.reset(token)
