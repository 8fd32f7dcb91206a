"""Matrix products in NumPy: the same bits wherever a row lies, on one thread, as the tiles are small and helpers only wait."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import numpy.typing as npt

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


def products(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return A B^T (m, n) of a (m, k) and b (n, k), summed in float64.

    In float32 the last bits of a sum depend on the row's place in the tile, as BLAS blocks the rows, so that a request's result would
    depend on its neighbours. In float64 sums of products of 8-bit and 16-bit operands are exact or so close that rounding hides it.
    """
    return np.matmul(a.astype(np.float64), b.T.astype(np.float64))


def rounded(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return sums rounded to float32; what exceeds its range becomes an infinity."""
    with np.errstate(over="ignore"):
        return sums.astype(np.float32)
