"""Calls that were checked and prepared before, found again by their options and by all that the checks look at of their tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

_ALTERNATIVES = 4  # calls of equal keys whose tensors differ
_KEYS = 1024


class KeptCalls:
    """The prepared calls of a device; the oldest give way to new ones."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, list[tuple[Callable[..., bool], Any]]] = {}

    def calls(self) -> list[Any]:
        """All of them."""
        return [call for calls in self._calls.values() for _, call in calls]

    def find(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> Any:
        """What was kept for this key and tensors of the same types, devices, shapes and strides; None if nothing was."""
        for fits, call in self._calls.get(key, ()):
            if fits(*tensors):
                return call
        return None

    def keep(self, key: Hashable, tensors: Sequence[torch.Tensor], call: Any) -> None:
        """Keeps a call for the next time."""
        calls = [(guard(tensors), call), *self._calls.pop(key, [])[: _ALTERNATIVES - 1]]
        while len(self._calls) >= _KEYS:
            self._calls.pop(next(iter(self._calls)), None)
        self._calls[key] = calls


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether other tensors equal these in Python class, dtype, device, shape, strides and need of gradients.

    That of torch.compile where torch has it, which takes a tenth of the time; it also wants distinct objects and the same dispatch keys.
    """
    try:
        guards: Any = importlib.import_module("torch._C._dynamo.guards")
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        fits: Callable[..., bool] = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except (ImportError, AttributeError, TypeError):
        return comparison(tensors)
    return fits if fits(*tensors) else comparison(tensors)


def comparison(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """The same in Python."""
    expected = [_looks(tensor) for tensor in tensors]

    def fits(*others: torch.Tensor) -> bool:
        return [_looks(tensor) for tensor in others] == expected

    return fits


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad
