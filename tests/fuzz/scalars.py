"""Kinds of numbers that an argument of a call may be."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import numpy as np


def is_integer(value: Any) -> bool:
    """Return whether the value is an integer of any kind; True and False are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """Return whether the value is True or False, numpy's too."""
    return isinstance(value, bool | np.bool_)


def is_one_of(*names: str) -> Callable[[Any], bool]:
    """Return a check for one of these names. An array equals none, and has no truth value when compared."""
    return lambda value: isinstance(value, str) and value in names


def is_eps(value: Any) -> bool:
    """Return whether the value is a number that fp32 holds and that is not negative."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return False
    try:
        return bool(0 <= float(value) <= 3.4028235e38)
    except OverflowError:
        return False


def is_scale(value: Any) -> bool:
    """Return whether the value is a positive number that fp32 holds, also after multiplication by log2(e)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return bool(1.1754944e-38 <= float(value) <= 1.7014117e38)
    except OverflowError:
        return False
