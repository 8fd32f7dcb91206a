"""The CUDA driver as typed functions. The only module that imports cuda.bindings, and only at its first use; without it, libcuda."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from . import libcuda
from .errors import DeviceError

TENSOR_MAP_BYTES = 128
TENSOR_MAP_ALIGNMENT = 64
_CAPTURE_ERRORS = range(900, 909)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and related errors


@cache
def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return libcuda


def _call(function: str, *args: Any) -> Any:
    """Call a driver function. Return its results without the status: a value, or a tuple of any other number of values."""
    try:
        status, *results = getattr(_bindings(), function)(*args)
    except RuntimeError as error:  # raised by the bindings themselves: no libcuda, or one without the function
        raise DeviceError(f"no usable NVIDIA driver: {function} cannot be called: {error}") from error
    if status != 0:
        _fail(function, int(status))
    return results[0] if len(results) == 1 else tuple(results)


def _fail(function: str, code: int) -> None:
    bindings = _bindings()
    try:
        name = bindings.CUresult(code).name
    except ValueError:
        name = "unknown error"
    raise DeviceError(f"{function} failed: {name} ({code})", name=name, code=code)


def init() -> None:
    """Initialise the driver. A second call does nothing."""
    _call("cuInit", 0)


@cache
def version() -> int:
    """Return the newest CUDA version that the installed driver supports: 13000 for 13.0."""
    return int(_call("cuDriverGetVersion"))


def device_count() -> int:
    """Return the number of devices that this process sees."""
    return int(_call("cuDeviceGetCount"))


def device_name(device: int) -> str:
    """Return the board's name, like "NVIDIA H200"."""
    return bytes(_call("cuDeviceGetName", 96, device)).split(b"\0")[0].decode()


def _device_attribute(attribute: str, device: int) -> int:
    return int(_call("cuDeviceGetAttribute", getattr(_bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{attribute}"), device))


def compute_capability(device: int) -> tuple[int, int]:
    """Return the major and minor compute capability."""
    return _device_attribute("COMPUTE_CAPABILITY_MAJOR", device), _device_attribute("COMPUTE_CAPABILITY_MINOR", device)


def sm_count(device: int) -> int:
    """Return the number of streaming multiprocessors of the device."""
    return _device_attribute("MULTIPROCESSOR_COUNT", device)


def total_memory(device: int) -> int:
    """Return the bytes of the device's memory."""
    return int(_call("cuDeviceTotalMem", device))


def retain_primary_context(device: int) -> Any:
    """Return the device's primary context, which torch uses. Keep it alive for the rest of the process."""
    return _call("cuDevicePrimaryCtxRetain", device)


@contextmanager
def current(context: Any) -> Iterator[None]:
    """Make a context current inside the block."""
    _call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent")


@contextmanager
def loading() -> Iterator[None]:
    """Allow loading kernels while this thread captures a stream. Nothing inside the block may enter the graph.

    DeviceError with a workaround if the driver still refuses.
    """
    bindings = _bindings()
    mode = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = _call("cuThreadExchangeStreamCaptureMode", mode)
    try:
        yield
    except DeviceError as error:
        if error.code not in _CAPTURE_ERRORS:
            raise
        advice = "a kernel cannot be loaded while a stream is captured: make the same call once before the capture"
        raise DeviceError(f"{advice} ({error})", name=error.name, code=error.code) from error
    finally:
        _call("cuThreadExchangeStreamCaptureMode", previous)


def is_current(device: int) -> bool:
    """Return whether the calling thread's current context belongs to the device."""
    status, current = _bindings().cuCtxGetDevice()
    return status == 0 and int(current) == device


def load_library(cubin: bytes) -> Any:
    """Load a cubin for use in every context."""
    return _call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)


def get_kernel(library: Any, entry: str) -> Any:
    """Return the kernel with this entry name."""
    return _call("cuLibraryGetKernel", library, entry.encode())


def set_kernel_limits(kernel: Any, device: int, *, smem_bytes: int, cluster_size: int) -> None:
    """Allow launches of the kernel with this much dynamic shared memory and this many CTAs per cluster."""
    attributes = _bindings().CUfunction_attribute
    _call("cuKernelSetAttribute", attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes, kernel, device)
    if cluster_size > 8:  # the portable limit
        _call("cuKernelSetAttribute", attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel, device)


def load_now(kernel: Any) -> None:
    """Load the kernel's code into the current context now, rather than at the first launch."""
    _call("cuFuncLoad", _call("cuKernelGetFunction", kernel))


@cache
def _encode_tiled() -> Any:
    # Not through cuda.bindings: its CUtensorMap objects are not aligned to the 64 bytes that the driver demands.
    address, _ = _call("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
    if not address:
        raise DeviceError(f"the driver (CUDA {version_text(version())}) has no tensor maps")
    pointer, word, half = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
    signature = ctypes.CFUNCTYPE(word, pointer, word, half, pointer, pointer, pointer, pointer, pointer, word, word, word, word)
    return signature(int(address))


def encode_tensor_map(
    data_type: str,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: str,
) -> bytes:
    """Return the 128 bytes of a tiled tensor map: no interleave, 256-byte L2 promotion, zeros outside the tensor.

    data_type, swizzle: the last part of the driver's names, such as "BFLOAT16" and "128B". strides: bytes, one fewer than dims.
    """
    bindings = _bindings()
    rank = len(dims)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + TENSOR_MAP_ALIGNMENT)
    offset = -ctypes.addressof(memory) % TENSOR_MAP_ALIGNMENT
    status = _encode_tiled()(
        ctypes.addressof(memory) + offset,
        int(getattr(bindings.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{data_type}")),
        rank,
        address,
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        int(bindings.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(bindings.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(bindings.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
        int(bindings.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    if status != 0:
        _fail(f"cuTensorMapEncodeTiled({data_type}, {address:#x}, dims {dims}, strides {strides}, box {box}, {swizzle})", status)
    return memory.raw[offset : offset + TENSOR_MAP_BYTES]


def launch_config(block: tuple[int, int, int], cluster: tuple[int, int, int], smem_bytes: int, *, pdl: bool) -> Any:
    """Return a launch configuration without grid and stream.

    pdl: programmatic dependent launch. The kernel may start before the kernel ahead of it in the stream ends.
    """
    bindings = _bindings()
    config = bindings.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = smem_bytes
    attributes = []
    if cluster != (1, 1, 1):
        attribute = bindings.CUlaunchAttribute()
        attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster
        attributes.append(attribute)
    if pdl:
        attribute = bindings.CUlaunchAttribute()
        attribute.id = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def stream(handle: int) -> Any:
    """Return the driver's object for a raw stream handle (0: the default stream)."""
    return _bindings().CUstream(handle)


def launch(config: Any, kernel: Any, arguments: int) -> None:
    """Launch a kernel with the table of argument pointers at address `arguments`."""
    (status,) = _bindings().cuLaunchKernelEx(config, kernel, arguments, 0)
    if status != 0:
        _fail("cuLaunchKernelEx", int(status))


def starter(device: int, context: Any, launches: Sequence[tuple[Any, Any, int]]) -> Callable[[], None]:
    """Return a function that makes these launches in a device's context: (configuration, kernel, address of the argument pointers).

    The function does the work of `launch` and `is_current`, with as little overhead as possible.
    """
    bindings = _bindings()
    launch_kernel, current_device = bindings.cuLaunchKernelEx, bindings.cuCtxGetDevice
    success = bindings.CUresult.CUDA_SUCCESS
    # The launch function accepts a CUkernel, but converts it to a CUfunction at every call.
    every = [(config, bindings.CUfunction(kernel), arguments, 0) for config, kernel, arguments in launches]

    def start() -> None:
        status, found = current_device()
        # True in a thread that has not used CUDA yet, or whose current device is another one.
        is_elsewhere = status is not success or int(found) != device
        if is_elsewhere:
            _call("cuCtxPushCurrent", context)
        try:
            for each in every:
                (status,) = launch_kernel(*each)
                if status is not success:
                    _fail("cuLaunchKernelEx", int(status))
        finally:
            if is_elsewhere:
                _call("cuCtxPopCurrent")

    return start


def version_text(number: int) -> str:
    """Return a version number as text: "13.2" for 13020."""
    return f"{number // 1000}.{number % 1000 // 10}"
