"""Compiled programs: their code, and stand-ins for the CUDA functions that their host code calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..codegen.module import Module
from ..engine.simulate import load_code
from ..findings import SimulationError
from ..numerics.tensor_map import Swizzle, TensorMap
from ..numerics.tma import encode_native_tensor_map
from .device import SHARED_BYTES, ProgramDevice, Shape

_SUCCESS, _FAILURE, _NO_DEVICE = 0, 999, 100  # cudaError_t
_LIBRARY = 1  # handle; a program has one
_SHARED_BYTES = 97  # cudaDeviceAttr
_STATIC_SHARED_BYTES = 1  # CUfunction_attribute
_COOPERATIVE, _CLUSTER, _DEPENDENT = 2, 4, 6  # cudaLaunchAttributeID
_MAP_BYTES = 128
_MAP_DTYPES = ("u8", "u16", "u32", "i32", "u64", "i64", "fp16", "fp32", "fp64", "bf16")  # by CUtensorMapDataType
_MAP_SWIZZLES = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)  # by CUtensorMapSwizzle
_INITIALISE = "cuda_dialect_init_library_once"  # by TVM-FFI; it must raise an error there or succeed, and later functions fail anyway
_INT, _LONG, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p

_FUNCTIONS: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}  # stand-ins with the types of their parameters


def _stands_for(name: str, *parameters: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function as the stand-in of one of the DSL's runtime. All return a cudaError_t there."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        _FUNCTIONS[name] = function, parameters
        return function

    return enter


class Program:
    """A compiled program.

    code: "ptx" and "sass" with the text and the cubin; none for host code alone. functions: the stand-ins by name, and one that fails for
    every other name of called, as C functions that live as long as the program. kernels: names; the handle of a kernel is its number, from
    1 on.
    """

    def __init__(self, code: dict[str, bytes], called: set[str]) -> None:
        self.kernels: list[str] = []
        self._code = code
        self._modules: dict[str, Module] = {}
        self._device: ProgramDevice | None = None
        self._failures: list[BaseException] = []
        self.functions = {name: self._c_function(name) for name in sorted(called | _FUNCTIONS.keys())}

    @contextmanager
    def on(self, device: ProgramDevice) -> Iterator[None]:
        """Let host code launch on a device. Raises the first error of a function that it has called."""
        self._device = device
        try:
            yield
        finally:
            self._device = None
            failures, self._failures = self._failures, []
            if failures:
                raise failures[0] from None

    def module(self, code: str) -> Module:
        """Return the loaded PTX or machine code."""
        if code not in self._modules:
            self._modules[code] = load_code(self._code[code])
        return self._modules[code]

    def _c_function(self, name: str) -> Any:
        function, parameters = _FUNCTIONS.get(name, (_refusal(name), ()))

        def call(*args: Any) -> int:
            try:
                if self._device is not None and not self._failures:
                    function(self, self._device, *args)
            except BaseException as error:  # C code lies between here and the caller
                self._failures.append(error)
            if name == _INITIALISE:
                return _SUCCESS
            return _NO_DEVICE if self._device is None else _FAILURE if self._failures else _SUCCESS

        return ctypes.CFUNCTYPE(_INT, *parameters)(call)


def _refusal(name: str) -> Callable[..., None]:
    """Return the stand-in of a function that the simulated device has not."""

    def refuse(*_args: Any) -> None:
        raise SimulationError(f"host code calls {name.removeprefix('_')}, which the simulated device has not")

    return refuse


# ---- devices and kernels ------------------------------------------------------------------------------------------------------------


@_stands_for("_cudaGetDevice", _POINTER)  # by TVM-FFI
def _get_device(_program: Program, _device: ProgramDevice, result: int) -> None:
    _INT.from_address(result).value = 0


@_stands_for("_cudaDeviceGetAttribute", _POINTER, _INT, _INT)
def _get_device_attribute(_program: Program, _device: ProgramDevice, result: int, attribute: int, _index: int) -> None:
    if attribute != _SHARED_BYTES:
        raise SimulationError(f"host code asks for device attribute {attribute}; supported: {_SHARED_BYTES}")
    _INT.from_address(result).value = SHARED_BYTES


@_stands_for("_cudaLibraryLoadData", _POINTER, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _INT)
def _load_library(_program: Program, _device: ProgramDevice, library: int, *_options: Any) -> None:
    _POINTER.from_address(library).value = _LIBRARY


@_stands_for(_INITIALISE, *[_POINTER] * 4)
def _initialise(program: Program, _device: ProgramDevice, _state: int, init: int, load_to_device: int, _set_error: int) -> None:
    """Let host code load its kernels. Its state stays empty, so it does not ask a driver to unload them."""
    if not program.kernels:
        library = _POINTER()
        ctypes.CFUNCTYPE(_INT, _POINTER)(init)(ctypes.addressof(library))
        ctypes.CFUNCTYPE(_INT, _POINTER, _INT)(load_to_device)(ctypes.addressof(library), 0)


@_stands_for("_cudaLibraryGetKernel", _POINTER, _POINTER, _POINTER)
def _get_kernel(program: Program, _device: ProgramDevice, result: int, _library: int, name: int) -> None:
    program.kernels.append(ctypes.string_at(name).decode())
    _POINTER.from_address(result).value = len(program.kernels)


@_stands_for("_cuKernelGetAttribute", _POINTER, _INT, _POINTER, _INT)
def _get_kernel_attribute(_program: Program, _device: ProgramDevice, result: int, attribute: int, *_kernel: int) -> None:
    if attribute != _STATIC_SHARED_BYTES:
        raise SimulationError(f"host code asks for kernel attribute {attribute}; supported: {_STATIC_SHARED_BYTES}")
    _INT.from_address(result).value = 0  # taken off the largest dynamic shared memory, which each launch checks by itself


@_stands_for("_cudaKernelSetAttributeForDevice", _POINTER, _INT, _INT, _INT)
@_stands_for("cuda_dialect_assert_success", _INT)  # the original ends the process; here the call raises what has failed
def _nothing(*_args: Any) -> None:
    pass


# ---- tensor maps --------------------------------------------------------------------------------------------------------------------


@_stands_for("_cuTensorMapEncodeTiled", _POINTER, _INT, _INT, *[_POINTER] * 5, *[_INT] * 4)
def _encode_tensor_map(_program: Program, _device: ProgramDevice, result: int, *described: int) -> None:
    dtype, rank, address, dims, strides, box, steps_address, interleave, swizzle, _promotion, _fill = described
    steps = _array(_INT, steps_address, rank)
    if dtype >= len(_MAP_DTYPES) or swizzle >= len(_MAP_SWIZZLES) or interleave or any(step != 1 for step in steps):
        raise SimulationError(
            f"host code encodes a tensor map of data type {dtype}, swizzle {swizzle}, interleave {interleave}, element strides {steps}; "
            f"supported: data types below {len(_MAP_DTYPES)}, swizzles below {len(_MAP_SWIZZLES)}, interleave 0, element strides of 1"
        )
    shape = _array(_LONG, dims, rank), _array(_LONG, strides, rank - 1), _array(_INT, box, rank)
    tensor_map = TensorMap(_MAP_DTYPES[dtype], address, *shape, _MAP_SWIZZLES[swizzle])
    ctypes.memmove(result, encode_native_tensor_map(tensor_map), _MAP_BYTES)


def _array(item: Any, address: int, count: int) -> tuple[int, ...]:
    """Return the integers of a C array."""
    return tuple((item * count).from_address(address)) if count else ()


# ---- launches -----------------------------------------------------------------------------------------------------------------------


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("padding", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    )


@_stands_for("_cudaLaunchKernelEx", _POINTER, _POINTER, _POINTER)
def _launch(program: Program, device: ProgramDevice, config: int, kernel: int, args: int) -> None:
    """Run a kernel. args: address of an array with the address of each argument."""
    given = _Config.from_address(config)
    attributes = {given.attributes[index].id: given.attributes[index].value for index in range(given.count)}
    if _COOPERATIVE in attributes and attributes[_COOPERATIVE][0]:
        raise SimulationError("host code makes a cooperative launch; supported: clusters that do not wait for each other")
    cluster = attributes[_CLUSTER][:3] if _CLUSTER in attributes else (1, 1, 1)
    dependent = _DEPENDENT in attributes and attributes[_DEPENDENT][0] != 0
    shape = Shape(tuple(given.grid), tuple(given.block), tuple(cluster), given.smem_bytes, dependent)
    module, name = program.module(device.code), program.kernels[kernel - 1]
    sizes = [parameter.size for parameter in module.entries[name].params]
    addresses = _array(_POINTER, args, len(sizes))
    device.launch(module, name, shape, [ctypes.string_at(address, size) for address, size in zip(addresses, sizes, strict=True)])
