"""Devices: the protocol that every device has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from ..manifest import KernelEntry
from ..spec.arch import Arch
from .arguments import Argument
from .call_cache import CallCache
from .launch import CallSteps, Launches


class Device(Protocol):
    """A device that runs kernels.

    arch: the architecture whose kernels it runs. sm_count: number of streaming multiprocessors, which plans depend on.
    call_cache: calls that were checked and prepared for the device.
    """

    call_cache: CallCache

    @property
    def arch(self) -> Arch:
        """Return the architecture."""
        ...

    @property
    def sm_count(self) -> int:
        """Return the number of streaming multiprocessors."""
        ...

    def kernel(self, op: str, config_name: str) -> KernelEntry:
        """Return the manifest entry of a variant for this device. ArtifactError if the variant was not built."""
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
        """Launch a kernel, with its arguments in the order of its parameters, on `stream` or else on the current stream.

        pdl: programmatic dependent launch. The kernel may start before the kernel ahead of it ends, and waits for that kernel itself.
        """
        ...

    def prepare(self, call: CallSteps) -> Launches:
        """Prepare the launches of a call, all but their memory."""
        ...

    def mark_uninitialized(self, *tensors: torch.Tensor) -> None:
        """Declare that the contents of these tensors do not matter: reading them before a kernel writes them is an error."""
        ...


class SingleLaunches(NamedTuple):
    """Launches of a device that prepares nothing: each start launches one kernel after the other."""

    device: Device
    call: CallSteps

    def start(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Launch the kernels, as Launches.start says."""
        self.device.mark_uninitialized(*(tensors[i] for i in self.call.uninitialized))
        for step in self.call.steps:
            maps = [replace(mapped.layout, address=addresses[mapped.tensor]) for mapped in step.maps]
            pointers = [None if buffer is None else buffer.of(tensors) for buffer in step.pointers]
            self.device.launch(step.kernel, step.grid, (*maps, *pointers, *step.scalars), pdl=step.pdl)
