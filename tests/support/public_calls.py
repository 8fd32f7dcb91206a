"""Calls of all public functions that take tensors, which together give every argument another value than its default."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

import cute_mla
import cute_mla.cache
from cute_mla import indexer
from cute_mla.spec.dense_decode import FP8
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.cases.cache_gather import CacheGatherCase
from cute_mla.testing.cases.cache_insert import CacheInsertCase
from cute_mla.testing.cases.cache_write import CacheWriteCase
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from cute_mla.testing.cases.dense_prefill import DensePrefillCase
from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase
from cute_mla.testing.cases.index_write import IndexWriteCase
from cute_mla.testing.cases.indexer_topk import IndexerTopkCase
from cute_mla.testing.cases.merge_states import MergeStatesCase
from cute_mla.testing.cases.mqa_logits import MqaLogitsCase
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from cute_mla.testing.cases.topk_indices import TopkIndicesCase
from tests.support.right_calls import RightCall, with_own_memory
from tests.support.zero_tensors import ints, zeros

HOMES: tuple[ModuleType, ...] = (cute_mla, cute_mla.cache, indexer)
NOT_TRACED = {"ArtifactError", "DeviceError", "SimulationError", "__version__", "is_supported", "simulate", "workspace_size"}
HOST_ONLY = {"dequantise_cache", "empty_cache", "quantise_cache", "reorder_cache"}  # torch code that no op stands for
Arguments = dict[str, Any]


def function_of(name: str) -> Callable[..., Any]:
    """Return the public function of this name."""
    function: Callable[..., Any] = next(getattr(home, name) for home in HOMES if name in home.__all__)
    return function


def public_names() -> list[str]:
    """Return the names of all public functions that take tensors and are ops while they are traced."""
    return [name for home in HOMES for name in home.__all__ if name not in NOT_TRACED | HOST_ONLY]


_ONE: dict[str, Any] = {"softmax_scale": 0.25, "causal": True}
_DECODE: dict[str, Any] = {"batch": 2, "h_q": 16, "metadata": "tensors"}
_DENSE: dict[str, Any] = {**_DECODE, **_ONE, "lengths": (70, 3)}
_CACHES: dict[str, Any] = {
    "cache": "v41",
    "main": Pool(64, 64, lengths="drawn"),
    "sinks": "drawn",
    "extra_cache": "v41_fp4",
    "extra": Pool(32, 32, 16, "drawn"),
}
_PREFILL: dict[str, Any] = {"batch": 2, "s_q": 3, "h_q": 16, "s_kv": 90, "topk": 70, "softmax_scale": 0.25}
_VARLEN: dict[str, Any] = {**_ONE, "lengths": ((3, 70), (2, 1)), "h_kv": 2, "group": 2, "ends": "clipped"}
_WRITE: dict[str, Any] = {"tokens": 2, "pages": 2, "page_size": 16}
_SCALED: dict[str, Any] = {"cache": "fp8_576", "scale_of_cache": 0.5}
_GATHER: dict[str, Any] = {"lengths": (2, 3), "starts": (0, 1), "pages": 3, "page_size": 16}
_ROWS: dict[str, Any] = {"heads": 9, "tokens": 2, "keys": 70, "outputs": "given"}
_PAGES: dict[str, Any] = {**_ROWS, "requests": 2, "tokens": 1, "page_size": 64}
_INDEX: dict[str, Any] = {"tokens": 2, "page_size": 16, "pages": 2, "rope": "interleaved", "hadamard": True}
_CASES: dict[str, tuple[BaseCase, ...]] = {
    "flash_mla_with_kvcache": (
        DenseDecodeCase(**_DENSE, s_q=2, window=40, window_sink=4, empty_lse=-math.inf),
        DenseDecodeCase(**_DENSE, s_q=2, outputs="given", batch_invariant=True, sinks="drawn"),
        DenseDecodeCase(**_DENSE | {"causal": False}, s_q=2, tree="drawn"),
        DenseDecodeCase(**_DENSE, s_q=2, operands=FP8),
        DenseDecodeCase(**_DENSE, tokens=(2, 1)),
        SparseDecodeCase(**_DECODE, **_CACHES, s_q=2),
    ),
    "flash_mla_sparse_fwd": (
        SparsePrefillCase(**_PREFILL, form="ragged", sinks="drawn", empty_lse=-math.inf),
        SparsePrefillCase(**_PREFILL, form="batched", lengths="drawn", indexer_topk=7, outputs="given"),
    ),
    "flash_attn_varlen_func": (
        DensePrefillCase(**_VARLEN, mask="random"),
        DensePrefillCase(**_VARLEN, outputs="given", empty_lse=-math.inf),
    ),
    "flash_attn_varlen_backward": (DensePrefillBackwardCase(**_VARLEN, outputs="given"),),
    "merge_states": (
        MergeStatesCase(states=9, tokens=3, h_q=2, head_dim=128, form="stacked"),
        MergeStatesCase(states=2, tokens=3, h_q=2, head_dim=128, outputs="given", empty_lse=-math.inf),
    ),
    "write_kv_cache": (CacheWriteCase(**_WRITE, cache="nope_528", power_of_two=True), CacheWriteCase(**_WRITE, **_SCALED)),
    "insert_kv_cache": (
        CacheInsertCase(**_WRITE, cache="nope_528", power_of_two=True, eps=1e-5),
        CacheInsertCase(**_WRITE, **_SCALED, kept="packed", eps=1e-5),
    ),
    "gather_kv_cache": (CacheGatherCase(**_GATHER, **_SCALED), CacheGatherCase(**_GATHER, cache="v41", outputs="given")),
    "fp8_mqa_logits": (MqaLogitsCase(**_ROWS, clean=False, columns=8),),
    "fp8_paged_mqa_logits": (MqaLogitsCase(**_PAGES, clean=False),),
    "indexer_topk": (IndexerTopkCase(**_PAGES, topk=20, slots=True),),
    "indexer_topk_prefill": (IndexerTopkCase(**_ROWS, topk=20, columns=60),),
    "topk_indices": (TopkIndicesCase(rows=2, columns=300, topk=20, outputs="given"),),
    "prepare_index_queries": (IndexWriteCase(**_INDEX, rows="queries", heads=3, outputs="given"),),
    "write_index_cache": (IndexWriteCase(**_INDEX, scale_format="ue8m0"),),
}
# Arguments that no case gives, or only their default, by place of the case.
_FLAGS: Arguments = {"dropout_p": 0.0, "deterministic": True, "is_varlen": False}
_MORE: dict[tuple[str, int], Arguments] = {
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
        {**base, "topk": 64, "is_fp8_kvcache": True},
        {**base, "cu_seqlens_q": torch.tensor([0, 2, 3]).int(), "total_q": 3},
    ]


def _packed(left_out: str, **more: Any) -> list[Arguments]:
    """Return the call of a packed form, without some arguments of flash_attn_varlen_func and with its own."""
    (given,) = calls_of("flash_attn_varlen_func")[1:]
    return [{**{name: value for name, value in given.items() if name not in left_out.split()}, **more, "head_dim_qk": 192}]


_WITHOUT_RECORD: dict[str, Callable[[], list[Arguments]]] = {
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
    return [{**with_own_memory(RightCall(case)), **_MORE.get((name, place), {})} for place, case in enumerate(_CASES[name])]
