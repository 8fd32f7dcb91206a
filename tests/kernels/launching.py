"""Launches of one kernel on the simulator, over memory that the test lays out itself."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

import torch

from cute_mla import simulator
from cute_mla.kernels.definition import KernelDefinition
from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import TensorMap
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.arch import Arch
from tests.mutation.planting import Bug, survivors

FORMATS = {ParamKind.POINTER: "<Q", ParamKind.INT32: "<i", ParamKind.INT64: "<q", ParamKind.FLOAT32: "<f"}


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's PTX and its description: parameters, block, cluster, shared memory, barriers and roles."""

    description: KernelDefinition | KernelEntry
    entry: str
    ptx: str

    @property
    def module(self) -> simulator.Module:
        """Return the parsed PTX."""
        return module(self.ptx)

    def survivors(self, bug: Bug, is_noticed: Callable[[CompiledKernel], bool]) -> list[str]:
        """Plant a bug in the PTX; return what was not noticed."""
        return survivors(bug, self.ptx, lambda ptx: is_noticed(CompiledKernel(self.description, self.entry, ptx)))


built_for: ContextVar[Arch] = ContextVar("built_for")  # the architecture whose kernels `shipped` returns


def shipped(op: str, config_name: str) -> CompiledKernel:
    """Return the built kernel of a variant for the architecture in turn. ArtifactError if it was not built."""
    artifacts = load_artifacts()
    entry = artifacts.entry(op, built_for.get().name, config_name)
    return CompiledKernel(entry, entry.entry, artifacts.ptx(entry))


@lru_cache(8)
def module(ptx: str) -> simulator.Module:
    """Return the parsed PTX."""
    return simulator.load_module(ptx)


def fails(check: Callable[[], None]) -> bool:
    """Run a check; return whether it raised AssertionError."""
    try:
        check()
    except AssertionError:
        return True
    return False


def nbytes(tensor: torch.Tensor) -> int:
    """Return bytes that a contiguous tensor covers."""
    return tensor.numel() * tensor.element_size()


def launch(
    kernel: CompiledKernel,
    grid: tuple[int, int, int],
    args: Sequence[int | float | torch.Tensor | TensorMap],
    memory: simulator.GlobalMemory,
    policy: simulator.Policy | None = None,
) -> list[simulator.Finding]:
    """Run the kernel with arguments in the order of its parameters; return the findings."""
    raw: list[bytes | TensorMap] = []
    for param, arg in zip(kernel.description.params, args, strict=True):
        if isinstance(arg, TensorMap):
            raw.append(arg)
        else:
            raw.append(struct.pack(FORMATS[param.kind], arg.data_ptr() if isinstance(arg, torch.Tensor) else arg))
    shape = simulator.Launch(
        module=kernel.module,
        entry=kernel.entry,
        grid=grid,
        block=kernel.description.block,
        cluster=kernel.description.cluster,
        smem_bytes=kernel.description.smem_bytes,
        args=raw,
        names=simulator.Names(
            barriers=tuple((barrier.name, barrier.offset, barrier.count) for barrier in kernel.description.barriers),
            named_barriers=tuple((barrier.name, barrier.barrier_id) for barrier in kernel.description.named_barriers),
            roles=tuple((role.name, role.first_warp, role.warps) for role in kernel.description.roles),
        ),
    )
    return simulator.run(shape, memory, policy or simulator.Policy()).findings
