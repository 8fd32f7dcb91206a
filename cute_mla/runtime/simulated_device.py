"""Simulated device: runs the PTX, or the machine code, of the same artefacts on the memory of CPU tensors."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from .. import simulator
from ..manifest import KernelEntry
from ..spec.abi import Param, ParamKind
from ..spec.arch import Arch
from . import recording
from .arguments import Argument, Span, address_of
from .artifacts import Artifacts, load_artifacts
from .block_tables import findings_of
from .call_cache import CallCache
from .device import SingleLaunches
from .errors import ArtifactError
from .fork_lock import ForkLock
from .launch import CallSteps
from .tensor_map import extent_bytes
from .tensor_memory import missing_memory, span_bytes
from .uninitialized import UninitializedMemory

if TYPE_CHECKING:
    from ..simulator import Finding, Module
    from ..simulator.engine.counts import Counts
    from ..simulator.sass.trace import MachineTrace
    from ..spec.tensor_map import TensorMap

_ON_FINDING = ("raise", "collect")
_CODES = ("ptx", "sass")
_SCALARS = {ParamKind.INT32: "<i", ParamKind.INT64: "<q", ParamKind.FLOAT32: "<f", ParamKind.POINTER: "<Q"}

_FIRST_ADDRESS = 1 << 16  # no system maps memory below it

MAX_CACHED_MODULES = 8  # parsed kernels, some 10 MB each

_modules: dict[str, Module] = {}  # in the order of use
_modules_lock = ForkLock()


class SimulatedDevice:
    """A device of `sm_count` SMs that executes PTX, or the machine code of the cubins, one launch after the other.

    findings: errors of the launches, in order. instructions: warp instructions executed. seconds: time spent on them.
    launches: kernels run. counts: warp instructions by kernel, role and class, once count_by_role() has been called.
    """

    def __init__(
        self,
        arch: Arch,
        sm_count: int,
        schedule: str,
        seed: int,
        on_finding: str,
        code: str = "ptx",
        ignored: Collection[str] = (),
    ) -> None:
        numbers: tuple[tuple[str, Any], ...] = (("sm_count", sm_count), ("seed", seed))
        for name, number in numbers:
            if number is True or number is False or not isinstance(number, Integral):
                raise ValueError(f"{name} is {number!r}; supported: an integer")
        if sm_count < 1:
            raise ValueError(f"sm_count is {sm_count}; supported: 1 or more")
        if not isinstance(on_finding, str) or on_finding not in _ON_FINDING:
            raise ValueError(f"on_finding is {on_finding!r}; supported: {', '.join(_ON_FINDING)}")
        if not isinstance(code, str) or code not in _CODES:
            raise ValueError(f"code is {code!r}; supported: {', '.join(_CODES)}")
        if isinstance(ignored, str) or not all(isinstance(kind, str) for kind in ignored):
            raise ValueError(f"ignored is {ignored!r}; supported: a collection of kinds of findings, such as ('poison',)")
        self.arch = arch
        self.sm_count = sm_count
        self.code = code
        self.findings: list[Finding] = []
        self.instructions = 0
        self.seconds = 0.0
        self.launches = 0
        self.counts: dict[str, Counts] | None = None
        self._attach: Callable[[KernelEntry, MachineTrace], None] | None = None
        self.call_cache = CallCache(exact=True)
        self._policy = replace(simulator.Policy.named(schedule, seed), ignored=frozenset(ignored))
        self._order = f"schedule {schedule}, seed {seed}"
        self._raise = on_finding == "raise"
        self._uninitialized = UninitializedMemory()
        self._artifacts: Artifacts = load_artifacts()

    def __repr__(self) -> str:
        ran = f"{self.launches} launches, {self.instructions} instructions, {len(self.findings)} findings"
        return f"SimulatedDevice({self.arch.name}, {self.sm_count} SMs, {self._order}: {ran})"

    def kernel(self, op: str, config_name: str) -> KernelEntry:
        """Return the manifest entry of a variant for this device. ArtifactError if it was not built."""
        return self._artifacts.entry(op, self.arch.name, config_name)

    def launch(
        self,
        kernel: KernelEntry,
        grid: tuple[int, int, int],
        args: Sequence[Argument],
        *,
        stream: int | None = None,
        pdl: bool = False,
    ) -> None:
        """Run a kernel to its end. SimulationError on a finding when on_finding is "raise".

        stream has no effect: launches run in the order of the calls. pdl: the kernel must wait for the kernel ahead of it before it touches
        global memory.
        """
        del stream
        if recording.active:
            recording.add(kernel, args)
        missing = list(_missing_memory(kernel.params, args))
        if missing:  # a GPU would fault, and so would this process
            self._report(kernel, grid, missing)
            return
        memory = simulator.GlobalMemory()
        regions = list(_regions(kernel.params, args))
        for name, start, stop in regions:
            self._uninitialized.register(memory, name, start, stop)
        launch = self._simulator_launch(kernel, grid, args, pdl)
        misuse = findings_of(kernel, args)
        report = simulator.run(launch, memory, self._policy, self._trace(kernel, launch))
        for _, start, stop in regions:
            self._uninitialized.update(memory, start, stop)
        self.launches += 1
        self.instructions += report.instructions
        self.seconds += report.seconds
        if self.counts is not None:
            self._add_counts(kernel.name, report.executed.by_role())
        self._report(kernel, grid, [*misuse, *report.findings])

    def prepare(self, call: CallSteps) -> SingleLaunches:
        """Return the launches of a call. There is nothing to prepare."""
        return SingleLaunches(self, call)

    def count_by_role(self) -> None:
        """Count the warp instructions of all later launches, by kernel, role and class."""
        self.counts = {}

    def trace_machine_code(self, attach: Callable[[KernelEntry, MachineTrace], None]) -> None:
        """Record the instructions of one cluster of all later launches, by default the first. ValueError unless the code is "sass".

        attach: called with the kernel and the empty trace of each launch, before it runs.
        """
        if self.code != "sass":
            raise ValueError(f'the device runs {self.code!r}; machine code is traced inside simulate(.., code="sass")')
        self._attach = attach
        self._policy = replace(self._policy, waits_block=True)

    def _trace(self, kernel: KernelEntry, launch: simulator.Launch) -> MachineTrace | None:
        """Return the observer of a launch: its trace, or None."""
        if self._attach is None:
            return None
        from ..simulator.sass.trace import MachineTrace

        trace = MachineTrace(launch.target.flow.blocks)
        self._attach(kernel, trace)
        return trace

    def _report(self, kernel: KernelEntry, grid: tuple[int, int, int], findings: Sequence[Finding]) -> None:
        """Collect the findings of a launch. SimulationError if there are any and on_finding is "raise"."""
        self.findings += findings
        if findings and self._raise:
            text = "\n".join(str(finding) for finding in findings)
            raise simulator.SimulationError(f"{kernel.name} on grid {grid}, {self._order}:\n{text}", tuple(findings))

    def _add_counts(self, kernel: str, counts: Counts) -> None:
        assert self.counts is not None
        roles = self.counts.setdefault(kernel, {})
        for role, classes in counts.items():
            roles.setdefault(role, Counter()).update(classes)

    def mark_uninitialized(self, *tensors: torch.Tensor) -> None:
        """Mark the contents of the tensors as uninitialized. Using them before a kernel writes them is a finding."""
        for tensor in tensors:
            self._uninitialized.declare(tensor)

    def _simulator_launch(self, kernel: KernelEntry, grid: tuple[int, int, int], args: Sequence[Argument], pdl: bool) -> simulator.Launch:
        names = simulator.Names(
            barriers=tuple((barrier.name, barrier.offset, barrier.count) for barrier in kernel.barriers),
            named_barriers=tuple((barrier.name, barrier.barrier_id) for barrier in kernel.named_barriers),
            roles=tuple((role.name, role.first_warp, role.warps) for role in kernel.roles),
        )
        try:
            return simulator.Launch(
                module=self._module(kernel),
                entry=kernel.entry,
                grid=grid,
                block=kernel.block,
                cluster=kernel.cluster,
                smem_bytes=kernel.smem_bytes,
                args=[_raw(param, arg) for param, arg in zip(kernel.params, args, strict=True)],
                names=names,
                dependent=pdl,
            )
        except ValueError as error:  # the PTX differs from its manifest entry
            raise ArtifactError(f"{kernel.name} cannot be launched on grid {grid}: {error}") from error

    def _module(self, kernel: KernelEntry) -> Module:
        key = kernel.ptx_sha256 if self.code == "ptx" else kernel.cubin_sha256 + " traced" * (self._attach is not None)
        with _modules_lock:
            module = _modules.pop(key, None) or self._load(kernel)
            _modules[key] = module
            if len(_modules) > MAX_CACHED_MODULES:
                del _modules[next(iter(_modules))]
            return module

    def _load(self, kernel: KernelEntry) -> Module:
        if self.code == "ptx":
            return simulator.load_module(self._artifacts.ptx(kernel))
        from ..simulator.sass.module import load_machine_code
        from ..simulator.sass.text_cache import disassembly

        cubin = self._artifacts.cubin(kernel)
        return load_machine_code(cubin, disassembly(cubin), is_traced=self._attach is not None)


def _missing_memory(params: Sequence[Param], args: Sequence[Any]) -> Iterator[Finding]:
    """Yield a finding for each tensor or tensor map that has elements and no memory for them."""
    for param, arg in zip(params, args, strict=True):
        start, stop = _range(param, arg)
        if start < stop and start < _FIRST_ADDRESS:
            yield simulator.Finding("null_address", f"{param.name} is {stop - start} bytes at address {start:#x}, which has no memory")
        elif start < stop and isinstance(arg, torch.Tensor):
            missing = missing_memory(arg)
            if missing is not None:
                yield simulator.Finding("out_of_bounds", f"{param.name} has {missing}")


def _raw(param: Param, arg: Any) -> bytes | simulator.TensorMap:
    """Return an argument as the simulator takes it: little-endian bytes, or its own description of a tensor map."""
    if param.kind is ParamKind.TENSOR_MAP:
        return simulated_map(arg)
    return struct.pack(_SCALARS[param.kind], address_of(arg) if param.kind is ParamKind.POINTER else arg)


def simulated_map(tensor_map: TensorMap) -> simulator.TensorMap:
    """Return the simulator's own description of a tensor map."""
    where = (tensor_map.dtype, tensor_map.address, tensor_map.dims, tensor_map.strides, tensor_map.box)
    return simulator.TensorMap(*where, simulator.Swizzle(tensor_map.swizzle))


def _regions(params: Sequence[Param], args: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """Yield name, first address and end of each memory region that the arguments refer to, without overlaps."""
    ranges = ((*_range(param, arg), param.name) for param, arg in zip(params, args, strict=True))
    return simulator.merged_regions(region for region in ranges if region[1] > region[0])


def _range(param: Param, arg: Any) -> tuple[int, int]:
    if param.kind is ParamKind.TENSOR_MAP:
        return arg.address, arg.address + extent_bytes(arg)
    if param.kind is not ParamKind.POINTER or arg is None:
        return 0, 0
    start = arg.data_ptr()
    return start, start + (arg.nbytes if isinstance(arg, Span) else span_bytes(arg))
