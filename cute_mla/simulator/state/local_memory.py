"""Local memory: bytes of each thread, which ptxas uses for spilled registers and for arrays that are indexed at run time."""

from __future__ import annotations

import numpy as np

from ..findings import Fault


class LocalMemory:
    """Local memory of the threads of a CTA, nbytes each. valid: bytes that have been written; the others are undefined."""

    def __init__(self, threads: int, nbytes: int) -> None:
        self.data = np.zeros((threads, nbytes), np.uint8)
        self.valid = np.zeros((threads, nbytes), bool)

    def load(self, lanes: np.ndarray, address: np.ndarray, size: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return elements of size bytes, shape (count, lanes), and which of them are undefined; None for none of them."""
        index = self._index(lanes, address, size * count)
        values = np.ascontiguousarray(self.data[index]).view(f"u{size}")
        poison = ~self.valid[index].reshape(len(lanes), count, size).all(axis=2)
        return values.T, poison.T if poison.any() else None

    def store(self, lanes: np.ndarray, address: np.ndarray, values: list[np.ndarray], poison: list[np.ndarray | None] | None) -> None:
        """Store one element or several consecutive ones of each lane. poison: undefined lanes of each."""
        size = values[0].dtype.itemsize
        index = self._index(lanes, address, size * len(values))
        words = np.stack([np.broadcast_to(value, lanes.shape) for value in values], axis=1)
        self.data[index] = np.ascontiguousarray(words).view(np.uint8)
        masks = [None] * len(values) if poison is None else poison
        defined = np.stack([np.ones(len(lanes), bool) if mask is None else ~mask for mask in masks], axis=1)
        self.valid[index] = np.repeat(defined, size, axis=1)

    def _index(self, lanes: np.ndarray, address: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the bytes of an access. Raises Fault outside the memory and at a misaligned address."""
        start = np.broadcast_to(address, lanes.shape).astype(np.int64)
        if bool((start + nbytes > self.data.shape[1]).any()):
            raise Fault("out_of_bounds", f"local memory: {nbytes} bytes at {int(start.max()):#x} of {self.data.shape[1]:#x} bytes")
        if bool((start % nbytes).any()):
            raise Fault("misaligned", f"local memory: {nbytes} bytes at {int(start[start % nbytes != 0][0]):#x}")
        return lanes[:, None], start[:, None] + np.arange(nbytes)
