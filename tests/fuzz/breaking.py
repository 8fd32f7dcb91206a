"""Ways to break an argument: values of other kinds, and other tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_mla import get_mla_metadata

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.complex64,
)
_THINGS: tuple[Callable[[], Any], ...] = (
    lambda: "text",
    lambda: [1, 2],
    dict,
    object,
    lambda: torch.Tensor,
    lambda: torch.float32,
    lambda: (),
    lambda: print,
)
_NUMBERS: tuple[Any, ...] = (0, 1, -1, 64, 1 << 40, 10**400, 2.5, -0.5)
_FLOATS: tuple[Any, ...] = (math.nan, math.inf, -math.inf, np.float32(0.5), Fraction(1, 3), np.int64(3), 512.0, 1e39)


class _Subclass(Tensor):
    """A tensor of another class."""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _in_place_of(value: Any) -> Tensor:
    """Return the tensor itself, or one where there is none."""
    return value if _is_tensor(value) else torch.zeros(3, dtype=torch.int32)


def _dtype(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    return _in_place_of(value).to(_DTYPES[amount])


def _dimension(tensor: Tensor, amount: int) -> int:
    return amount % tensor.dim() if tensor.dim() else 0


def _longer(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    tensor = _in_place_of(value)
    if not tensor.dim():
        return tensor.expand(2)
    shape = list(tensor.shape)
    shape[_dimension(tensor, amount)] += 1 + amount // 4
    return torch.zeros(shape, dtype=tensor.dtype)


def _shorter(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    tensor = _in_place_of(value)
    dim = _dimension(tensor, amount)
    return tensor.narrow(dim, 0, tensor.shape[dim] - 1) if tensor.dim() and tensor.shape[dim] else tensor


def _emptied(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    tensor = _in_place_of(value)
    return tensor.narrow(_dimension(tensor, amount), 0, 0) if tensor.dim() else tensor


def _rank(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    tensor = _in_place_of(value)
    if amount >= 4 or not tensor.dim() or not tensor.numel():
        return tensor.unsqueeze(amount % 4 % (tensor.dim() + 1))
    return tensor.select(_dimension(tensor, amount), 0) if amount else tensor.flatten()[0]


def _turned(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Exchange two neighbouring dimensions: other strides, and of unequal sizes another shape."""
    tensor = _in_place_of(value)
    dim = _dimension(tensor, amount)
    return tensor.transpose(dim, (dim + 1) % tensor.dim()) if tensor.dim() > 1 else tensor


def _strided(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Spread a tensor's elements along a dimension; along the last one they are no longer neighbours."""
    tensor = _in_place_of(value)
    if not tensor.dim():
        return tensor
    shape = list(tensor.shape)
    dim = _dimension(tensor, -1 - amount)
    shape[dim] *= 2
    wide = torch.zeros(shape, dtype=tensor.dtype).unflatten(dim, (tensor.shape[dim], 2)).select(dim + 1, 0)
    return wide.copy_(tensor.detach())


def _padded(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Store a tensor's elements in longer rows, at another address: multiples of a few elements."""
    tensor = _in_place_of(value)
    if not tensor.dim():
        return tensor
    more = (1, 2, 4, 8)[amount % 4]
    offset = more if amount >= 4 else 0
    wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + more, dtype=tensor.dtype)
    return wide[..., offset : offset + tensor.shape[-1]].copy_(tensor.detach())


def _expanded(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """All elements along a dimension are the first one: stride 0."""
    tensor = _in_place_of(value)
    dim = _dimension(tensor, amount)
    if not tensor.dim() or not tensor.shape[dim]:
        return tensor
    return tensor.narrow(dim, 0, 1).expand(tensor.shape)


def _overlapping(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Return rows one element apart: each has all but one of the next one's elements."""
    tensor = _in_place_of(value)
    if tensor.dim() < 2 or not tensor.numel():
        return tensor
    rows = math.prod(tensor.shape[:-1])
    return torch.zeros(rows + tensor.shape[-1], dtype=tensor.dtype).unfold(0, tensor.shape[-1], 1)[:rows].unflatten(0, tensor.shape[:-1])


def _enormous(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Return a dimension of 2^40 elements, all of them the first."""
    tensor = _in_place_of(value)
    if not tensor.numel():
        return tensor
    dim = _dimension(tensor, amount)
    return tensor.narrow(dim, 0, 1).expand(*tensor.shape[:dim], 1 << 40, *tensor.shape[dim + 1 :]) if tensor.dim() else tensor


def _layout(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Return tensors without strides, without memory, of another class, or that torch reads otherwise than they lie in memory."""
    tensor = _in_place_of(value).detach()
    if amount == 0:
        return tensor.to_sparse() if tensor.dtype != torch.float8_e4m3fn else tensor.float().to_sparse()
    if amount == 1:
        return torch.quantize_per_tensor(torch.zeros(tensor.shape), 0.1, 0, torch.quint8)
    if amount == 2:
        return tensor.as_subclass(_Subclass)
    if amount == 3 and tensor.is_floating_point():
        return torch.nn.Parameter(tensor)
    if amount == 4 and tensor.is_floating_point():
        return torch.nn.Parameter(tensor, requires_grad=False)
    if amount == 5:
        return torch._neg_view(tensor)
    if amount == 6 and tensor.dim() >= 2 and tensor.numel():
        return torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
    return torch.zeros(2, 3, 4, 5).to_mkldnn()


def _values(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Other numbers in lengths and indices: of a negative one, none and too large ones."""
    tensor = _in_place_of(value)
    if tensor.dtype != torch.int32:
        return tensor
    numbers = (-1, 0, 1, -(1 << 31), (1 << 31) - 1)
    return torch.full_like(tensor, numbers[amount]) if amount < len(numbers) else tensor.flip(0) if tensor.dim() else tensor


def _alias(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Return memory of another argument; bytes lie in memory of any type."""
    tensor = _in_place_of(value)
    others = [other for other in arguments.values() if _is_tensor(other) and other is not value and other.layout == torch.strided]
    others = [other for other in others if other.is_contiguous() and other.nbytes >= tensor.nbytes and other.device == tensor.device]
    others = [other for other in others if tensor.dtype in (other.dtype, torch.uint8)]
    if not others or not tensor.numel():
        return tensor
    flat = others[amount % len(others)].detach().flatten().view(torch.uint8)
    return flat[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _scaled(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    """Return a number beside the one that was there."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return _NUMBERS[amount]
    return (value + 1, value - 1, value * 2, -value, float(value), np.int64(int(value)), str(value), torch.tensor(value))[amount]


def _schedule(value: Any, amount: int, arguments: Mapping[str, Any]) -> Any:
    return get_mla_metadata()[0]


BREAKS: dict[str, Callable[[Any, int, Mapping[str, Any]], Any]] = {
    "absent": lambda value, amount, arguments: None,
    "thing": lambda value, amount, arguments: _THINGS[amount](),
    "number": lambda value, amount, arguments: _NUMBERS[amount],
    "float": lambda value, amount, arguments: _FLOATS[amount],
    "flag": lambda value, amount, arguments: amount % 2 == 0,
    "scaled": _scaled,
    "array": lambda value, amount, arguments: np.zeros((2, 3)) if amount % 2 else _in_place_of(value).float().tolist(),
    "dtype": _dtype,
    "longer": _longer,
    "shorter": _shorter,
    "emptied": _emptied,
    "rank": _rank,
    "turned": _turned,
    "strided": _strided,
    "padded": _padded,
    "expanded": _expanded,
    "overlapping": _overlapping,
    "enormous": _enormous,
    "meta": lambda value, amount, arguments: _in_place_of(value).to("meta"),
    "layout": _layout,
    "values": _values,
    "alias": _alias,
    "schedule": _schedule,
}
