"""row_digest: a number for the bits of each row, by torch ops on any device."""

from __future__ import annotations

import math
from typing import Any

import torch

from .arguments import short_repr

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element; others are read as int64
_STEP, _FACTOR = -0x61C8864680B583EB, -0x4B47D0C59E3A3F4B  # odd: a step of the golden ratio, as in splitmix64, and a multiplier
_ELEMENTS = 1 << 24  # of rows that are mixed together: 128 MB an int64 temporary


def digests(x: Any) -> torch.Tensor:
    """Return the digests, as api.orders.row_digest says."""
    if not isinstance(x, torch.Tensor) or not x.dim():
        raise ValueError(f"x is {short_repr(x)}; supported: a torch tensor with at least one dimension")
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    flat = x.detach().reshape(rows, columns).contiguous()
    words = flat.view(_WORDS.get(x.dtype.itemsize, torch.int64)) if flat.numel() else flat.to(torch.int64)
    places = torch.arange(1, words.shape[-1] + 1, device=x.device) * _STEP
    each = max(_ELEMENTS // max(words.shape[-1], 1), 1)
    return torch.cat([_mixed(words[first : first + each], places) for first in range(0, max(rows, 1), each)])


def _mixed(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return a digest of each row. Sums of int64 wrap around, so that their order does not matter."""
    mixed = words.to(torch.int64) + places
    for _ in range(2):
        mixed ^= mixed >> 32
        mixed *= _FACTOR
    return (mixed ^ (mixed >> 29)).sum(-1)
