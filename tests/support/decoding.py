"""Operands of decode made from others, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_mla.testing.operations.dense_decode.case import DenseDecodeTensors


def with_lengths(tensors: DenseDecodeTensors, lengths: list[int]) -> DenseDecodeTensors:
    """Return the operands with other lengths, for which the block table must have pages."""
    return replace(tensors, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
