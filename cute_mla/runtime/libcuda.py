"""The part of cuda.bindings.driver that driver.py uses, over libcuda by ctypes, for machines without cuda-python.

A function has the name, the arguments and the results of its namesake: the status, then the values. Handles are integers. Values of
enumerations and layouts of structures are those of cuda.h.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any

_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
# Functions whose symbol is not their name: later versions of an ABI.
_SYMBOLS = {name: f"{name}_v2" for name in ("cuCtxPushCurrent", "cuCtxPopCurrent", "cuDeviceTotalMem", "cuGetProcAddress")}

CUfunction = int
CUstream = int


class CUresult(int):
    """Status of a call. ValueError if the driver does not know it."""

    CUDA_SUCCESS: CUresult
    name: str

    def __new__(cls, code: int) -> CUresult:
        """Return the status with the driver's name for it."""
        status = super().__new__(cls, code)
        text = ctypes.c_char_p()
        if code == 0:
            status.name = "CUDA_SUCCESS"
        elif _function("cuGetErrorName")(code, ctypes.byref(text)) != 0 or text.value is None:
            raise ValueError(f"{code} is no status of the driver")
        else:
            status.name = text.value.decode()
        return status


CUresult.CUDA_SUCCESS = CUresult(0)


class CUdevice_attribute(IntEnum):
    """Attributes of a device."""

    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class CUfunction_attribute(IntEnum):
    """Attributes of a kernel."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14


class CUstreamCaptureMode(IntEnum):
    """Modes of stream capture."""

    CU_STREAM_CAPTURE_MODE_RELAXED = 2


class CUlaunchAttributeID(IntEnum):
    """Attributes of a launch."""

    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
    CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class CUtensorMapDataType(IntEnum):
    """Types of the elements of a tensor map."""

    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0
    CU_TENSOR_MAP_DATA_TYPE_INT32 = 3
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6
    CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9


class CUtensorMapInterleave(IntEnum):
    """Interleaved layouts of a tensor map."""

    CU_TENSOR_MAP_INTERLEAVE_NONE = 0


class CUtensorMapSwizzle(IntEnum):
    """Swizzles of a tensor map."""

    CU_TENSOR_MAP_SWIZZLE_NONE = 0
    CU_TENSOR_MAP_SWIZZLE_32B = 1
    CU_TENSOR_MAP_SWIZZLE_64B = 2
    CU_TENSOR_MAP_SWIZZLE_128B = 3


class CUtensorMapL2promotion(IntEnum):
    """Promotions to larger accesses of the L2 cache."""

    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3


class CUtensorMapFloatOOBfill(IntEnum):
    """Values outside a tensor."""

    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE = 0


class _Dim(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class _AttributeValue(ctypes.Union):
    _fields_ = (("bytes", ctypes.c_char * 64), ("clusterDim", _Dim), ("programmaticStreamSerializationAllowed", ctypes.c_int))


class CUlaunchAttribute(ctypes.Structure):
    """Attribute of a launch."""

    _fields_ = (("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", _AttributeValue))


class CUlaunchConfig(ctypes.Structure):
    """Configuration of a launch. attrs: a list of CUlaunchAttribute; it is copied."""

    _fields_ = (
        *((f"{kind}Dim{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", ctypes.c_uint),
        ("hStream", ctypes.c_void_p),
        ("_attrs", ctypes.POINTER(CUlaunchAttribute)),
        ("numAttrs", ctypes.c_uint),
    )

    @property
    def attrs(self) -> list[CUlaunchAttribute]:
        """Return the attributes."""
        return list(self._copied)

    @attrs.setter
    def attrs(self, attributes: list[CUlaunchAttribute]) -> None:
        self._copied = (CUlaunchAttribute * len(attributes))(*attributes)
        self._attrs = self._copied


@cache
def _function(name: str) -> Any:
    """Return a function of the library. RuntimeError without the library, or if it lacks the function, as from cuda.bindings."""
    try:
        return getattr(ctypes.CDLL(_LIBRARY), _SYMBOLS.get(name, name))
    except (OSError, AttributeError) as error:
        raise RuntimeError(str(error)) from error


def _status(code: int) -> int:
    """Return the status; a success is always the same object."""
    return CUresult.CUDA_SUCCESS if code == 0 else code


def _plain(name: str, *types: Any) -> Callable[..., tuple[int]]:
    """Return a function whose results are its status alone. types: of its arguments."""

    def call(*arguments: Any) -> tuple[int]:
        return (_status(_function(name)(*(kind(argument) for kind, argument in zip(types, arguments, strict=True)))),)

    return call


def _returning(name: str, result: Any, *types: Any) -> Callable[..., tuple[int, int]]:
    """Return a function that passes a pointer to a result, an integer, in front of its arguments."""

    def call(*arguments: Any) -> tuple[int, int]:
        found = result()
        given = (kind(argument) for kind, argument in zip(types, arguments, strict=True))
        status = _status(_function(name)(ctypes.byref(found), *given))
        return status, found.value or 0

    return call


cuInit = _plain("cuInit", ctypes.c_uint)
cuDriverGetVersion = _returning("cuDriverGetVersion", ctypes.c_int)
cuDeviceGetCount = _returning("cuDeviceGetCount", ctypes.c_int)
cuDeviceGetAttribute = _returning("cuDeviceGetAttribute", ctypes.c_int, ctypes.c_int, ctypes.c_int)
cuDeviceTotalMem = _returning("cuDeviceTotalMem", ctypes.c_size_t, ctypes.c_int)
cuDevicePrimaryCtxRetain = _returning("cuDevicePrimaryCtxRetain", ctypes.c_void_p, ctypes.c_int)
cuCtxPushCurrent = _plain("cuCtxPushCurrent", ctypes.c_void_p)
cuCtxPopCurrent = _returning("cuCtxPopCurrent", ctypes.c_void_p)
cuCtxGetDevice = _returning("cuCtxGetDevice", ctypes.c_int)
cuLibraryGetKernel = _returning("cuLibraryGetKernel", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
cuKernelGetFunction = _returning("cuKernelGetFunction", ctypes.c_void_p, ctypes.c_void_p)
cuFuncLoad = _plain("cuFuncLoad", ctypes.c_void_p)
cuKernelSetAttribute = _plain("cuKernelSetAttribute", ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def cuDeviceGetName(length: int, device: int) -> tuple[int, bytes]:
    """Return a board's name, up to `length` bytes."""
    name = ctypes.create_string_buffer(length)
    return _status(_function("cuDeviceGetName")(name, ctypes.c_int(length), ctypes.c_int(device))), name.raw


def cuThreadExchangeStreamCaptureMode(mode: int) -> tuple[int, int]:
    """Set the calling thread's mode of stream capture, and return the one before."""
    value = ctypes.c_int(mode)
    return _status(_function("cuThreadExchangeStreamCaptureMode")(ctypes.byref(value))), value.value


def cuLibraryLoadData(code: bytes, *options: Sequence[Any] | int) -> tuple[int, int]:
    """Load a cubin. options: none are passed on."""
    library, null = ctypes.c_void_p(), ctypes.c_void_p()
    none = (null, null, ctypes.c_uint(), null, null, ctypes.c_uint())
    return _status(_function("cuLibraryLoadData")(ctypes.byref(library), ctypes.c_char_p(code), *none)), library.value or 0


def cuGetProcAddress(symbol: bytes, version: int, flags: int) -> tuple[int, int, int]:
    """Return the address of a function, 0 if there is none, and how the search ended."""
    address, outcome = ctypes.c_void_p(), ctypes.c_int()
    given = (ctypes.c_char_p(symbol), ctypes.byref(address), ctypes.c_int(version), ctypes.c_uint64(flags), ctypes.byref(outcome))
    return _status(_function("cuGetProcAddress")(*given)), address.value or 0, outcome.value


def cuLaunchKernelEx(config: CUlaunchConfig, kernel: int, arguments: int, extra: int) -> tuple[int]:
    """Launch a kernel with the table of argument pointers at this address."""
    given = (ctypes.c_void_p(kernel), ctypes.c_void_p(arguments), ctypes.c_void_p(extra))
    return (_status(_function("cuLaunchKernelEx")(ctypes.byref(config), *given)),)
