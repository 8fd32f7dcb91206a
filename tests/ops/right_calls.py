"""Right calls of every function on a device, every tensor given that a call can have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cute_mla
from cute_mla.cache import gather_kv_cache, insert_kv_cache, write_kv_cache
from cute_mla.indexer import fp8_mqa_logits, fp8_paged_mqa_logits, indexer_topk, prepare_index_queries, topk_indices, write_index_cache
from tests.support.decode_arguments import bytes_from, dense, dense_fp8, sparse_extra
from tests.support.zero_tensors import ints, zeros


def sparse_prefill(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": zeros(3, 2, 576), "kv": zeros(9, 1, 576), "indices": ints(3, 1, 5), "sm_scale": 0.1, "attn_sink": torch.zeros(2),
        "topk_length": ints(3), "out": zeros(3, 2, 512), "max_logits": torch.zeros(3, 2), "lse": torch.zeros(3, 2),
        "lse_indexer": torch.zeros(3, 2), "indexer_topk": 3,
    }  # fmt: skip
    return {**arguments, **changes}


def dense_prefill(**changes: Any) -> dict[str, Any]:
    arguments = {
        "q": zeros(3, 2, 192), "k": zeros(9, 1, 192), "v": zeros(9, 1, 128), "cu_seqlens_qo": ints(2), "cu_seqlens_kv": ints(2),
        "max_seqlen_qo": 3, "max_seqlen_kv": 9, "out": zeros(3, 2, 128), "lse": torch.zeros(3, 2),
    }  # fmt: skip
    return {**arguments, **changes}


def backward(**changes: Any) -> dict[str, Any]:
    forward = {name: tensor for name, tensor in dense_prefill().items() if name not in ("out", "lse")}
    results = {name: torch.zeros_like(forward[name[1:]]) for name in ("dq", "dk", "dv")}
    saved = {"dout": zeros(3, 2, 128), "out": zeros(3, 2, 128), "lse": torch.zeros(3, 2)}
    return {**forward, **saved, **results, "workspace": torch.zeros(128, dtype=torch.uint8), **changes}


def merging(**changes: Any) -> dict[str, Any]:
    arguments = {"outs": zeros(4, 3, 2, 128), "lses": torch.zeros(4, 3, 2), "out": zeros(3, 2, 128), "lse": torch.zeros(3, 2)}
    return {**arguments, **changes}


def planning(**changes: Any) -> dict[str, Any]:
    return {"cache_seqlens": ints(3), "num_q_tokens_per_head_k": 8, "num_heads_k": 1, **changes}


def writing(**changes: Any) -> dict[str, Any]:
    cache = bytes_from(0, 2, 16, 1, 576, dtype=torch.float8_e4m3fn)
    arguments = {"kv_c": zeros(2, 512), "k_pe": zeros(2, 64), "k_cache": cache, "slot_mapping": ints(2), "descale_k": torch.ones(1)}
    return {**arguments, **changes}


def gathering(**changes: Any) -> dict[str, Any]:
    cache = bytes_from(0, 2, 16, 1, 576, dtype=torch.float8_e4m3fn)
    arguments = {
        "k_cache": cache, "block_table": ints(2, 1), "cu_seqlens": ints(3), "rows": 4, "starts": ints(2), "descale_k": torch.ones(1),
        "out": zeros(4, 576),
    }  # fmt: skip
    return {**arguments, **changes}


def selecting(**changes: Any) -> dict[str, Any]:
    return {"logits": torch.zeros(3, 40), "lengths": ints(3), "topk": 5, "out": ints(3, 5), **changes}


def rows_scored(**changes: Any) -> dict[str, Any]:
    keys = bytes_from(0, 40, 128, dtype=torch.float8_e4m3fn)
    arguments = {"q": bytes_from(0, 3, 8, 128, dtype=torch.float8_e4m3fn), "kv": (keys, torch.zeros(40)), "weights": torch.zeros(3, 8)}
    return {**arguments, "ks": ints(3), "ke": ints(3), "out": torch.zeros(3, 40), **changes}


def pages_scored(**changes: Any) -> dict[str, Any]:
    q, cache = bytes_from(0, 2, 1, 8, 128, dtype=torch.float8_e4m3fn), bytes_from(0, 3, 16, 1, 132, dtype=torch.uint8)
    arguments = {"q": q, "weights": torch.zeros(2, 8), "context_lens": ints(2), "block_table": ints(2, 3), **changes}
    arguments = {"cache": cache, "metadata": ints(9, 2), "max_context_len": 48, "out": torch.zeros(2, 48), **arguments}
    return arguments


def keys_chosen(**changes: Any) -> dict[str, Any]:
    scored = {name: value for name, value in pages_scored().items() if name not in ("cache", "metadata", "max_context_len", "out")}
    cache, workspace = bytes_from(0, 3, 16, 1, 132, dtype=torch.uint8), torch.zeros(2 * 1024, dtype=torch.uint8)
    return {**scored, "index_cache": cache, "topk": 5, "slots": True, "workspace": workspace, "out": ints(2, 5), **changes}


def index_written(**changes: Any) -> dict[str, Any]:
    norm = {"norm_weight": torch.zeros(128), "norm_bias": torch.zeros(128)}
    arguments = {"k": torch.zeros(2, 128).bfloat16(), "slot_mapping": ints(2), **norm, "cos_sin": torch.zeros(5, 64), "positions": ints(2)}
    return {**arguments, "index_cache": bytes_from(0, 3, 16, 1, 132, dtype=torch.uint8), "rope": "half_split", **changes}


def index_queries(**changes: Any) -> dict[str, Any]:
    arguments = {"q": torch.zeros(2, 3, 128).bfloat16(), "weights": torch.zeros(2, 3), "cos_sin": torch.zeros(5, 64), "positions": ints(2)}
    results = {"out": bytes_from(0, 2, 3, 128, dtype=torch.float8_e4m3fn), "out_weights": torch.zeros(2, 3)}
    return {**arguments, **results, "rope": "interleaved", **changes}


def inserting(**changes: Any) -> dict[str, Any]:
    rotary = {"q_pe": torch.zeros(2, 3, 64).bfloat16(), "cos_sin": torch.zeros(5, 64), "positions": ints(2)}
    arguments = {**writing(), **rotary, "norm_weight": torch.zeros(512).bfloat16()}
    return {**arguments, "keys": torch.zeros(2, 576).bfloat16(), **changes}


Make = Callable[..., dict[str, Any]]
CALLS: dict[str, tuple[Callable[..., Any], Make]] = {
    "dense": (cute_mla.flash_mla_with_kvcache, dense),
    "dense_fp8": (cute_mla.flash_mla_with_kvcache, dense_fp8),
    "sparse": (cute_mla.flash_mla_with_kvcache, sparse_extra),
    "sparse_prefill": (cute_mla.flash_mla_sparse_fwd, sparse_prefill),
    "dense_prefill": (cute_mla.flash_attn_varlen_func, dense_prefill),
    "backward": (cute_mla.flash_attn_varlen_backward, backward),
    "merge": (cute_mla.merge_states, merging),
    "topk": (topk_indices, selecting),
    "row_logits": (fp8_mqa_logits, rows_scored),
    "paged_logits": (fp8_paged_mqa_logits, pages_scored),
    "indexer_topk": (indexer_topk, keys_chosen),
    "index_write": (write_index_cache, index_written),
    "index_queries": (prepare_index_queries, index_queries),
    "plan": (cute_mla.get_mla_metadata, planning),
    "write": (write_kv_cache, writing),
    "insert": (insert_kv_cache, inserting),
    "gather": (gather_kv_cache, gathering),
}
