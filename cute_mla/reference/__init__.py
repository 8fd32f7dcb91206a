"""Reference implementations in plain torch: slow, and simple enough to check by reading.

They compute in fp64 and round each result once, to fp32: an error is then the kernel's alone, on every processor.
"""

from __future__ import annotations

from .chosen_keys import attention_head_sums, indexer_backward, indexer_scores
from .indexer import fp8_mqa_logits, fp8_paged_mqa_logits, indexed_keys, indexer_topk, indexer_topk_prefill, paged_ends, topk_indices
from .latent import (
    IndexedCache,
    SeenKeys,
    attention,
    dense_decode,
    gather_pages,
    lse_indexer,
    mask_keys,
    scale_by_sink,
    sequence_rows,
    sparse_decode,
    sparse_prefill,
    sparse_prefill_backward,
    visible_keys,
    window_keys,
)
from .prefill import attention_gradients, dense_prefill, dense_prefill_backward, masked_prefill, merge_states

__all__ = [
    "IndexedCache",
    "SeenKeys",
    "attention",
    "attention_gradients",
    "attention_head_sums",
    "dense_decode",
    "dense_prefill",
    "dense_prefill_backward",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "gather_pages",
    "indexed_keys",
    "indexer_backward",
    "indexer_scores",
    "indexer_topk",
    "indexer_topk_prefill",
    "lse_indexer",
    "mask_keys",
    "masked_prefill",
    "merge_states",
    "paged_ends",
    "scale_by_sink",
    "sequence_rows",
    "sparse_decode",
    "sparse_prefill",
    "sparse_prefill_backward",
    "topk_indices",
    "visible_keys",
    "window_keys",
]
