"""The simulated device: launches run the PTX of the same artefacts, on the memory of CPU tensors."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .. import simulator
from ..manifest import KernelEntry
from ..spec.abi import Param, ParamKind
from ..spec.arch import Arch
from ..spec.tensor_map import TensorMap
from .arguments import Argument, Span
from .library import Artifacts, load_artifacts
from .tensor_map import extent_bytes

if TYPE_CHECKING:
    from ..simulator import Finding, Module

# What simulate() calls a schedule -> how the simulator chooses the next warp, and when asynchronous work completes.
_SCHEDULES = {
    "round_robin": ("round_robin", "eager"),
    "lazy": ("round_robin", "lazy"),
    "random": ("random", "random"),
    "adversarial": ("adversarial", "lazy"),
}
_ON_FINDING = ("raise", "collect")
_SCALARS = {ParamKind.INT32: "<i", ParamKind.INT64: "<q", ParamKind.FLOAT32: "<f", ParamKind.POINTER: "<Q"}
_POISON = 0xFF  # bytes of this are NaN in every float type, and -1 as an integer

_modules: dict[str, Module] = {}
_modules_lock = threading.Lock()


class SimulatedDevice:
    """A device of `sm_count` SMs that executes PTX one launch after the other.

    findings: what launches did wrong, in order. instructions: warp instructions executed. seconds: time spent on them.
    launches: kernels run.
    """

    def __init__(self, arch: Arch, sm_count: int, schedule: str, seed: int, on_finding: str) -> None:
        if sm_count < 1:
            raise ValueError(f"sm_count is {sm_count}; supported: 1 or more")
        if schedule not in _SCHEDULES:
            raise ValueError(f"schedule is {schedule!r}; supported: {', '.join(_SCHEDULES)}")
        if on_finding not in _ON_FINDING:
            raise ValueError(f"on_finding is {on_finding!r}; supported: {', '.join(_ON_FINDING)}")
        self.arch = arch
        self.sm_count = sm_count
        self.findings: list[Finding] = []
        self.instructions = 0
        self.seconds = 0.0
        self.launches = 0
        self._schedule = schedule
        self._seed = seed
        self._raise = on_finding == "raise"
        self._artifacts: Artifacts = load_artifacts()

    def kernel(self, op: str, config_name: str) -> KernelEntry:
        """The manifest entry of a variant for this device. ArtifactError if it was not built."""
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
        """Runs a kernel to its end. SimulationError on a finding when on_finding is "raise".

        stream and pdl change nothing: launches run in the order they are made.
        """
        del stream, pdl
        memory = simulator.GlobalMemory()
        for name, start, stop in _regions(kernel.params, args):
            memory.add(name, start, stop - start)
        launch = simulator.Launch(
            module=self._module(kernel),
            entry=kernel.entry,
            grid=grid,
            block=kernel.block,
            cluster=kernel.cluster,
            smem_bytes=kernel.smem_bytes,
            args=[_raw(param, arg) for param, arg in zip(kernel.params, args, strict=True)],
            names=simulator.Names(
                barriers=tuple((barrier.name, barrier.offset, barrier.count) for barrier in kernel.barriers),
                named_barriers=tuple((barrier.name, barrier.barrier_id) for barrier in kernel.named_barriers),
                roles=tuple((role.name, role.first_warp, role.warps) for role in kernel.roles),
            ),
        )
        order, completion = _SCHEDULES[self._schedule]
        report = simulator.run(launch, memory, simulator.Policy(schedule=order, seed=self._seed, async_mode=completion))
        self.launches += 1
        self.instructions += report.instructions
        self.seconds += report.seconds
        self.findings += report.findings
        if report.findings and self._raise:
            text = "\n".join(str(finding) for finding in report.findings)
            raise simulator.SimulationError(
                f"{kernel.name} on grid {grid}, schedule {self._schedule}, seed {self._seed}:\n{text}", tuple(report.findings)
            )

    def undefined(self, *tensors: torch.Tensor) -> None:
        """Overwrites the tensors with NaN, so that what is read before it is written, or never written, shows in the result."""
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            else:
                tensor.fill_(_POISON if tensor.dtype is torch.uint8 else -1)

    def _module(self, kernel: KernelEntry) -> Module:
        with _modules_lock:
            module = _modules.get(kernel.ptx_sha256)
            if module is None:
                module = _modules[kernel.ptx_sha256] = simulator.load_module(self._artifacts.ptx(kernel))
            return module


def _raw(param: Param, arg: Any) -> bytes | TensorMap:
    """An argument as the simulator takes it: its little-endian bytes, or the tensor map as it is."""
    if param.kind is ParamKind.TENSOR_MAP:
        return arg
    return struct.pack(_SCALARS[param.kind], arg.data_ptr() if param.kind is ParamKind.POINTER else arg)


def _regions(params: Sequence[Param], args: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """Name, first address and end of all memory that the arguments refer to, without overlaps: tensors that interleave
    (slices of one storage) become one region."""
    ranges = []
    for param, arg in zip(params, args, strict=True):
        start, stop = _range(param, arg)
        if stop > start:
            ranges.append((start, stop, param.name))
    ranges.sort()
    while ranges:
        start, stop, name = ranges.pop(0)
        while ranges and ranges[0][0] < stop:
            _, other_stop, other_name = ranges.pop(0)
            stop, name = max(stop, other_stop), f"{name}+{other_name}"
        yield name, start, stop


def _range(param: Param, arg: Any) -> tuple[int, int]:
    if param.kind is ParamKind.TENSOR_MAP:
        return arg.address, arg.address + extent_bytes(arg)
    if param.kind is not ParamKind.POINTER:
        return 0, 0
    start = arg.data_ptr()
    if isinstance(arg, Span):
        return start, start + arg.nbytes
    if arg.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(arg.shape, arg.stride(), strict=True))
    return start, start + (last + 1) * arg.element_size()
