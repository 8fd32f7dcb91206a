"""Programs that are compiled with --enable-tvm-ffi: their calls pass by the DSL, and take tensors of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tvm_ffi
from cutlass.cute.runtime import _Tensor
from cutlass.cutlass_dsl.tvm_ffi_provider import (
    TVMFFIJitCompiledFunction,
    TVMFFIJitCompiledFunctionBase,
    TVMFFIJitCompiledFunctionWithKwargs,
)

from .device import ProgramDevice
from .memory import DeviceView


def patches(device: ProgramDevice, begin_call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield each class, the name of its attribute, and the replacement. begin_call: returns the program of a function that is called."""
    yield TVMFFIJitCompiledFunctionBase, "_create_tvm_ffi_function", _function_of_engine
    for owner in (TVMFFIJitCompiledFunction, TVMFFIJitCompiledFunctionWithKwargs):
        yield owner, "__call__", _call(device, begin_call, owner.__call__)


def _function_of_engine(function: Any) -> Any:
    """Return the function of the engine that the stand-ins are linked with; the DSL would link an object file instead."""
    if function.engine is None:
        return None
    address = function.engine.raw_lookup(f"__tvm_ffi_{function.function_name}")
    return tvm_ffi.Function.__from_mlir_packed_safe_call__(address, keep_alive_object=function.engine)


def _call(device: ProgramDevice, begin_call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        with begin_call(function, args, kwargs).on(device):
            return original(function, *_in_device_memory(args, device), **_in_device_memory(kwargs, device))

    return call


def _in_device_memory(value: Any, device: ProgramDevice) -> Any:
    """Return an argument with every tensor in device memory, and add the tensors to the operands of the call."""
    if isinstance(value, tuple | list):
        items = [_in_device_memory(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _in_device_memory(item, device) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _in_device_memory(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if not hasattr(value, "__dlpack__"):
        if type(value) is _Tensor:
            device.add_operand(value)
        return value
    device.add_operand(_Tensor(value))
    return tvm_ffi.from_dlpack(DeviceView(value))
