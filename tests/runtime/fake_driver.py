"""A stand-in for cuda.bindings.driver: the real enums and structures, and functions that record instead of act."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from cuda.bindings import driver as real

from cute_mla.runtime import cuda_device, cuda_launches, current, driver, tensor_map
from cute_mla.spec.abi import Param

OK = real.CUresult.CUDA_SUCCESS
STREAM = 77


@dataclass(frozen=True)
class RecordedLaunch:
    """A launch as the driver saw it: configuration decoded from the structure's bytes, arguments copied at the call."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem_bytes: int
    stream: int
    attributes: dict[int, bytes]
    arguments: dict[str, bytes]


@dataclass(frozen=True)
class RecordedMap:
    """One call of cuTensorMapEncodeTiled."""

    data_type: int
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int


@dataclass
class FakeDriver:
    """params: of each kernel by entry name, to read its arguments. fail: function name -> the CUDA error it returns."""

    params: dict[str, tuple[Param, ...]] = field(default_factory=dict)
    version: int = 13020
    capability: tuple[int, int] = (9, 0)
    sm_count: int = 132
    current_device: int | None = 0
    fail: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    launches: list[RecordedLaunch] = field(default_factory=list)
    maps: list[RecordedMap] = field(default_factory=list)
    proc_address: int | None = None

    def __post_init__(self) -> None:
        pointer, word, half = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32
        signature = ctypes.CFUNCTYPE(word, pointer, word, half, pointer, pointer, pointer, pointer, pointer, word, word, word, word)
        self._encode = signature(self._encode_tiled)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and name[2].isupper():
            answer = getattr(self, f"_{name}", None)
            return lambda *args: self._record(name, answer, args)
        return getattr(real, name)

    def CUfunction(self, kernel: str) -> str:
        """Return the handle of a kernel, as launches take it."""
        return kernel

    def called(self, name: str) -> list[tuple[Any, ...]]:
        """Return the arguments of every call of a function."""
        return [args for called, args in self.calls if called == name]

    def _record(self, name: str, answer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, args))
        if name in self.fail:
            return (real.CUresult(self.fail[name]), *[None] * (name not in ("cuLaunchKernelEx", "cuInit", "cuKernelSetAttribute")))
        result = answer(*args) if answer is not None else ()
        return (OK, *result)

    def _cuDriverGetVersion(self) -> tuple[int]:
        return (self.version,)

    def _cuDeviceGetCount(self) -> tuple[int]:
        return (1,)

    def _cuDeviceGetName(self, length: int, device: int) -> tuple[bytes]:
        return (b"Fake Board\0\0\0"[:length],)

    def _cuDeviceGetAttribute(self, attribute: Any, device: int) -> tuple[int]:
        names = real.CUdevice_attribute
        return (
            {
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.capability[0],
                names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.capability[1],
                names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: self.sm_count,
            }[attribute],
        )

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[str]:
        return (f"primary context of {device}",)

    def _cuCtxGetDevice(self) -> tuple[int]:
        return (-1 if self.current_device is None else self.current_device,)

    def _cuCtxPopCurrent(self) -> tuple[str]:
        return ("popped",)

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any]:
        return (real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,)

    def _cuLibraryLoadData(self, *args: Any) -> tuple[str]:
        return (f"library {len(self.called('cuLibraryLoadData'))}",)

    def _cuLibraryGetKernel(self, library: str, name: bytes) -> tuple[str]:
        return (name.decode(),)

    def _cuKernelGetFunction(self, kernel: str) -> tuple[str]:
        return (f"function of {kernel}",)

    def _cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int]:
        address = ctypes.cast(self._encode, ctypes.c_void_p).value or 0
        return (address if self.proc_address is None else self.proc_address, 0)

    def _encode_tiled(self, target: int, data_type: int, rank: int, address: int, dims: int, *rest: Any) -> int:
        strides, box, element_strides, *modes = rest
        self.calls.append(("cuTensorMapEncodeTiled", (target,)))
        if "cuTensorMapEncodeTiled" in self.fail:
            return self.fail["cuTensorMapEncodeTiled"]
        longs, words = ctypes.c_uint64, ctypes.c_uint32
        self.maps.append(
            RecordedMap(
                data_type,
                address,
                tuple((longs * rank).from_address(dims)),
                tuple((longs * (rank - 1)).from_address(strides)),
                tuple((words * rank).from_address(box)),
                tuple((words * rank).from_address(element_strides)),
                *modes,
            )
        )
        fields = zlib.crc32(repr(self.maps[-1]).encode())
        ctypes.memset(target, 0xEE, 128)
        ctypes.memmove(target, struct.pack("<Q", address), 8)
        ctypes.memmove(target + 124, struct.pack("<I", fields), 4)
        return 0

    def _cuLaunchKernelEx(self, config: Any, kernel: str, table: int, extra: int) -> tuple[()]:
        raw = ctypes.string_at(config.getPtr(), 56)
        gx, gy, gz, bx, by, bz, smem, stream, attributes, count = struct.unpack_from("<7I4xQQI", raw)
        decoded = {}
        for i in range(count):
            attribute = ctypes.string_at(attributes + 72 * i, 72)
            decoded[int.from_bytes(attribute[:4], "little")] = attribute[8:20]
        params = self.params[kernel]
        pointers = (ctypes.c_void_p * len(params)).from_address(table)
        arguments = {param.name: ctypes.string_at(pointers[i] or 0, param.size) for i, param in enumerate(params)}
        self.launches.append(RecordedLaunch(kernel, (gx, gy, gz), (bx, by, bz), smem, stream, decoded, arguments))
        return ()


def scalar(value: bytes, kind: str) -> Any:
    """Return one recorded argument as a number: kind is a struct letter."""
    return struct.unpack(f"<{kind}", value)[0]


@contextmanager
def installed(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put a fake in the driver's place; torch's current stream is STREAM."""
    caches = (driver.version, driver._encode_tiled, tensor_map.encode, cuda_device.cuda_device)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(driver, "_bindings", lambda: fake)
    monkeypatch.setattr(current, "_cuda", {})
    monkeypatch.setattr(cuda_launches, "current_stream", lambda index: STREAM)
    yield
    for cache in caches:
        cache.cache_clear()
