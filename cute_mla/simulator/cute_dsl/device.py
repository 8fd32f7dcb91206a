"""The device of CuTe-DSL programs: the operands of the current call, and the launches that its host code makes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..codegen.module import Module
from ..engine.launch import Dim3, Launch
from ..engine.machine import run
from ..engine.policy import Policy
from ..engine.report import Report
from ..findings import Finding, SimulationError
from ..state.memory import GlobalMemory, merged_regions

SHARED_BYTES = 227 << 10  # largest dynamic shared memory of a CTA, on all of these architectures
_SM_COUNTS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 148}
_ON_FINDING = ("raise", "collect")
CODES = ("ptx", "sass")
_BYTE = 8  # bits, also of a Boolean in memory


@dataclass(frozen=True)
class Shape:
    """Launch configuration. dependent: the launch may begin before the grid ahead of it has ended."""

    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    dependent: bool


@dataclass(frozen=True)
class CaughtLaunch:
    """A launch that a program has made. kernel: its entry in the PTX."""

    kernel: str
    shape: Shape
    report: Report


Region = tuple[int, int, str]  # host memory that kernels may touch: first address, end, name


class ProgramDevice:
    """A simulated device that runs the launches of CuTe-DSL programs, one after the other.

    launches: those that were made, in order. gpu_arch: architecture that programs are compiled for. sm_count: streaming multiprocessors
    that host code is told of. code: "ptx" or "sass".
    """

    def __init__(self, gpu_arch: str, policy: Policy, on_finding: str, code: str, sm_count: int | None) -> None:
        for name, given, supported in (("gpu_arch", gpu_arch, _SM_COUNTS), ("on_finding", on_finding, _ON_FINDING), ("code", code, CODES)):
            if given not in supported:
                raise ValueError(f"{name} is {given!r}; supported: {', '.join(supported)}")
        self.gpu_arch = gpu_arch
        self.code = code
        self.sm_count = _SM_COUNTS[gpu_arch] if sm_count is None else sm_count
        self.launches: list[CaughtLaunch] = []
        self._policy = policy
        self._raises = on_finding == "raise"
        self._names: Mapping[int, str] = {}
        self._operands: list[Region] = []
        self._added: list[Region] = []

    @property
    def findings(self) -> list[Finding]:
        """Return the findings of all launches, in order."""
        return [finding for launch in self.launches for finding in launch.report.findings]

    @property
    def instructions(self) -> int:
        """Return the number of warp instructions executed."""
        return sum(launch.report.instructions for launch in self.launches)

    def add(self, name: str, tensor: Any) -> None:
        """Let all later launches touch the memory of a torch tensor. For pointers, which do not say how much memory lies behind them."""
        self._added.append(_region(name, tensor.data_ptr(), tensor.element_size() * _BYTE, tensor.shape, tensor.stride()))

    def begin_call(self, names: Mapping[int, str]) -> None:
        """Forget the operands of the call before. names: parameters of the call by the address of their tensors."""
        self._names = names
        self._operands = []

    def add_operand(self, tensor: Any) -> None:
        """Let the launches of this call touch the memory of a tensor of the DSL."""
        name = self._names.get(tensor.data_ptr, f"operand {len(self._operands)}")
        bits = tensor._dltensor_wrapper.dtype.width  # in memory; element_type may be set to a narrower one
        self._operands.append(_region(name, tensor.data_ptr, _BYTE if bits == 1 else bits, tensor.shape, tensor.stride))

    def launch(self, module: Module, kernel: str, shape: Shape, args: list[bytes]) -> None:
        """Run a kernel to its end. SimulationError on a finding if on_finding is "raise", ValueError for a launch that does not fit."""
        if shape.smem_bytes > SHARED_BYTES:
            raise ValueError(f"{kernel}: {shape.smem_bytes} bytes of dynamic shared memory; supported: at most {SHARED_BYTES}")
        memory = GlobalMemory()
        for name, start, stop in merged_regions([*self._operands, *self._added]):
            memory.add(name, start, stop - start)
        launch = Launch(module, kernel, shape.grid, shape.block, shape.cluster, shape.smem_bytes, list(args), dependent=shape.dependent)
        report = run(launch, memory, self._policy)
        self.launches.append(CaughtLaunch(kernel, shape, report))
        if report.findings and self._raises:
            text = "\n".join(str(finding) for finding in report.findings)
            raise SimulationError(f"{kernel} on grid {shape.grid}:\n{text}", tuple(report.findings))


def _region(name: str, address: int, bits: int, shape: Iterable[int], stride: Iterable[int]) -> Region:
    """Return the memory of a strided tensor with elements of some bits."""
    shape = tuple(shape)
    last = sum((extent - 1) * step for extent, step in zip(shape, stride, strict=True))
    return address, address + (((last + 1) * bits + 7) // 8 if prod(shape) else 0), name
