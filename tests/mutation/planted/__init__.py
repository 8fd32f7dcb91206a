"""Bugs planted in every family of kernels: not only synchronisation, but masks, scales, columns, orders."""

from __future__ import annotations

from collections.abc import Mapping

from tests.mutation.planted import (
    cache_insert,
    dense_decode_sm90,
    dense_decode_sm90_fp8,
    dense_decode_sm90_fp8_cache,
    dense_decode_sm100,
    dense_decode_sm100_fp8,
    dense_decode_sm100_fp8_cache,
    dense_prefill_dkdv_sm90,
    dense_prefill_dkdv_sm100,
    dense_prefill_dq_sm90,
    dense_prefill_dq_sm100,
    dense_prefill_sm90,
    dense_prefill_sm100,
    index_write,
    kv_cache,
    masked_prefill,
    mqa_logits_sm90,
    mqa_logits_sm100,
    sparse_decode_sm90,
    sparse_decode_sm90_528,
    sparse_decode_sm100,
    sparse_decode_sm100_528,
    sparse_prefill_sm90,
    sparse_prefill_sm100,
    sparse_prefill_sm100_heads64,
    topk_indices,
)
from tests.mutation.planting import Suite

MODULES = (
    dense_decode_sm90,
    dense_decode_sm90_fp8,
    dense_decode_sm90_fp8_cache,
    dense_decode_sm100,
    dense_decode_sm100_fp8,
    dense_decode_sm100_fp8_cache,
    dense_prefill_dkdv_sm90,
    dense_prefill_dkdv_sm100,
    dense_prefill_dq_sm90,
    dense_prefill_dq_sm100,
    dense_prefill_sm90,
    dense_prefill_sm100,
    mqa_logits_sm90,
    mqa_logits_sm100,
    sparse_decode_sm90,
    sparse_decode_sm90_528,
    sparse_decode_sm100,
    sparse_decode_sm100_528,
    sparse_prefill_sm90,
    sparse_prefill_sm100,
    sparse_prefill_sm100_heads64,
)
SUITES: Mapping[str, Suite] = {
    **{module.__name__.rpartition(".")[2]: module.SUITE for module in MODULES},
    "masked_prefill_sm90": masked_prefill.SUITE_SM90,
    "masked_prefill_sm100": masked_prefill.SUITE_SM100,
    **cache_insert.SUITES,
    **index_write.SUITES,
    **kv_cache.SUITES,
    **topk_indices.SUITES,
}
