"""Compiles a kernel once per session and launches its PTX on the simulator, over memory that the test lays out itself."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from cute_mla import simulator
from cute_mla.kernels.definition import KernelDefinition
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.arch import Arch
from cute_mla.spec.tensor_map import TensorMap
from tests.mutation.planting import Bug, survivors

FORMATS = {ParamKind.POINTER: "<Q", ParamKind.INT32: "<i", ParamKind.INT64: "<q", ParamKind.FLOAT32: "<f"}


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's PTX with what its source says of it."""

    source: KernelDefinition
    entry: str
    ptx: str

    def survivors(self, bug: Bug, is_noticed: Callable[[CompiledKernel], bool]) -> list[str]:
        """Plant a bug in the PTX; return what was not noticed."""
        return survivors(bug, self.ptx, lambda ptx: is_noticed(CompiledKernel(self.source, self.entry, ptx)))


built_for: ContextVar[Arch] = ContextVar("built_for")  # the architecture that `compiled` compiles for


def compiled(op: str, config_name: str) -> CompiledKernel:
    """Return one variant for the architecture in turn. Skips the test where the compiler is not installed."""
    return _compiled(op, config_name, built_for.get())


@cache
def _compiled(op: str, config_name: str, arch: Arch) -> CompiledKernel:
    pytest.importorskip("cutlass", reason="the CuTe DSL (build extra) is not installed")
    from cute_mla.aot_build.compile import compile_source
    from cute_mla.aot_build.variants import closed_variants

    source = next(v.source() for v in closed_variants(arch, (op,)) if v.config.name == config_name)
    result = compile_source(source, arch)
    return CompiledKernel(source, result.entry, result.ptx)


@cache
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
    for param, arg in zip(kernel.source.params, args, strict=True):
        if isinstance(arg, TensorMap):
            raw.append(arg)
        else:
            raw.append(struct.pack(FORMATS[param.kind], arg.data_ptr() if isinstance(arg, torch.Tensor) else arg))
    shape = simulator.Launch(
        module=module(kernel.ptx),
        entry=kernel.entry,
        grid=grid,
        block=kernel.source.block,
        cluster=kernel.source.cluster,
        smem_bytes=kernel.source.smem_bytes,
        args=raw,
        names=simulator.Names(
            barriers=tuple((barrier.name, barrier.offset, barrier.count) for barrier in kernel.source.barriers),
            named_barriers=tuple((barrier.name, barrier.barrier_id) for barrier in kernel.source.named_barriers),
            roles=tuple((role.name, role.first_warp, role.warps) for role in kernel.source.roles),
        ),
    )
    return simulator.run(shape, memory, policy or simulator.Policy()).findings
