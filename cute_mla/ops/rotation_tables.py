"""Checks of the operands of a rotation: a table of cosines and sines, and the positions of tokens in it."""

from __future__ import annotations

import torch

from ..spec.mla import D_ROPE
from .strides import TMA_ALIGNMENT
from .tensor_spec import TensorSpec, check_device, check_dtype, check_last_contiguous, check_shape

_MAX_POSITIONS = (1 << 31) - 1
_FLOATS = TMA_ALIGNMENT // 4  # fp32 numbers that a lane loads at once


def check_table(name: str, table: TensorSpec, device: torch.device, beside: str) -> None:
    """Raise ValueError unless a table is fp32 [positions, 64] that kernels can read, on the device of the argument `beside`."""
    check_shape(name, table, ("positions", D_ROPE))
    check_dtype(name, table, torch.float32)
    check_last_contiguous(name, table)
    check_device(name, table, device, beside)
    if table.shape[0] > _MAX_POSITIONS or (table.shape[0] > 1 and table.stride[0] % _FLOATS):
        raise ValueError(
            f"{name} has shape {list(table.shape)} and strides {list(table.stride)}; supported: to {_MAX_POSITIONS} positions, "
            f"multiples of {_FLOATS} elements apart"
        )


def check_integers(name: str, spec: TensorSpec, tokens: int, device: torch.device, beside: str) -> None:
    """Raise ValueError unless an argument holds an integer for each token."""
    check_shape(name, spec, (tokens,), f" with this {beside}")
    check_dtype(name, spec, torch.int64, torch.int32)
    check_device(name, spec, device, beside)
