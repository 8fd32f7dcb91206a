"""Launches: the types that describe the launches of a call, whatever memory the call gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from ..manifest import KernelEntry
from ..spec.tensor_map import TensorMap
from .arguments import Memory, Span


class BufferRef(NamedTuple):
    """Memory of a call: the tensor with this number among the call's tensors, or `nbytes` bytes from `offset` of that tensor."""

    tensor: int
    offset: int = 0
    nbytes: int | None = None

    def of(self, tensors: Sequence[torch.Tensor]) -> Memory:
        """Return the memory, given the tensors of one call."""
        tensor = tensors[self.tensor]
        return tensor if self.nbytes is None else Span(tensor, self.offset, self.nbytes)


class MappedTensor(NamedTuple):
    """A tensor map over a tensor of a call. layout: the map of that tensor at address 0."""

    tensor: int
    layout: TensorMap


class Step(NamedTuple):
    """One launch of a call.

    maps, pointers, scalars: its arguments, in the order of its parameters; None: the null pointer. pdl: as in Device.launch.
    """

    kernel: KernelEntry
    grid: tuple[int, int, int]
    maps: tuple[MappedTensor, ...]
    pointers: tuple[BufferRef | None, ...]
    scalars: tuple[int | float, ...]
    pdl: bool


def step_of(kernel: KernelEntry, grid: tuple[int, int, int], arguments: Sequence[MappedTensor | BufferRef | float | None]) -> Step:
    """Return the launch of a kernel that may overlap the launch before it. arguments: in ABI order, None for the null pointer."""
    maps = tuple(argument for argument in arguments if isinstance(argument, MappedTensor))
    scalars = tuple(argument for argument in arguments if isinstance(argument, int | float))
    pointers = tuple(argument for argument in arguments if argument is None or isinstance(argument, BufferRef))
    return Step(kernel, grid, maps, pointers, scalars, pdl=True)


class CallSteps(NamedTuple):
    """The launches of a call, whatever memory the call gives them.

    tensors: number of tensors that the call gives. uninitialized: numbers of the tensors whose contents do not matter.
    """

    steps: tuple[Step, ...]
    tensors: int
    uninitialized: tuple[int, ...]


class Launches(Protocol):
    """A few kernels, launched one behind the other on the current stream, as often as wanted."""

    def start(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Launch the kernels on these tensors. addresses: the tensors' data_ptr()."""
        ...
