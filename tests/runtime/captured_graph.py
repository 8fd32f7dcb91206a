"""A stand-in for CUDA's stream capture: records what a call puts on the stream, and replays it on the simulated device.

The calls are those of the CUDA device, on CPU tensors, with a fake in the driver's place that knows the rules of capture.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from cuda.bindings import driver as real
from torch import Tensor

from cute_mla.runtime.arguments import Span
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.simulated_device import SimulatedDevice
from cute_mla.spec.abi import Param, ParamKind
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from tests.runtime.fake_driver import STREAM, FakeDriver, RecordedLaunch, RecordedMap
from tests.support.dispatch_modes import Recorded

MODES = real.CUstreamCaptureMode
RELAXED, GLOBAL = MODES.CU_STREAM_CAPTURE_MODE_RELAXED, MODES.CU_STREAM_CAPTURE_MODE_GLOBAL
UNSUPPORTED = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
INVALIDATED = real.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
PDL = real.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.value

# What a captured call may ask the driver: its launches, and what touches no stream and no memory of the device.
HOST_ONLY = {"cuTensorMapEncodeTiled", "cuCtxGetDevice", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}
# What breaks a capture, but not of a thread whose mode is relaxed.
UNSAFE = {"cuLibraryLoadData", "cuFuncLoad"}
LOADING = UNSAFE | {"cuDriverGetVersion", "cuGetProcAddress", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuKernelGetFunction"}
# Ways of Python's to look into a tensor, each of which waits for the device.
LOOKS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")

_MAP_TYPES = {"BFLOAT16": "bf16", "FLOAT16": "fp16", "FLOAT32": "fp32", "INT32": "i32", "UINT8": "u8"}
_SWIZZLES = {"NONE": Swizzle.NONE, "32B": Swizzle.B32, "64B": Swizzle.B64, "128B": Swizzle.B128}
_FORMATS = {ParamKind.INT32: "<i", ParamKind.INT64: "<q", ParamKind.FLOAT32: "<f"}


@dataclass
class CapturingDriver(FakeDriver):
    """refuses_loading: whether even a relaxed thread may not load kernels while a stream is captured."""

    capturing: bool = False
    refuses_loading: bool = False
    mode: Any = GLOBAL

    def _record(self, name: str, answer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.capturing and name in UNSAFE and (self.refuses_loading or self.mode != RELAXED):
            self.fail["cuLaunchKernelEx"] = int(INVALIDATED)  # from here on, the capture is lost
            return (UNSUPPORTED, None)
        return super()._record(name, answer, args)

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any]:
        previous, self.mode = self.mode, mode
        return (previous,)

    def _encode_tiled(self, target: int, data_type: int, rank: int, address: int, dims: int, *rest: Any) -> int:
        """Write the number of the map behind its address, by which it is found again."""
        status = super()._encode_tiled(target, data_type, rank, address, dims, *rest)
        ctypes.memmove(target + 8, struct.pack("<Q", len(self.maps) - 1), 8)
        return status


@dataclass
class Graph:
    """A captured graph. operations: of torch."""

    maps: Sequence[RecordedMap]
    launches: list[RecordedLaunch] = field(default_factory=list)
    operations: list[str] = field(default_factory=list)

    @property
    def kernels(self) -> list[str]:
        """The op of each launch."""
        return [launch.kernel.split("_sm")[0] for launch in self.launches]

    def replay(self, device: SimulatedDevice, memory: Sequence[Tensor | None]) -> None:
        """Run the launches as they were captured. memory: tensors of any strides, all that arguments point to."""
        kernels = {kernel.entry: kernel for kernel in load_artifacts().manifest.kernels.values()}
        for launch in self.launches:
            kernel = kernels[launch.kernel]
            assert (launch.block, launch.smem_bytes) == (kernel.block, kernel.smem_bytes)
            args = [self._argument(param, launch.arguments[param.name], memory) for param in kernel.params]
            x, y, z = launch.grid
            device.launch(kernel, (x, y, z), args, pdl=PDL in launch.attributes)

    def _argument(self, param: Param, raw: bytes, memory: Sequence[Tensor | None]) -> Any:
        if param.kind is ParamKind.TENSOR_MAP:
            return tensor_map(self.maps[struct.unpack_from("<Q", raw, 8)[0]])
        if param.kind is not ParamKind.POINTER:
            return struct.unpack(_FORMATS[param.kind], raw)[0]
        (address,) = struct.unpack("<Q", raw)
        if address == 0:
            return None
        for tensor in memory:
            if tensor is not None and tensor.data_ptr() <= address < tensor.data_ptr() + extent_bytes(tensor):
                offset = address - tensor.data_ptr()
                return Span(tensor, offset, extent_bytes(tensor) - offset)
        raise AssertionError(f"{param.name} points to memory that is not the graph's: {address:#x}")


def extent_bytes(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one."""
    if tensor.numel() == 0:
        return 0
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def tensor_map(recorded: RecordedMap) -> TensorMap:
    """Return a tensor map from what the driver was asked to encode."""
    names = real.CUtensorMapDataType(recorded.data_type).name, real.CUtensorMapSwizzle(recorded.swizzle).name
    return TensorMap(
        dtype=_MAP_TYPES[names[0].removeprefix("CU_TENSOR_MAP_DATA_TYPE_")],
        address=recorded.address,
        dims=recorded.dims,
        strides=recorded.strides,
        box=recorded.box,
        swizzle=_SWIZZLES[names[1].removeprefix("CU_TENSOR_MAP_SWIZZLE_")],
    )


@contextmanager
def captured(driver: CapturingDriver, *, loading: bool = False) -> Iterator[Graph]:
    """Capture the block's calls.

    AssertionError if the calls do more than launch kernels on the current stream and, with loading, load the kernels first.
    """

    def look(*args: Any) -> None:
        raise AssertionError("the host looks into a tensor")

    graph = Graph(driver.maps)
    first_call, first_launch = len(driver.calls), len(driver.launches)
    driver.capturing = True
    try:
        with pytest.MonkeyPatch.context() as patch, Recorded() as operations:
            for name in LOOKS:
                patch.setattr(Tensor, name, look)
            yield graph
    finally:
        driver.capturing = False
        graph.launches += driver.launches[first_launch:]
        graph.operations += operations.names
    made = {name for name, _ in driver.calls[first_call:]}
    assert made <= HOST_ONLY | {"cuLaunchKernelEx"} | (LOADING if loading else set()), (
        "a captured call asked the driver for more than launches"
    )
    assert {launch.stream for launch in graph.launches} == {STREAM}
    assert driver.mode is GLOBAL, "the thread's mode was not restored"
