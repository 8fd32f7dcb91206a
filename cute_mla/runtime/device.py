"""Where a tensor's kernels run: its CUDA device, or inside simulate() the simulated one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch

from ..manifest import KernelEntry
from ..spec.arch import ARCHS, Arch
from .arguments import Argument

if TYPE_CHECKING:
    from .simulated import SimulatedDevice


class Device(Protocol):
    """Something that runs kernels.

    arch: whose kernels it runs. sm_count: streaming multiprocessors, which every schedule is made for.
    """

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

    def undefined(self, *tensors: torch.Tensor) -> None:
        """Says that the contents of these tensors do not matter: whoever reads them before writing them is wrong."""
        ...


_simulated: ContextVar[SimulatedDevice | None] = ContextVar("cute_mla_simulated_device", default=None)


def device_for(device: torch.device) -> Device:
    """The device that runs kernels on tensors of this torch device. ValueError if there is none."""
    if device.type == "cuda":
        from .cuda import cuda_device

        return cuda_device(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        simulated = _simulated.get()
        if simulated is None:
            raise ValueError("got CPU tensors: supported are CUDA tensors, and CPU tensors inside `with cute_mla.simulate(arch):`")
        return simulated
    raise ValueError(f"got tensors on {device}: supported are CUDA tensors, and CPU tensors inside `with cute_mla.simulate(arch):`")


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

    if isinstance(arch, str):
        if arch not in ARCHS:
            raise ValueError(f"arch is {arch!r}; supported: {', '.join(ARCHS)}")
        arch = ARCHS[arch]
    device = SimulatedDevice(arch, arch.sm_count if sm_count is None else sm_count, schedule, seed, on_finding)
    token = _simulated.set(device)
    try:
        yield device
    finally:
        _simulated.reset(token)
