"""Tensors of zeros, for calls whose values do not matter."""

from __future__ import annotations

import torch


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return zeros, bf16 unless said otherwise."""
    return torch.zeros(*shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    """int32 zeros."""
    return torch.zeros(*shape, dtype=torch.int32)
