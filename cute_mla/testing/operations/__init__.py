"""Operations: the record of each op. Suites, runner and every list of ops above the kernels take an op from here."""

from __future__ import annotations

from ..cases.base import BaseCase
from .cache_gather.record import CACHE_GATHER
from .cache_insert.record import CACHE_INSERT
from .cache_write.record import CACHE_WRITE
from .dense_decode.record import DENSE_DECODE
from .dense_prefill.record import DENSE_PREFILL
from .dense_prefill_backward.record import DENSE_PREFILL_BACKWARD
from .head_sums.record import HEAD_SUMS
from .index_write.record import INDEX_WRITE
from .indexer_backward.record import INDEXER_BACKWARD
from .indexer_topk.record import INDEXER_TOPK
from .merge_states.record import MERGE_STATES
from .mqa_logits.record import MQA_LOGITS
from .operation import Operation, Result
from .sparse_decode.record import SPARSE_DECODE
from .sparse_prefill.record import SPARSE_PREFILL
from .sparse_prefill_backward.record import SPARSE_PREFILL_BACKWARD
from .topk_indices.record import TOPK_INDICES

__all__ = ["OPERATIONS", "Operation", "Result", "operation"]

OPERATIONS = {
    record.case.op: record
    for record in (
        *(DENSE_DECODE, SPARSE_DECODE, SPARSE_PREFILL, SPARSE_PREFILL_BACKWARD, DENSE_PREFILL, DENSE_PREFILL_BACKWARD),
        *(HEAD_SUMS, INDEXER_BACKWARD),
        *(MERGE_STATES, MQA_LOGITS, INDEXER_TOPK, TOPK_INDICES, INDEX_WRITE, CACHE_WRITE, CACHE_INSERT, CACHE_GATHER),
    )
}


def operation(case: BaseCase) -> Operation:
    """Return the record of the op of a case."""
    return OPERATIONS[case.op]
