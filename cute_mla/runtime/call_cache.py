"""Prepared calls: checked once, kept in a cache, found again by their key and by what the checks look at of their tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from .launch import Launches
from .tensor_memory import missing_memory

_MAX_ALTERNATIVES = 4  # calls of equal keys and shapes whose tensors differ
_MAX_SHAPES = 512  # keys and shapes: some megabytes of prepared calls

ADDRESS_ALIGNMENT = 16  # bytes: the most that kernels require of an address

# Tensors rarely lie below this address. A view of a freed storage does: its address is its offset.
_LOW_ADDRESS = 1 << 32

# All tensors of a call, by position; None where the caller gives none.
Tensors: TypeAlias = tuple[torch.Tensor | None, ...]

_data_ptr = torch.Tensor.data_ptr


class Allocation(NamedTuple):
    """A tensor to allocate on the device of the first tensor where the caller gives none. position: among all tensors."""

    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A checked call, ready for all tensors like those that were checked. It holds none of them.

    pick: returns the given tensors, out of all. like: compares given tensors with the checked ones, but for their addresses.
    out, second, workspace: positions among the given tensors; 0 or 1, the first tensors, where such a tensor is absent. The addresses of
    the tensors 0 and `out`, taken together by OR, have the remainder `row_remainder`, which decides on the kernel. Those of the tensors 1,
    `second` and `workspace` are aligned.
    allocations: tensors to allocate. make: returns all tensors, given all tensors and the maker, an object of the caller's, where tensors
    are to be made by a launch; else None. pick_all: returns the tensors of the launches, out of all, once they are made; None if no tensor
    is missing. launches: None if there is nothing to compute.
    """

    pick: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]
    like: Callable[..., bool]
    out: int
    second: int
    workspace: int
    row_remainder: int
    allocations: tuple[Allocation, ...]
    make: Callable[[Tensors, Any], Tensors] | None
    pick_all: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]] | None
    launches: Launches | None

    def fits(self, given: Sequence[torch.Tensor], addresses: list[int]) -> bool:
        """Return whether the checks of this call hold for these tensors."""
        for tensor in given:
            if tensor.is_nested:  # torch's guard ends the process on a nested tensor
                return False
        return (
            self.like(*given)
            and (min(addresses) >= _LOW_ADDRESS or have_memory(given))
            and (addresses[0] | addresses[self.out]) % ADDRESS_ALIGNMENT == self.row_remainder
            and not (addresses[1] | addresses[self.second] | addresses[self.workspace]) % ADDRESS_ALIGNMENT
        )

    def start(self, tensors: Tensors, given: Sequence[torch.Tensor], addresses: list[int], maker: Any) -> Tensors:
        """Launch the call on these tensors. Allocate and make missing ones; return all tensors."""
        if self.pick_all is not None:
            tensors = self._complete(tensors, maker)
            given = self.pick_all(tensors)
            addresses = [*map(_data_ptr, given)]
        if self.launches is not None:
            self.launches.start(given, addresses)
        return tensors

    def _complete(self, tensors: Tensors, maker: Any) -> Tensors:
        complete, first = list(tensors), tensors[0]
        assert first is not None
        for position, shape, dtype in self.allocations:
            complete[position] = first.new_empty(shape, dtype=dtype)
        return tuple(complete) if self.make is None else self.make(tuple(complete), maker)


class CallCache:
    """The prepared calls of a device; the oldest make room for new ones.

    exact: whether a call fits only tensors whose storages hold all elements. Else freed storages are noticed by their address, and shrunk
    ones are not: to ask every storage for its size would add 1.5 us to the 5.5 us of a repeated call.
    latest: by key, the call that was added or found last. It is tried first, because the layers of a model make equal calls. The last
    key is compared rather than hashed, which takes half the time.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.latest: dict[Hashable, Any] = {}
        self._last: tuple[Hashable, Any] = (None, None)
        self._calls: dict[Hashable, list[Any]] = {}

    def calls(self) -> list[Any]:
        """Return all cached calls."""
        return [call for calls in self._calls.values() for call in calls]

    def find(self, key: Hashable, tensors: Tensors) -> tuple[Any, tuple[torch.Tensor, ...], list[int]] | None:
        """Return a call of this key that fits these tensors, the given ones of the tensors, and their addresses; or None."""
        last_key, call = self._last
        if key != last_key:
            call = self.latest.get(key)
            if call is None:
                return None
            self._last = key, call
        given = call.pick(tensors)
        if self.exact and not have_memory(given):
            return None
        addresses = [*map(_data_ptr, given)]
        if call.fits(given, addresses):
            return call, given, addresses
        for other in self._calls.get((key, given[0].shape), ()):
            if other.fits(given, addresses):
                self._remember(key, other)
                return other, given, addresses
        return None

    def add(self, key: Hashable, shape: Hashable, call: Any) -> None:
        """Add a call to the cache. shape: of its first tensor."""
        calls = [call, *self._calls.pop((key, shape), [])[: _MAX_ALTERNATIVES - 1]]
        for cached in (self._calls, self.latest):
            while len(cached) >= _MAX_SHAPES:
                cached.pop(next(iter(cached)), None)
        self._calls[key, shape] = calls
        self._remember(key, call)

    def _remember(self, key: Hashable, call: Any) -> None:
        self.latest[key] = call
        self._last = key, call


def have_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the storage of each tensor holds its elements."""
    return all(missing_memory(tensor) is None for tensor in tensors)


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
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), needs_gradient, missing_memory(tensor)
