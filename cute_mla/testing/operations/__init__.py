"""Operations: for each op, how the tensors of a case are made, the call through the public API, and the reference."""

from __future__ import annotations

from dataclasses import replace

from ..bounds import bounds
from ..cases.base import BaseCase
from .cache_gather import CACHE_GATHER
from .cache_insert import CACHE_INSERT
from .cache_write import CACHE_WRITE
from .dense_decode import DENSE_DECODE
from .dense_prefill import DENSE_PREFILL
from .dense_prefill_backward import DENSE_PREFILL_BACKWARD
from .index_write import INDEX_WRITE
from .indexer_topk import INDEXER_TOPK
from .merge_states import MERGE_STATES
from .mqa_logits import MQA_LOGITS
from .operation import Operation, Result
from .sparse_decode import SPARSE_DECODE
from .sparse_prefill import SPARSE_PREFILL
from .topk_indices import TOPK_INDICES

__all__ = ["OPERATIONS", "Operation", "Result", "operation"]

OPERATIONS = {
    "dense_decode": DENSE_DECODE,
    "sparse_decode": SPARSE_DECODE,
    "sparse_prefill": SPARSE_PREFILL,
    "dense_prefill": DENSE_PREFILL,
    "dense_prefill_backward": DENSE_PREFILL_BACKWARD,
    "merge_states": MERGE_STATES,
    "mqa_logits": MQA_LOGITS,
    "indexer_topk": INDEXER_TOPK,
    "topk_indices": TOPK_INDICES,
    "index_write": INDEX_WRITE,
    "cache_write": CACHE_WRITE,
    "cache_insert": CACHE_INSERT,
    "cache_gather": CACHE_GATHER,
}


def operation(case: BaseCase) -> Operation:
    """Return the operation of a case, with the bounds of the case."""
    return replace(OPERATIONS[case.op], results=bounds(case))
