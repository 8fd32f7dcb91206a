"""Operands of decode made from others, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_mla.testing.cases.dense_decode import DenseDecodeTensors


def with_lengths(tensors: DenseDecodeTensors, lengths: list[int]) -> DenseDecodeTensors:
    """The same operands with other lengths, which the block table must have pages for."""
    return replace(tensors, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
