"""Sparse attention's indexer: which keys a query token attends to."""

from .api.index_levels import expand_pools, pages_of_blocks, select_blocks, slots_of_positions, write_pooled_index_keys
from .api.index_write import prepare_index_queries, write_index_cache
from .api.indexer import topk_indices
from .api.indexer_topk import indexer_topk, indexer_topk_prefill
from .api.indexer_training import attention_head_sums, indexer_backward, indexer_loss, indexer_scores, indexer_targets
from .api.mqa_logits import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata

__all__ = [
    "attention_head_sums",
    "expand_pools",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
    "indexer_backward",
    "indexer_loss",
    "indexer_scores",
    "indexer_targets",
    "indexer_topk",
    "indexer_topk_prefill",
    "pages_of_blocks",
    "prepare_index_queries",
    "select_blocks",
    "slots_of_positions",
    "topk_indices",
    "write_index_cache",
    "write_pooled_index_keys",
]
