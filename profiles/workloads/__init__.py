"""Workloads: operands, timed call and check of a benchmark row, one class an op."""

from __future__ import annotations

from typing import Any

import torch

from ..rows import Case
from .cache_insert import CacheInsert
from .cache_write import CacheWrite
from .combine import Combine
from .dense_decode import DenseDecode
from .dense_prefill import DensePrefill
from .dense_prefill_backward import DensePrefillBackward
from .index_write import IndexWrite
from .indexer_topk import IndexerTopk
from .merge_states import MergeStates
from .sparse_decode import SparseDecode
from .sparse_prefill import SparsePrefill
from .topk_indices import TopkIndices
from .workload import Workload

WORKLOADS: dict[str, type[Workload[Any]]] = {
    "dense_decode": DenseDecode,
    "sparse_decode": SparseDecode,
    "sparse_prefill": SparsePrefill,
    "dense_prefill": DensePrefill,
    "dense_prefill_backward": DensePrefillBackward,
    "combine": Combine,
    "merge_states": MergeStates,
    "cache_write": CacheWrite,
    "cache_insert": CacheInsert,
    "index_write": IndexWrite,
    "topk_indices": TopkIndices,
    "indexer_topk": IndexerTopk,
}


def make_workload(case: Case, device: torch.device, l2_bytes: int) -> Workload[Any]:
    """Return the workload of a case on a device. l2_bytes: size of its L2 cache, which decides the number of operand sets."""
    return WORKLOADS[case.op](case, device, l2_bytes)
