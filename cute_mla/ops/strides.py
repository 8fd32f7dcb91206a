"""Strides that kernels can take: of outputs, of rows, and of tensor maps."""

from __future__ import annotations

import math

import torch

from ..spec.dense_decode import MAX_ROW_ALIGNMENT
from .tensor_spec import TensorSpec, check_device, check_dtype, check_shape

TMA_ALIGNMENT = 16  # bytes: of a base address and of every stride that a tensor map holds
_MAX_MAP_STRIDE = 1 << 40  # bytes, exclusive: what a tensor map can hold


def output_strides(name: str, given: TensorSpec | None, shape: tuple[int, ...], dtype: torch.dtype, q: TensorSpec) -> tuple[int, ...]:
    """Return the strides of an output in elements: the caller's, or those of a new contiguous tensor if `given` is None.

    ValueError unless the caller's tensor has this shape and dtype, is on q's device and has distinct elements.
    """
    if given is None:
        return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    check_shape(name, given, shape)
    check_dtype(name, given, dtype)
    check_device(name, given, q.device)
    check_writable(name, given)
    return given.stride


def check_writable(name: str, spec: TensorSpec) -> None:
    """Raise ValueError if elements share an address, as in an expanded tensor. Interleaved dimensions count as sharing."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(spec.shape, spec.stride, strict=True) if size > 1):
        if stride <= reach and 0 not in spec.shape:
            raise ValueError(f"{name} has strides {list(spec.stride)}, so elements share memory; supported: an output of distinct elements")
        reach += (size - 1) * stride


def row_alignment(address_alignment: int, *tensors: TensorSpec | None) -> int:
    """Return the greatest power of two, at most MAX_ROW_ALIGNMENT, that divides the address of every row of the tensors.

    address_alignment: what `alignment` gives for the tensors' base addresses. None: a tensor that is not allocated yet.
    """
    return alignment(address_alignment, *(stride for spec in tensors if spec is not None for stride in _row_strides(spec)))


def alignment(*distances: int) -> int:
    """Return the greatest power of two, at most MAX_ROW_ALIGNMENT, that divides all these numbers of bytes."""
    bits = MAX_ROW_ALIGNMENT
    for distance in distances:
        bits |= distance
    return bits & -bits


def _row_strides(spec: TensorSpec) -> list[int]:
    """Return the bytes between neighbouring rows, along each dimension of more than one."""
    pairs = zip(spec.shape[:-1], spec.stride[:-1], strict=True)
    return [stride * spec.dtype.itemsize for size, stride in pairs if size > 1]


def map_strides(name: str, spec: TensorSpec, *dimensions: int) -> tuple[int, ...]:
    """Return the strides of a tensor map along these dimensions, in bytes. ValueError if a tensor map cannot hold them."""
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
    """Return the bytes between neighbours along a dimension.

    The stride of a dimension of size 1 is arbitrary in torch and never used. The bytes of a row replace it, which a tensor map can hold.
    """
    elements = spec.stride[dimension] if spec.shape[dimension] > 1 else spec.shape[-1]
    return elements * spec.dtype.itemsize


def is_map_stride(stride: int) -> bool:
    """Return whether a tensor map can hold a stride of this many bytes."""
    return stride % TMA_ALIGNMENT == 0 and 0 < stride < _MAX_MAP_STRIDE
