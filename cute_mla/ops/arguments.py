"""Checks of arguments that are not operands: numbers, flags and the need of gradients.

A check of a number or a flag returns it as an int, a float or a bool. Callers go on with that value: a plan is cached by it, and 4 equals
numpy's 4.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from operator import index
from typing import Any

import numpy as np
import torch

from ..spec.mla import D_V

_MAX_REPR = 200  # characters of an argument in a message


def is_integer(value: Any) -> bool:
    """Return whether an argument is an integer, of Python, numpy or torch.compile. True and False are not integers."""
    return isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """Return whether an argument is True or False, of Python or numpy."""
    return isinstance(value, bool | np.bool_)


def is_number(value: Any) -> bool:
    """Return whether an argument is a real number that a float can hold. True and False are not numbers."""
    if value is True or value is False or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def short_repr(value: Any) -> str:
    """Return the repr of a bad argument, cut to 200 characters; of a tensor, its shape."""
    text = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) and not value.is_nested else repr(value)
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."


def check_integer(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return the argument as an int. ValueError unless it is an integer from least to most (None: no upper bound)."""
    if not is_integer(value) or value < least or (most is not None and value > most):
        bound = "or more" if most is None else f"to {most}"
        raise ValueError(f"{name} is {short_repr(value)}; supported: an integer, {least} {bound}")
    return value if isinstance(value, torch.SymInt) else index(value)  # type: ignore[return-value]


def check_flag(name: str, value: Any) -> bool:
    """Return the argument as a bool. ValueError unless it is True or False."""
    if not is_flag(value):
        raise ValueError(f"{name} is {short_repr(value)}; supported: True and False")
    return bool(value)


def check_columns(name: str, d_v: Any, *supported: int) -> int:
    """Return the argument as an int. ValueError unless it is a supported number of columns of v, by default 512."""
    supported = supported or (D_V,)
    if not is_integer(d_v) or d_v not in supported:
        raise ValueError(f"{name} is {short_repr(d_v)}; supported: {', '.join(map(str, supported))}")
    return int(d_v)


def check_scale(name: str, scale: Any) -> float:
    """Return a softmax scale as a float. ValueError unless it is a positive number that fp32 holds, also when multiplied by log2(e)."""
    fp32 = torch.finfo(torch.float32)
    if not is_number(scale) or not fp32.tiny <= float(scale) <= fp32.max / 2:
        raise ValueError(f"{name} is {short_repr(scale)}; supported: a positive finite number of fp32")
    return float(scale)


def check_eps(eps: Any) -> float:
    """Return what a norm adds to a mean of squares as a float. ValueError unless it is a number of fp32 that is not negative."""
    if not is_number(eps) or not 0 <= float(eps) <= torch.finfo(torch.float32).max:
        raise ValueError(f"eps is {short_repr(eps)}; supported: 0 or a positive number of fp32")
    return float(eps)


def check_empty_lse(empty_lse: Any) -> float:
    """Return empty_lse, the lse of a row that attends to nothing, as a float. ValueError unless it is inf or -inf."""
    if not is_number(empty_lse) or not math.isinf(empty_lse):
        raise ValueError(f"empty_lse is {short_repr(empty_lse)}; supported: inf and -inf")
    return float(empty_lse)


NO_BACKWARD = "the forward pass only, of tensors that do not, or inside `with torch.no_grad():`"
NO_GIVEN_RESULTS = "gradients of calls that allocate their results, without out and lse"
NO_DOUBLE_BACKWARD = "tensors that do not, because the backward pass has no gradients of its own (double backward)"


def needs_grad(*tensors: Any) -> bool:
    """Return whether a tensor requires a gradient while gradients are enabled."""
    return any(getattr(tensor, "requires_grad", False) is True for tensor in tensors) and torch.is_grad_enabled()


def check_no_grad(supported: str = NO_BACKWARD, /, **tensors: Any) -> None:
    """Raise ValueError if a tensor requires a gradient while gradients are enabled. supported: says of which calls there are gradients."""
    for name, tensor in tensors.items():
        if needs_grad(tensor):
            raise ValueError(f"{name} requires grad; supported: {supported}")
