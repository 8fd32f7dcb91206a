"""Uninitialized memory: the bytes that no launch has written yet, tracked across simulated launches."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from ..simulator import GlobalMemory


@dataclass(frozen=True)
class _Shadow:
    """Shadow of a tensor. written: 1 for each byte that a launch has written. version: torch's count of its own writes."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    start: int
    written: np.ndarray

    @property
    def stop(self) -> int:
        return self.start + self.written.size

    @property
    def is_current(self) -> bool:
        """Return False once the memory may belong to another tensor, or torch has written to it."""
        tensor = self.tensor()
        return tensor is not None and tensor._version == self.version


class UninitializedMemory:
    """The tensors whose contents were declared uninitialized, and the bytes that launches have written to them since.

    Only contiguous tensors are tracked: between the rows of other tensors lies memory that does not belong to them. Inference tensors are
    not tracked, because torch does not count its writes to them.
    """

    def __init__(self) -> None:
        self._shadows: list[_Shadow] = []

    def declare(self, tensor: torch.Tensor) -> None:
        """Declare a tensor uninitialized. Fill it with NaN (or -1), in case it is read outside a launch."""
        tensor.fill_(float("nan") if tensor.is_floating_point() else 255 if tensor.dtype is torch.uint8 else -1)
        start = tensor.data_ptr()
        self._shadows = [shadow for shadow in self._shadows if shadow.is_current and shadow.start != start]
        if tensor.is_contiguous() and not tensor.is_inference():
            self._shadows.append(_Shadow(weakref.ref(tensor), tensor._version, start, np.zeros(tensor.nbytes, np.uint8)))

    def register(self, memory: GlobalMemory, name: str, start: int, stop: int) -> None:
        """Add memory for a launch. Bytes of declared tensors that no launch has written are invalid."""
        shadows = self._overlapping(start, stop)
        if len(shadows) == 1 and shadows[0][1:] == (start, stop):
            shadow = shadows[0][0]
            memory.add(name, start, stop - start, initialised=False, written=shadow.written[start - shadow.start : stop - shadow.start])
            return
        memory.add(name, start, stop - start, initialised=not shadows)
        if shadows:
            known = _written(memory, start, stop)
            known[:] = 1
            for shadow, low, high in shadows:
                known[low - start : high - start] = shadow.written[low - shadow.start : high - shadow.start]

    def update(self, memory: GlobalMemory, start: int, stop: int) -> None:
        """Record the bytes that a launch has written to registered memory."""
        for shadow, low, high in self._overlapping(start, stop):
            known = _written(memory, start, stop)
            if np.may_share_memory(known, shadow.written):
                continue  # launches have kept it up to date
            shadow.written[low - shadow.start : high - shadow.start] = known[low - start : high - start]

    def _overlapping(self, start: int, stop: int) -> list[tuple[_Shadow, int, int]]:
        return [
            (shadow, max(start, shadow.start), min(stop, shadow.stop))
            for shadow in self._shadows
            if shadow.is_current and shadow.start < stop and start < shadow.stop
        ]


def _written(memory: GlobalMemory, start: int, stop: int) -> np.ndarray:
    buffer = memory.find(start, stop)
    assert buffer is not None
    assert buffer.valid is not None
    return buffer.valid
