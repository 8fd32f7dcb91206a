"""Calls of all public functions that take tensors, which together give every argument another value than its default."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch

import cute_mla
import cute_mla.cache
from cute_mla import indexer
from cute_mla.testing.operations.sparse_decode.case import Pool
from tests.support.right_calls import RightCall, call_of, with_own_memory
from tests.support.zero_tensors import ints, zeros

HOMES: tuple[ModuleType, ...] = (cute_mla, cute_mla.cache, indexer)
NOT_TRACED = {
    *("ArtifactError", "DeviceError", "SimulationError", "__version__"),
    *("fingerprint", "is_supported", "record", "simulate", "workspace_size"),
}
HOST_ONLY = {  # torch code that no op stands for
    "row_digest",
    *("dequantise_cache", "empty_cache", "quantise_cache", "reorder_cache"),
    *("indexer_loss", "indexer_targets"),
    *("expand_pools", "pages_of_blocks", "select_blocks", "slots_of_positions", "write_pooled_index_keys"),
}
Arguments = dict[str, Any]


def function_of(name: str) -> Callable[..., Any]:
    """Return the public function of this name."""
    function: Callable[..., Any] = next(getattr(home, name) for home in HOMES if name in home.__all__)
    return function


def public_names() -> list[str]:
    """Return the names of all public functions that take tensors and are ops while they are traced."""
    return [name for home in HOMES for name in home.__all__ if name not in NOT_TRACED | HOST_ONLY]


_ONE: dict[str, Any] = {"softmax_scale": 0.25, "causal": True}
_DENSE: dict[str, Any] = {**_ONE, "h_q": 16, "lengths": (70, 3), "metadata": "tensors"}
_CACHES: dict[str, Any] = {
    "cache": "v41",
    "main": Pool(64, 64, lengths="drawn"),
    "sinks": "drawn",
    "extra_cache": "v41_fp4",
    "extra": Pool(32, 32, 16, "drawn"),
}
_PREFILL: dict[str, Any] = {"batch": 2, "h_q": 16, "topk": 70}
_VARLEN: dict[str, Any] = {**_ONE, "lengths": ((3, 70), (2, 1)), "group": 2}
_BARE: dict[str, Any] = {"cache": "nope_528", "scale_of_cache": None}
_ROWS: dict[str, Any] = {"heads": 9, "keys": 70, "outputs": "given"}
_CHOSEN: dict[str, Any] = {"form": "ragged", "batch": 2, "s_q": 3, "h_q": 4, "s_kv": 9, "topk": 5, "lengths": "drawn", "outputs": "given"}
_INDEX: dict[str, Any] = {"rope": "interleaved", "hadamard": True}
_CALLS: dict[str, tuple[Callable[[], RightCall], ...]] = {
    "flash_mla_with_kvcache": (
        partial(call_of, "dense", **_DENSE, s_q=2, window=40, window_sink=4, empty_lse=-math.inf),
        partial(call_of, "dense", **_DENSE, s_q=2, outputs="given", batch_invariant=True, sinks="drawn"),
        partial(call_of, "dense", **_DENSE | {"causal": False}, s_q=2, tree="drawn"),
        partial(call_of, "dense_fp8", **_DENSE, s_q=2),
        partial(call_of, "dense", **_DENSE, tokens=(2, 1)),
        partial(call_of, "sparse", **_CACHES, s_q=2, h_q=16, metadata="tensors", few_heads=False),
    ),
    "flash_mla_sparse_fwd": (
        partial(call_of, "sparse_prefill", **_PREFILL, form="ragged", sinks="drawn", empty_lse=-math.inf),
        partial(call_of, "sparse_prefill", **_PREFILL, form="batched", lengths="drawn", indexer_topk=7, outputs="given"),
    ),
    "flash_attn_varlen_func": (
        partial(call_of, "dense_prefill", **_VARLEN, mask="random"),
        partial(call_of, "dense_prefill", **_VARLEN, outputs="given", empty_lse=-math.inf),
    ),
    "flash_attn_varlen_backward": (partial(call_of, "backward", **_VARLEN, outputs="given"),),
    "flash_mla_sparse_bwd": (partial(call_of, "sparse_backward", **_CHOSEN, sinks="drawn", dlse=True, dkv="added", chunked=True),),
    "attention_head_sums": (partial(call_of, "head_sums", **_CHOSEN, sinks="drawn"),),
    "indexer_scores": (partial(call_of, "scores", **_CHOSEN),),
    "indexer_backward": (partial(call_of, "indexer_backward", **_CHOSEN, dk="added", chunked=True),),
    "merge_states": (
        partial(call_of, "merge", states=9),
        partial(call_of, "merge", states=2, form="listed", outputs="given", empty_lse=-math.inf),
    ),
    "write_kv_cache": (partial(call_of, "write", **_BARE, power_of_two=True), partial(call_of, "write")),
    "insert_kv_cache": (
        partial(call_of, "insert", **_BARE, kept="none", power_of_two=True, eps=1e-5),
        partial(call_of, "insert", eps=1e-5),
    ),
    "gather_kv_cache": (partial(call_of, "gather"), partial(call_of, "gather", cache="v41", scale_of_cache=None, outputs="given")),
    "fp8_mqa_logits": (partial(call_of, "row_logits", **_ROWS, clean=False, columns=8),),
    "fp8_paged_mqa_logits": (partial(call_of, "paged_logits", **_ROWS, page_size=64, clean=False),),
    "indexer_topk": (partial(call_of, "indexer_topk", **_ROWS, page_size=64, topk=20),),
    "indexer_topk_prefill": (partial(call_of, "indexer_topk_prefill", **_ROWS, topk=20, columns=60),),
    "topk_indices": (partial(call_of, "topk", outputs="given"),),
    "prepare_index_queries": (partial(call_of, "index_queries", **_INDEX, outputs="given"),),
    "write_index_cache": (partial(call_of, "index_write", **_INDEX, scale_format="ue8m0"),),
}
# Arguments that no case gives, or only their default, by place of the call.
_FLAGS: Arguments = {"dropout_p": 0.0, "deterministic": True, "is_varlen": False}
_KEY_PLAN = (ints(2, 21), ints(6, 5))  # of two chunks, over the 20 rows that the requests of _CHOSEN have
_MORE: dict[tuple[str, int], Arguments] = {
    ("flash_mla_sparse_bwd", 0): {"d_v": 512, "key_plan": _KEY_PLAN},
    ("indexer_backward", 0): {"key_plan": _KEY_PLAN},
    ("flash_mla_with_kvcache", 3): {"kv_format": "fp8_576"},
    ("flash_mla_with_kvcache", 5): {"extra_kv_format": "v41_fp4"},
    ("flash_attn_varlen_func", 1): _FLAGS,
    ("flash_attn_varlen_backward", 0): {"deterministic": False},
    ("fp8_paged_mqa_logits", 0): {"metadata": ints(0)},
    ("write_index_cache", 0): {"eps": 1e-5},
}


def _plans() -> list[Arguments]:
    base = {"cache_seqlens": torch.tensor([70, 3]).int(), "num_q_tokens_per_head_k": 32, "num_heads_k": 1, "num_heads_q": 16}
    return [
        {**base, "window": 40, "window_sink": 4},
        {**base, "is_fp8_q": True},
        {**base, "head_dim_v": 1024},
        {**base, "topk": 64, "is_fp8_kvcache": True},
        {**base, "cu_seqlens_q": torch.tensor([0, 2, 3]).int(), "total_q": 3},
    ]


def _packed(left_out: str, **more: Any) -> list[Arguments]:
    """Return the call of a packed form, without some arguments of flash_attn_varlen_func and with its own."""
    (given,) = calls_of("flash_attn_varlen_func")[1:]
    return [{**{name: value for name, value in given.items() if name not in left_out.split()}, **more, "head_dim_qk": 192}]


_WITHOUT_RECORD: dict[str, Callable[[], list[Arguments]]] = {
    "plan_sparse_backward": lambda: [
        {"indices": ints(2, 3, 1, 5), "s_kv": 9, "topk_length": ints(2, 3), "kv_offsets": ints(3), "chunk_tokens": 4}
    ],
    "get_mla_metadata": _plans,
    "flash_attn_varlen_kvpacked_func": lambda: _packed("k v", kv=zeros(71, 2, 320)),
    "flash_attn_varlen_qkvpacked_func": lambda: _packed(
        "q k v cu_seqlens_qo cu_seqlens_kv max_seqlen_qo max_seqlen_kv", qkv=zeros(5, 4, 512), cu_seqlens=ints(3), max_seqlen=3
    ),
    "get_paged_mqa_logits_metadata": lambda: [{"context_lens": ints(2), "block_kv": 64, "num_sms": 4}],
}


def calls_of(name: str) -> list[Arguments]:
    """Return the arguments of the calls of a public function. KeyError if it has none."""
    if name in _WITHOUT_RECORD:
        return _WITHOUT_RECORD[name]()
    return [{**with_own_memory(make()), **_MORE.get((name, place), {})} for place, make in enumerate(_CALLS[name])]
