"""Operands of decode made from others, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cute_mla.testing.cases import Tensors
from cute_mla.testing.sparse_cases import SparseTensors


def request_of(tensors: Tensors, request: int) -> Tensors:
    """The operands of one request alone, over the same cache."""
    return replace(
        tensors,
        q=tensors.q[request : request + 1],
        block_table=tensors.block_table[request : request + 1],
        cache_seqlens=tensors.cache_seqlens[request : request + 1],
        given={},
    )


def sparse_request_of(tensors: SparseTensors, request: int) -> SparseTensors:
    """The operands of one request alone, over the same caches."""

    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[request : request + 1]

    return replace(
        tensors,
        q=tensors.q[request : request + 1],
        indices=tensors.indices[request : request + 1],
        topk_length=own(tensors.topk_length),
        extra_indices=own(tensors.extra_indices),
        extra_topk_length=own(tensors.extra_topk_length),
        given={},
    )


def with_lengths(tensors: Tensors, lengths: list[int]) -> Tensors:
    """The same operands with other lengths, which the block table must have pages for."""
    return replace(tensors, cache_seqlens=torch.tensor(lengths, dtype=torch.int32))
