"""Single-threaded matrix products in NumPy: the tiles are small, and helper threads only wait for each other."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_PREFIXES = ("scipy_openblas_", "openblas_")
_SUFFIXES = ("64_", "")


@cache
def _controls() -> tuple[Callable[[int], object], Callable[[], int]] | None:
    """Return OpenBLAS's setter and getter of its thread count, or None where NumPy has another BLAS."""
    try:
        core = importlib.import_module("numpy._core._multiarray_umath")
        library = ctypes.CDLL(str(core.__file__))
    except (ImportError, OSError):
        return None
    for prefix in _PREFIXES:
        for suffix in _SUFFIXES:
            setter = getattr(library, f"{prefix}set_num_threads{suffix}", None)
            getter = getattr(library, f"{prefix}get_num_threads{suffix}", None)
            if setter is not None and getter is not None:
                return setter, getter
    return None


@contextmanager
def single_threaded() -> Iterator[None]:
    """Keep NumPy's products on one thread within this context, where that can be controlled."""
    controls = _controls()
    if controls is None:
        yield
        return
    setter, getter = controls
    before = int(getter())
    setter(1)
    try:
        yield
    finally:
        setter(before)
