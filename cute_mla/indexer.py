"""Sparse attention's indexer: which keys a query token attends to."""

from .api.indexer import topk_indices
from .api.indexer_topk import indexer_topk, indexer_topk_prefill
from .api.mqa_logits import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata

__all__ = [
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
    "indexer_topk",
    "indexer_topk_prefill",
    "topk_indices",
]
