"""Short forms of parameter lists, for kernels of tests."""

from __future__ import annotations

from cute_mla.spec.abi import Param, ParamKind


def pointers(*names: str) -> tuple[Param, ...]:
    """Return parameters that are 64-bit global-memory addresses."""
    return tuple(Param(name, ParamKind.POINTER) for name in names)


def int32s(*names: str) -> tuple[Param, ...]:
    """Return parameters that are 32-bit signed integers."""
    return tuple(Param(name, ParamKind.INT32) for name in names)


def int64s(*names: str) -> tuple[Param, ...]:
    """Return parameters that are 64-bit signed integers."""
    return tuple(Param(name, ParamKind.INT64) for name in names)


def float32s(*names: str) -> tuple[Param, ...]:
    """Return parameters that are 32-bit floats."""
    return tuple(Param(name, ParamKind.FLOAT32) for name in names)


def tensor_maps(*names: str) -> tuple[Param, ...]:
    """Return parameters that are 128-byte tensor maps passed by value."""
    return tuple(Param(name, ParamKind.TENSOR_MAP) for name in names)
