"""Register files and shared memories that launches leave for later ones, of all kernels together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..state.cta import Home

MAX_BYTES = 64 << 20  # of unused homes: 3 of the largest kernel, 8 of a middling one

Shape = tuple[object, ...]  # threads along x, y, z; registers of each bank; bytes of shared memory


class HomePool:
    """Unused homes by shape, at most max_bytes of them and at least one. Beyond that the one given back first is dropped."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._homes: list[tuple[Shape, Home]] = []
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of the homes that are kept."""
        return sum(home.nbytes for _, home in self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def take(self, shape: Shape) -> Home | None:
        """Return an unused home of a shape, the one given back last; None when there is none."""
        with self._lock:
            for index in reversed(range(len(self._homes))):
                if self._homes[index][0] == shape:
                    return self._homes.pop(index)[1]
        return None

    def give(self, shape: Shape, home: Home) -> None:
        """Keep a home for a later CTA."""
        with self._lock:
            self._homes.append((shape, home))
            while len(self._homes) > 1 and self.nbytes > self.max_bytes:
                self._homes.pop(0)


POOL = HomePool()
