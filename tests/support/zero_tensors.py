"""Tensors of zeros, for calls whose values do not matter, and of a few integers."""

from __future__ import annotations

import torch


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return zeros, bf16 unless said otherwise."""
    return torch.zeros(*shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    """int32 zeros."""
    return torch.zeros(*shape, dtype=torch.int32)


def numbers(*values: int) -> torch.Tensor:
    """Return int32 values."""
    return torch.tensor(values, dtype=torch.int32)
