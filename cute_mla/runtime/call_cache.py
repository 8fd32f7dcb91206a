"""A cache of calls that were checked and prepared, found again by their options and by what the checks look at of their tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

_MAX_ALTERNATIVES = 4  # calls of equal keys and shapes whose tensors differ
_MAX_SHAPES = 512  # keys and shapes: some megabytes of prepared calls


class CallCache:
    """The prepared calls of a device; the oldest make room for new ones. The cache holds no tensor.

    latest: by key, the call that was added or found last. It is tried first, because the layers of a model make equal calls.
    """

    def __init__(self) -> None:
        self.latest: dict[Hashable, Any] = {}
        self._calls: dict[Hashable, list[Any]] = {}

    def calls(self) -> list[Any]:
        """Return all cached calls."""
        return [call for calls in self._calls.values() for call in calls]

    def find(self, key: Hashable, shape: Hashable, *looks: Any) -> Any:
        """Return a cached call of this key and shape whose fits(*looks) is True, or None."""
        for call in self._calls.get((key, shape), ()):
            if call.fits(*looks):
                self.latest[key] = call
                return call
        return None

    def add(self, key: Hashable, shape: Hashable, call: Any) -> None:
        """Add a call to the cache."""
        calls = [call, *self._calls.pop((key, shape), [])[: _MAX_ALTERNATIVES - 1]]
        for cached in (self._calls, self.latest):
            while len(cached) >= _MAX_SHAPES:
                cached.pop(next(iter(cached)), None)
        self._calls[key, shape] = calls
        self.latest[key] = call


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that compares other tensors with these in class, dtype, device, shape, strides and need of gradients.

    The function is torch.compile's own guard where torch has it, which takes a tenth of the time of `comparison`. That guard also requires
    distinct tensors and equal dispatch keys.
    """
    try:
        guards: Any = importlib.import_module("torch._C._dynamo.guards")
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        equal: Callable[..., bool] = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (ImportError, AttributeError, TypeError):
        return comparison(tensors)
    if not equal(*tensors):
        return comparison(tensors)
    if not any(tensor.requires_grad for tensor in tensors):
        return equal
    enabled = torch.is_grad_enabled()  # torch's guard does not compare it, and only tensors that require gradients depend on it
    return lambda *others: torch.is_grad_enabled() == enabled and equal(*others)


def comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that makes the comparison of `guard` in Python."""
    expected = [_looks(tensor) for tensor in tensors]

    def fits(*others: torch.Tensor) -> bool:
        return [_looks(tensor) for tensor in others] == expected

    return fits


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), needs_gradient
