"""The parameters of the kernels of every op, which a manifest entry must agree with."""

from __future__ import annotations

from . import (
    cache_gather,
    cache_insert,
    cache_write,
    combine,
    dense_decode,
    dense_prefill,
    dense_prefill_dkdv,
    dense_prefill_dq,
    index_write,
    masked_prefill,
    merge_states,
    mqa_logits,
    sparse_decode,
    sparse_prefill,
    split_plan,
    topk_indices,
)
from .abi import Param

PARAMS_OF: dict[str, tuple[Param, ...]] = {
    "cache_gather": cache_gather.PARAMS,
    "cache_insert": cache_insert.PARAMS,
    "cache_write": cache_write.PARAMS,
    "combine": combine.PARAMS,
    "dense_decode": dense_decode.PARAMS,
    "dense_prefill": dense_prefill.PARAMS,
    "dense_prefill_dkdv": dense_prefill_dkdv.PARAMS,
    "dense_prefill_dq": dense_prefill_dq.PARAMS,
    "index_write": index_write.PARAMS,
    "masked_prefill": masked_prefill.PARAMS,
    "merge_states": merge_states.PARAMS,
    "mqa_logits": mqa_logits.PARAMS,
    "sparse_decode": sparse_decode.PARAMS,
    "sparse_prefill": sparse_prefill.PARAMS,
    "split_plan": split_plan.PARAMS,
    "topk_indices": topk_indices.PARAMS,
}
