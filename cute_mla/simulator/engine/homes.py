"""Register files and shared memories that launches leave for later ones, of all kernels together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..state.cta import Home

MAX_HOMES = 8  # some 10 MB each

Shape = tuple[object, ...]  # threads along x, y, z; registers of each bank; bytes of shared memory


class HomePool:
    """At most `limit` unused homes, by shape. Beyond that the one that was given back first is dropped."""

    def __init__(self, limit: int = MAX_HOMES) -> None:
        self.limit = limit
        self._homes: OrderedDict[int, tuple[Shape, Home]] = OrderedDict()
        self._serials = count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._homes)

    def take(self, shape: Shape) -> Home | None:
        """Return an unused home of a shape, the one given back last; None when there is none."""
        with self._lock:
            for serial in reversed(self._homes):
                if self._homes[serial][0] == shape:
                    return self._homes.pop(serial)[1]
        return None

    def give(self, shape: Shape, home: Home) -> None:
        """Keep a home for a later CTA."""
        with self._lock:
            self._homes[next(self._serials)] = shape, home
            if len(self._homes) > self.limit:
                self._homes.popitem(last=False)


POOL = HomePool()
