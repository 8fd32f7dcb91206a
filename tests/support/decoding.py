"""Operands of decode made from others, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_mla.testing.cases import Tensors


def with_lengths(tensors: Tensors, lengths: list[int]) -> Tensors:
    """Return the operands with other lengths, for which the block table must have pages."""
    return replace(tensors, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
