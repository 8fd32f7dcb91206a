"""A lock that a forked process finds free."""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType

_locks: weakref.WeakSet[ForkLock] = weakref.WeakSet()


class ForkLock:
    """A lock for `with`. A forked process gets a free one: the thread that held the lock does not exist there, and would never release it.

    What the lock protects must therefore be whole after each step of Python, as a dict of finished values is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock.locked():  # not where the holder itself forked
            self._lock.release()

    def renew(self) -> None:
        """Replace the lock by a free one."""
        self._lock = threading.Lock()


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_all)
