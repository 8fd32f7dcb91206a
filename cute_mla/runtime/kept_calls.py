"""Calls that were checked and prepared before, found again by their options and by all that the checks look at of their tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

_ALTERNATIVES = 4  # calls of equal keys and shapes whose tensors differ
_SHAPES = 512  # keys and shapes: some megabytes of prepared calls


class KeptCalls:
    """The prepared calls of a device; the oldest give way to new ones. They hold no tensor.

    latest: by key, the call that was kept or found last, which is the one to try first: layers of a model follow each other.
    """

    def __init__(self) -> None:
        self.latest: dict[Hashable, Any] = {}
        self._calls: dict[Hashable, list[Any]] = {}

    def calls(self) -> list[Any]:
        """All of them."""
        return [call for calls in self._calls.values() for call in calls]

    def find(self, key: Hashable, shape: Hashable, *looks: Any) -> Any:
        """The call kept for this key and shape whose fits(*looks) says so; None if there is none."""
        for call in self._calls.get((key, shape), ()):
            if call.fits(*looks):
                self.latest[key] = call
                return call
        return None

    def keep(self, key: Hashable, shape: Hashable, call: Any) -> None:
        """Keeps a call for the next time."""
        calls = [call, *self._calls.pop((key, shape), [])[: _ALTERNATIVES - 1]]
        for kept in (self._calls, self.latest):
            while len(kept) >= _SHAPES:
                kept.pop(next(iter(kept)), None)
        self._calls[key, shape] = calls
        self.latest[key] = call


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether other tensors equal these in Python class, dtype, device, shape, strides and need of gradients.

    That of torch.compile where torch has it, which takes a tenth of the time; it also wants distinct objects and the same dispatch keys.
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
    enabled = torch.is_grad_enabled()  # which makes no difference to others, and which torch does not compare
    return lambda *others: torch.is_grad_enabled() == enabled and equal(*others)


def comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """The same in Python."""
    expected = [_looks(tensor) for tensor in tensors]

    def fits(*others: torch.Tensor) -> bool:
        return [_looks(tensor) for tensor in others] == expected

    return fits


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), needs_gradient
