"""Tensor specs: shape, strides, dtype and device of an operand, and their checks.

Checks take a TensorSpec rather than the tensor, so that plans can be cached by the specs of a call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_dynamo_compiling

from ..runtime.tensor_memory import missing_memory
from .arguments import short_repr

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "e4m3",
}


class TensorSpec(NamedTuple):
    """Everything about a tensor but its address and contents. Strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def is_stand_in(tensor: Any) -> bool:
    """Return whether an argument is a tracer's stand-in for a tensor, which has a spec and no memory."""
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def record_repr(record: Any) -> str:
    """Return the repr of a dataclass or named tuple, with dtype, shape and device of tensors in place of their contents."""
    names = [field.name for field in fields(record)] if is_dataclass(record) else record._fields
    return f"{type(record).__name__}({', '.join(f'{name}={_short(getattr(record, name))}' for name in names)})"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}>"
    if isinstance(value, tuple) and value:
        return f"<{len(value)} of {type(value[0]).__name__}>"
    return repr(value)


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """Return the spec of an argument. ValueError if it is not a plain strided tensor with memory, or a tracer's stand-in for one."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {short_repr(tensor)}; supported: a torch tensor")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or (not is_dynamo_compiling() and tensor.is_neg()):
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "a lazily negated view"
        raise ValueError(f"{name} is {kind if tensor.layout is torch.strided else tensor.layout}; supported: a strided torch tensor")
    if not is_dynamo_compiling() and not is_stand_in(tensor) and tensor.device.type != "meta":
        missing = missing_memory(tensor)
        if missing is not None:
            raise ValueError(f"{name} has shape {list(tensor.shape)} and {missing}; supported: a tensor with memory for all its elements")
    return TensorSpec(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def operand_spec(name: str, tensor: Any) -> TensorSpec:
    """Return the spec of an argument that a launch uses. ValueError if it is not a plain strided tensor with memory."""
    if is_stand_in(tensor):
        raise ValueError(
            f"{name} is a {type(tensor).__name__} beside tensors with memory; supported: a tensor with memory for all its elements"
        )
    return spec_of(name, tensor)


def optional_spec(name: str, tensor: Any) -> TensorSpec | None:
    """Return the operand_spec of an argument that may be None."""
    return None if tensor is None else operand_spec(name, tensor)


def address_of(name: str, tensor: Any) -> int:
    """Return the address of an argument that a launch uses. ValueError as operand_spec."""
    operand_spec(name, tensor)
    address: int = tensor.data_ptr()
    return address


def check_shape(name: str, spec: TensorSpec, expected: tuple[int | str, ...], where: str = "") -> None:
    """Raise ValueError unless the shape is as expected. A string in `expected` stands for any size and names it.

    where: the kind of call that expects the shape, such as " with kv_offsets", for the message.
    """
    fits = len(spec.shape) == len(expected)
    fits = fits and all(isinstance(size, str) or size == got for size, got in zip(expected, spec.shape, strict=True))
    if not fits:
        raise ValueError(f"{name} has shape {list(spec.shape)}; supported{where}: [{', '.join(str(size) for size in expected)}]")


def check_dtype(name: str, spec: TensorSpec, *supported: torch.dtype) -> None:
    """Raise ValueError unless the dtype is a supported one."""
    if spec.dtype not in supported:
        raise ValueError(f"{name} has dtype {spec.dtype}; supported: {_supported(spec.dtype, supported)}")


def check_dtype_of_columns(name: str, spec: TensorSpec, supported: Collection[str]) -> None:
    """Raise ValueError unless the dtype is one that kernels have for the columns of the tensor, "bf16" or "fp16"."""
    if DTYPE_NAMES.get(spec.dtype) not in supported:
        known = _supported(spec.dtype, [dtype for dtype, short in DTYPE_NAMES.items() if short in supported])
        raise ValueError(f"{name} has dtype {spec.dtype} with {spec.shape[-1]} columns; supported: {known}")


def _supported(given: torch.dtype, supported: Collection[torch.dtype]) -> str:
    """List supported dtypes, and for fp16 the conversion to one of them."""
    listed = ", ".join(map(str, supported))
    return f"{listed}, as .to(torch.bfloat16) gives" if given == torch.float16 and torch.bfloat16 in supported else listed


def check_device(name: str, spec: TensorSpec, device: torch.device, beside: str = "q") -> None:
    """Raise ValueError unless the tensor is on `device`, the device of the argument `beside`."""
    if spec.device != device:
        raise ValueError(f"{name} is on {spec.device}; supported: the device of {beside}, {device}")


def check_last_contiguous(name: str, spec: TensorSpec) -> None:
    """Raise ValueError unless the last dimension is contiguous."""
    if spec.shape[-1] > 1 and spec.stride[-1] != 1:
        raise ValueError(
            f"{name} has stride {spec.stride[-1]} along its last dimension (strides {list(spec.stride)}); "
            "supported: 1, a contiguous last dimension"
        )


def check_contiguous(name: str, spec: TensorSpec) -> None:
    """Raise ValueError unless the tensor is contiguous. An empty tensor always is."""
    if 0 in spec.shape:
        return
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size > 1 and stride != expected:
            raise ValueError(f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}; supported: a contiguous tensor")
        expected *= size


def check_counts(name: str, counts: TensorSpec, shape: tuple[int | str, ...], device: torch.device, beside: str = "q") -> None:
    """Raise ValueError unless lengths or offsets are contiguous int32 of this shape on `device`, the device of `beside`."""
    check_shape(name, counts, shape)
    check_contiguous(name, counts)
    check_dtype(name, counts, torch.int32)
    check_device(name, counts, device, beside)


def check_address(name: str, address: int, alignment: int) -> None:
    """Raise ValueError unless the address is a multiple of `alignment` bytes."""
    if address % alignment:
        raise ValueError(f"{name} starts at address {address:#x}; supported: multiples of {alignment} bytes")


def check_workspace(workspace: Any, nbytes: int, device: torch.device, op: str) -> None:
    """Raise ValueError unless the caller's workspace is contiguous, on `device`, and has at least nbytes bytes."""
    spec = operand_spec("workspace", workspace)
    check_device("workspace", spec, device)
    check_contiguous("workspace", spec)
    if workspace.nbytes < nbytes:
        raise ValueError(f'workspace has {workspace.nbytes} bytes; supported: at least {nbytes}, see workspace_size("{op}", ...)')
