"""Pool of objects that launches leave for later ones, whatever their kernel."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

T = TypeVar("T")
Shape = tuple[object, ...]


class Pool(Generic[T]):
    """Unused objects by shape: at most max_bytes of them, but always one. Beyond that the object given back first is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._items: list[tuple[Shape, T, int]] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Return the bytes of the unused objects."""
        return sum(nbytes for _, _, nbytes in self._items)

    def __len__(self) -> int:
        return len(self._items)

    def take(self, shape: Shape) -> T | None:
        """Return an unused object of a shape, the one given back last; None when there is none."""
        with self._lock:
            for index in reversed(range(len(self._items))):
                if self._items[index][0] == shape:
                    return self._items.pop(index)[1]
        return None

    def items(self, shape: Shape) -> list[T]:
        """Return the unused objects of a shape; they stay in the pool."""
        with self._lock:
            return [item for kept, item, _ in self._items if kept == shape]

    def give(self, shape: Shape, item: T, nbytes: int) -> list[T]:
        """Keep an object of nbytes for a later launch. Return the objects that are dropped for it."""
        dropped = []
        with self._lock:
            self._items.append((shape, item, nbytes))
            while len(self._items) > 1 and self.nbytes > self.max_bytes:
                dropped.append(self._items.pop(0)[1])
        return dropped
