"""Strides that kernels can take: of outputs, of rows, and of tensor maps."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..spec.dense_decode import MAX_ROW_ALIGNMENT
from .tensor_spec import TensorSpec, check_device, check_dtype, check_shape, is_stand_in

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


def check_rows(nbytes: int, address_alignment: int, operands: Mapping[str, TensorSpec], results: Mapping[str, TensorSpec | None]) -> None:
    """Raise ValueError unless every row of the tensors begins at a multiple of nbytes, a power of two up to MAX_ROW_ALIGNMENT.

    address_alignment: what `alignment` gives for the tensors' base addresses. results: None for a tensor that is not allocated yet.
    """
    given = {name: spec for name, spec in {**operands, **results}.items() if spec is not None and 0 not in spec.shape}
    for name, spec in given.items():
        apart = row_alignment(spec)
        if apart < nbytes:
            copy = "a copy by .contiguous()" if name in operands else "a new tensor"
            raise ValueError(
                f"{name} has shape {list(spec.shape)} and strides {list(spec.stride)}, so rows begin at multiples of {apart} bytes; "
                f"supported: multiples of {nbytes} bytes, as in {copy}"
            )
    if given and address_alignment < nbytes:
        raise ValueError(
            f"{' or '.join(given)} starts at a multiple of {address_alignment} bytes; supported: multiples of {nbytes} bytes, as in a copy "
            "by .clone()"
        )


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy of it, with rows that a tensor map can hold. The gradient of a sum is expanded, and has none."""
    strides = [stride * tensor.itemsize for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    if tensor.stride(-1) != 1 or not all(map(is_map_stride, strides)):
        return tensor.contiguous()
    return tensor if is_stand_in(tensor) or tensor.data_ptr() % TMA_ALIGNMENT == 0 else tensor.clone()


def row_alignment(spec: TensorSpec, address_alignment: int = 0) -> int:
    """Return the greatest power of two, at most MAX_ROW_ALIGNMENT, that divides the distances of a tensor's rows, and address_alignment."""
    return alignment(address_alignment, *_row_strides(spec))


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
                f"supported: positive multiples of {TMA_ALIGNMENT} bytes below {_MAX_MAP_STRIDE}, as in a copy by .contiguous()"
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
