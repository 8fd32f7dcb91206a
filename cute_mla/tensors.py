"""Tensors as operands: their dtype names, and the checks that every public function makes of what it is given.

Checks look at a TensorSpec, not at the tensor, so that a call whose specs were checked before need not check them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from .spec.dense_decode import MAX_ROW_ALIGNMENT
from .spec.mla import D_V

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "e4m3",
}

TMA_ALIGNMENT = 16  # bytes: of a base address and of every stride that a tensor map holds
_MAX_MAP_STRIDE = 1 << 40  # bytes, exclusive: what a tensor map can hold
WORKSPACE_ALIGNMENT = 16  # bytes: kernels store whole vectors there
_OVERLAP_WORK = 10_000  # steps of numpy's search for an address that two tensors share: milliseconds
_MOST_SHOWN = 200  # characters of an argument in a message


class TensorSpec(NamedTuple):
    """All of a tensor but its address. Strides in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def spec_of(name: str, tensor: Any) -> TensorSpec:
    """The spec of an argument. ValueError if it is not a tensor, or one whose elements do not lie in memory as they are read."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {shown(tensor)}; supported: a torch tensor")
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or (not is_dynamo_compiling() and tensor.is_neg()):
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "a lazily negated view"
        raise ValueError(f"{name} is {kind if tensor.layout is torch.strided else tensor.layout}; supported: a strided torch tensor")
    return TensorSpec(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def optional_spec(name: str, tensor: Any) -> TensorSpec | None:
    """The spec of an argument that may be None. ValueError if it is neither that nor a tensor."""
    return None if tensor is None else spec_of(name, tensor)


def address_of(name: str, tensor: Any) -> int:
    """The address of an argument. ValueError if it is not a tensor."""
    spec_of(name, tensor)
    address: int = tensor.data_ptr()
    return address


def check_shape(name: str, spec: TensorSpec, expected: tuple[int | str, ...], where: str = "") -> None:
    """ValueError unless the shape is as expected, where a string stands for any size and names it.

    where: the kind of call that expects it, such as " with kv_offsets", for the message.
    """
    fits = len(spec.shape) == len(expected)
    fits = fits and all(isinstance(size, str) or size == got for size, got in zip(expected, spec.shape, strict=True))
    if not fits:
        raise ValueError(f"{name} has shape {list(spec.shape)}; supported{where}: [{', '.join(str(size) for size in expected)}]")


def check_dtype(name: str, spec: TensorSpec, *supported: torch.dtype) -> None:
    """ValueError unless the dtype is one of those supported."""
    if spec.dtype not in supported:
        raise ValueError(f"{name} has dtype {spec.dtype}; supported: {', '.join(str(dtype) for dtype in supported)}")


def check_device(name: str, spec: TensorSpec, device: torch.device, beside: str = "q") -> None:
    """ValueError unless the tensor is where the others are. beside: one of them."""
    if spec.device != device:
        raise ValueError(f"{name} is on {spec.device}; supported: the device of {beside}, {device}")


def check_last_contiguous(name: str, spec: TensorSpec) -> None:
    """ValueError unless neighbours along the last dimension are neighbours in memory."""
    if spec.shape[-1] > 1 and spec.stride[-1] != 1:
        raise ValueError(
            f"{name} has stride {spec.stride[-1]} along its last dimension (strides {list(spec.stride)}); "
            "supported: 1, a contiguous last dimension"
        )


def check_contiguous(name: str, spec: TensorSpec) -> None:
    """ValueError unless the tensor is contiguous, as one without elements always is."""
    if 0 in spec.shape:
        return
    expected = 1
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size > 1 and stride != expected:
            raise ValueError(f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}; supported: a contiguous tensor")
        expected *= size


def check_writable(name: str, spec: TensorSpec) -> None:
    """ValueError if several elements share one address, as in an expanded tensor. Dimensions that interleave count as such."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(spec.shape, spec.stride, strict=True) if size > 1):
        if stride <= reach and 0 not in spec.shape:
            raise ValueError(f"{name} has strides {list(spec.stride)}, so elements share memory; supported: an output of distinct elements")
        reach += (size - 1) * stride


def check_apart(written: Mapping[str, torch.Tensor | None], read: Mapping[str, torch.Tensor | None]) -> None:
    """ValueError if a tensor that is written shares memory with one that is read, or with another that is written."""
    outputs = [(name, tensor, *_extent(tensor)) for name, tensor in written.items() if tensor is not None]
    if not outputs:
        return
    inputs = [(name, tensor, *_extent(tensor)) for name, tensor in read.items() if tensor is not None]
    for i, (name, tensor, start, end) in enumerate(outputs):
        for other_name, other, other_start, other_end in (*outputs[i + 1 :], *inputs):
            if start < other_end and other_start < end and _share_memory(tensor, other):
                raise ValueError(f"{name} shares memory with {other_name}; supported: results and workspace with memory of their own")


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of a tensor, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    return start, start + (sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.itemsize


def _share_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common, such as slices of one tensor may have or not. False where that is too hard to tell."""
    try:
        return np.shares_memory(_as_array(tensor), _as_array(other), max_work=_OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return False


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """An array over a tensor's memory, which is not touched."""

    class Memory:
        __array_interface__ = {  # noqa: RUF012
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": f"|V{tensor.itemsize}",
            "version": 3,
        }

    return np.asarray(Memory())


def check_counts(name: str, counts: TensorSpec, shape: tuple[int | str, ...], q: TensorSpec) -> None:
    """ValueError unless lengths or offsets are contiguous int32 of this shape, beside q."""
    check_shape(name, counts, shape)
    check_contiguous(name, counts)
    check_dtype(name, counts, torch.int32)
    check_device(name, counts, q.device)


def check_address(name: str, address: int, alignment: int) -> None:
    """ValueError unless the address is a multiple of the alignment."""
    if address % alignment:
        raise ValueError(f"{name} starts at address {address:#x}; supported: multiples of {alignment} bytes")


def map_strides(name: str, spec: TensorSpec, *dimensions: int) -> tuple[int, ...]:
    """Bytes between neighbours along these dimensions, as a tensor map has them. ValueError if it cannot have them."""
    strides = []
    for dim in dimensions:
        stride = map_stride(spec, dim)
        if not is_map_stride(stride):
            raise ValueError(
                f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}, {stride} bytes along dimension {dim}; "
                f"supported: positive multiples of {TMA_ALIGNMENT} bytes below {_MAX_MAP_STRIDE}"
            )
        strides.append(stride)
    return tuple(strides)


def map_stride(spec: TensorSpec, dimension: int) -> int:
    """Bytes between neighbours along a dimension. That of a dimension of size 1 is arbitrary in torch and never used: replaced by
    the bytes of a row, which a tensor map can hold."""
    elements = spec.stride[dimension] if spec.shape[dimension] > 1 else spec.shape[-1]
    return elements * spec.dtype.itemsize


def is_map_stride(stride: int) -> bool:
    """Whether a tensor map can hold a stride of so many bytes."""
    return stride % TMA_ALIGNMENT == 0 and 0 < stride < _MAX_MAP_STRIDE


def is_integer(value: Any) -> bool:
    """Whether an argument is an integer, numpy's too; True and False are none."""
    return isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """Whether an argument is True or False, numpy's too."""
    return isinstance(value, bool | np.bool_)


def is_number(value: Any) -> bool:
    """Whether an argument is a real number that a float can hold; True and False are none."""
    if value is True or value is False or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def shown(value: Any) -> str:
    """An argument that is not what it should be, short enough for a message."""
    text = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) and not value.is_nested else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """The integer that an argument is. ValueError if it is none, or out of range."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        bound = "or more" if most is None else f"to {most}"
        raise ValueError(f"{name} is {shown(value)}; supported: an integer, {least} {bound}")
    return value if isinstance(value, torch.SymInt) else int(value)  # type: ignore[return-value]


def check_flag(name: str, value: Any) -> None:
    """ValueError unless an argument is True or False."""
    if not is_flag(value):
        raise ValueError(f"{name} is {shown(value)}; supported: True and False")


def check_columns(name: str, d_v: Any) -> None:
    """ValueError unless it is the number of columns of v."""
    if not is_integer(d_v) or d_v != D_V:
        raise ValueError(f"{name} is {shown(d_v)}; supported: {D_V}")


def check_scale(name: str, scale: Any) -> None:
    """ValueError unless the scale of the softmax is a positive number that fp32 holds, multiplied by log2(e) too."""
    fp32 = torch.finfo(torch.float32)
    if not is_number(scale) or not fp32.tiny <= float(scale) <= fp32.max / 2:
        raise ValueError(f"{name} is {shown(scale)}; supported: a positive finite number of fp32")


def check_empty_lse(empty_lse: Any) -> None:
    """ValueError unless it is what the lse of a row that attends to nothing may be."""
    if not is_number(empty_lse) or not math.isinf(empty_lse):
        raise ValueError(f"empty_lse is {shown(empty_lse)}; supported: inf and -inf")


def output_strides(name: str, given: TensorSpec | None, shape: tuple[int, ...], dtype: torch.dtype, q: TensorSpec) -> tuple[int, ...]:
    """The strides of an output, in elements: of the caller's tensor, or of a new one. ValueError if the caller's does not fit."""
    if given is None:
        return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    check_shape(name, given, shape)
    check_dtype(name, given, dtype)
    check_device(name, given, q.device)
    check_writable(name, given)
    return given.stride


def row_alignment(address_alignment: int, *tensors: TensorSpec | None) -> int:
    """The greatest power of two, at most MAX_ROW_ALIGNMENT, that divides the address of every row of these tensors.

    address_alignment: the same of the addresses of the tensors alone. None: a tensor that has not been made yet.
    """
    return alignment(address_alignment, *(stride for spec in tensors if spec is not None for stride in _row_strides(spec)))


def alignment(*distances: int) -> int:
    """The greatest power of two, at most MAX_ROW_ALIGNMENT, that divides all of these numbers of bytes."""
    bits = MAX_ROW_ALIGNMENT
    for distance in distances:
        bits |= distance
    return bits & -bits


def _row_strides(spec: TensorSpec) -> list[int]:
    """Bytes between neighbouring rows, along each dimension that has more than one."""
    pairs = zip(spec.shape[:-1], spec.stride[:-1], strict=True)
    return [stride * spec.dtype.itemsize for size, stride in pairs if size > 1]


def refuse_gradients(**operands: Any) -> None:
    """ValueError if gradients would have to flow through a call: there is no backward pass, and none is faked."""
    for name, operand in operands.items():
        if getattr(operand, "requires_grad", False) and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad; supported: the forward pass only, of tensors that do not, or inside `with torch.no_grad():`"
            )
