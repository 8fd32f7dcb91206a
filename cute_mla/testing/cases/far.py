"""Tensors with an offset beyond 32 bits, of which only the pages in use take memory on a CPU."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from torch import Tensor

from ...spec.mla import ceil_div

FAR_ELEMENTS = 1 << 32  # an offset that needs more than 32 bits, in elements and in bytes
_UNIT = 64  # elements; strides are multiples, so that a far tensor has aligned rows

# Without this flag the system may refuse memory of this size, whether it is used or not. The mmap of Python 3.11 has no name for it.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0

FarDimension = Literal["far_requests", "far_tokens", "far_heads"]
FAR_DIMENSIONS: tuple[FarDimension, ...] = ("far_requests", "far_tokens", "far_heads")


def reserve(nbytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 [nbytes], uninitialised on a GPU. On a CPU the bytes are 0, and only pages that are written take memory."""
    if device.type != "cpu":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE), dtype=torch.uint8)


def far_strides(shape: Sequence[int], dim: int, first: int) -> tuple[int, ...]:
    """Return strides in elements that put index `first` of `dim` at FAR_ELEMENTS or beyond, and the other dimensions in order.

    Raise ValueError if `dim` has fewer than two indices, since no offset along it is far.
    """
    if shape[dim] < 2:
        raise ValueError(f"shape is {tuple(shape)}; supported: at least 2 in dimension {dim}, which lies far")
    strides, inner = [0] * len(shape), 1
    for other in reversed([other for other in range(len(shape)) if other != dim]):
        strides[other] = inner
        inner *= shape[other]
    strides[dim] = ceil_div(max(ceil_div(FAR_ELEMENTS, first), inner), _UNIT) * _UNIT
    return tuple(strides)


def far_tensor(shape: Sequence[int], dim: int, dtype: torch.dtype, device: torch.device, first: int | None = None) -> Tensor:
    """Allocate a tensor full of NaN, or of -1, whose dimension `dim` is far from index `first` on, as in far_strides.

    first: None: the upper half on a CPU, so that rows which a thread addresses by different instructions are far; the last index on a
    GPU, where a far tensor takes as much memory as it spans. Memory between its elements is not initialised.
    """
    if first is None:
        first = max(shape[dim] // 2 if device.type == "cpu" else shape[dim] - 1, 1)
    strides = far_strides(shape, dim, first)
    span = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1 if prod(shape) else 0
    tensor = reserve(span * dtype.itemsize, device).view(dtype).as_strided(tuple(shape), strides)
    tensor.fill_(float("nan") if dtype.is_floating_point else -1)
    return tensor
