"""A device that records launches and runs nothing: for tests of what the API checks, allocates and launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from cute_mla.manifest import KernelEntry, kernel_name
from cute_mla.runtime.call_cache import CallCache
from cute_mla.runtime.current import cpu_tensors_on
from cute_mla.runtime.device import SingleLaunches
from cute_mla.runtime.launch import CallSteps
from cute_mla.spec.arch import SM90, SM100, Arch
from cute_mla.spec.kernel_ops import PARAMS_OF


@dataclass(frozen=True)
class Launch:
    """One launch, with its arguments by parameter name."""

    kernel: str
    grid: tuple[int, int, int]
    args: dict[str, Any]
    pdl: bool


@dataclass
class RecordingDevice:
    """Runs every CPU call inside `with device.active():`."""

    arch: Arch = SM90
    sm_count: int = 132
    launches: list[Launch] = field(default_factory=list)
    poisoned: list[int] = field(default_factory=list)
    call_cache: CallCache = field(default_factory=CallCache)

    @contextmanager
    def active(self) -> Iterator[RecordingDevice]:
        """Make this the device of CPU tensors."""
        with cpu_tensors_on(self):
            yield self

    def kernel(self, op: str, config_name: str) -> KernelEntry:
        """Return an entry with a name and parameters."""
        return KernelEntry(
            name=kernel_name(op, self.arch.name, config_name),
            op=op,
            arch=self.arch.name,
            config={},
            entry="entry",
            cubin="cubin",
            cubin_sha256="0" * 64,
            ptx="ptx",
            ptx_sha256="0" * 64,
            params=PARAMS_OF[op],
            block=(256, 1, 1),
            cluster=(1, 1, 1),
            smem_bytes=0,
            registers=1,
            stack_bytes=0,
            fingerprint="0" * 64,
        )

    def launch(
        self, kernel: KernelEntry, grid: tuple[int, int, int], args: Sequence[Any], *, stream: int | None = None, pdl: bool = False
    ) -> None:
        """Record the launch."""
        named = {param.name: arg for param, arg in zip(kernel.params, args, strict=True)}
        self.launches.append(Launch(kernel.name, grid, named, pdl))

    def prepare(self, call: CallSteps) -> SingleLaunches:
        """Keep what to launch."""
        return SingleLaunches(self, call)

    def mark_uninitialized(self, *tensors: torch.Tensor) -> None:
        """Record the addresses."""
        self.poisoned += [tensor.data_ptr() for tensor in tensors]


def row_ctas(device: RecordingDevice, rows: int) -> int:
    """Return CTAs of 64 rows each, in pairs on Blackwell."""
    tiles = -(-rows // 64)
    return tiles + tiles % 2 if device.arch is SM100 else tiles
