"""Scope of `with` blocks that choose a device: a block inside a suspended generator has no effect on the code that iterates over it."""

from __future__ import annotations

import contextlib
import inspect
import sys
from dataclasses import dataclass
from types import CodeType, FrameType

from .device import Device

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")  # which are functions up to Python 3.11
_OWN_FILES = (contextlib.__file__, __file__)


@dataclass(frozen=True)
class _Suspendable:
    """The generator whose body holds a block, and the function that iterates over it.

    The function is known by its code and by its depth, the number of frames up to it. A reference to its frame would keep its variables
    alive, the generator among them.
    """

    frame: FrameType
    iterating: CodeType
    depth: int

    def is_running(self) -> bool:
        """Return whether the generator runs, or whether it was started by a function that has returned, as that of a test's fixture is."""
        frames = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame is self.frame:
                return True
            frames.append(frame)
            frame = frame.f_back
        return len(frames) < self.depth or frames[-self.depth].f_code is not self.iterating


class Scope:
    """A block that was entered. outer: the block around it. is_plain: whether it is open, and not inside a generator."""

    def __init__(self, device: Device, outer: Scope | None, entered_from: FrameType | None) -> None:
        self.device = device
        self.outer = outer
        self._is_open = True
        self._generator = _generator_of(entered_from)
        self.is_plain = self._generator is None

    def close(self) -> None:
        """Leave the block; blocks of generators may end in any order."""
        self._is_open = self.is_plain = False
        self._generator = None

    def innermost_open(self) -> Scope | None:
        """Return this block or the nearest one around it that is open."""
        scope: Scope | None = self
        while scope is not None and not scope._is_open:
            scope = scope.outer
        return scope

    def active_device(self) -> Device | None:
        """Return the device of the nearest block that the calling code is inside of."""
        scope: Scope | None = self
        while scope is not None:
            if scope._is_open and (scope._generator is None or scope._generator.is_running()):
                return scope.device
            scope = scope.outer
        return None


def _generator_of(frame: FrameType | None) -> _Suspendable | None:
    """Return the generator that holds the `with` of a block, or None.

    frame: where the block is entered. Functions of contextlib are looked through, and generators that it makes context managers of.
    """
    while frame is not None and (_is_own(frame) or (_is_generator(frame) and _is_own(frame.f_back))):
        frame = frame.f_back
    if frame is None or not _is_generator(frame):
        return None
    iterating = frame.f_back
    while iterating is not None and (_is_generator(iterating) or iterating.f_code.co_name in _COMPREHENSIONS):
        iterating = iterating.f_back
    if iterating is None:
        return None
    depth, below = 1, iterating.f_back
    while below is not None:
        depth, below = depth + 1, below.f_back
    return _Suspendable(frame, iterating.f_code, depth)


def _is_own(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename in _OWN_FILES


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & _GENERATOR)
