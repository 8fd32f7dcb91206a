"""Calls of all public functions that take tensors, which together give every argument another value than its default.

Tensors are zeros: the calls are for devices that run nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import cute_mla
import cute_mla.cache
from cute_mla import indexer

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


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def codes(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def _plans() -> list[Arguments]:
    base = {"cache_seqlens": counts(70, 3), "num_q_tokens_per_head_k": 32, "num_heads_k": 1, "num_heads_q": 16}
    return [
        {**base, "window": 40, "window_sink": 4},
        {**base, "topk": 64, "is_fp8_kvcache": True},
        {**base, "cu_seqlens_q": counts(0, 2, 3), "total_q": 3},
    ]


def _dense(**changes: Any) -> Arguments:
    dtype = changes.pop("dtype", torch.bfloat16)
    arguments: Arguments = {
        "q": torch.zeros(2, 2, 16, 576, dtype=torch.bfloat16).to(dtype),
        "k_cache": torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16).to(dtype),
        "block_table": counts(0, 1, 2, 3).view(2, 2),
        "cache_seqlens": counts(70, 3),
        "head_dim_v": 512,
        "softmax_scale": 0.25,
        "causal": True,
    }
    if "cu_seqlens_q" in changes:
        arguments["q"] = arguments["q"].flatten(0, 1)[:3]
    return {**arguments, **changes}


def _plan_of(**options: Any) -> Arguments:
    plan = cute_mla.get_mla_metadata(counts(0, 0), 32, 1, 16, **options)
    return dict(zip(("tile_scheduler_metadata", "num_splits"), plan, strict=True))


def _sparse() -> Arguments:
    return {
        **_plan_of(topk=96),
        "q": bf16(2, 2, 16, 512),
        "k_cache": torch.zeros(4, 64, 1, 528, dtype=torch.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "is_fp8_kvcache": True,
        "indices": torch.zeros(2, 2, 64, dtype=torch.int32),
        "topk_length": counts(3, 64),
        "attn_sink": torch.zeros(16),
        "extra_k_cache": torch.zeros(4, 16, 1, 288, dtype=torch.uint8),
        "extra_indices_in_kvcache": torch.zeros(2, 2, 32, dtype=torch.int32),
        "extra_topk_length": counts(3, 32),
        "kv_format": "v41",
        "extra_kv_format": "v41_fp4",
    }


def _decodes() -> list[Arguments]:
    results = {"out": bf16(2, 2, 16, 512), "lse": torch.zeros(2, 16, 2), "workspace": torch.zeros(1 << 22, dtype=torch.uint8)}
    ragged = {"cu_seqlens_q": counts(0, 2, 3), "max_seqlen_q": 2}
    return [
        _dense(**_plan_of(window=40, window_sink=4), window=40, window_sink=4, empty_lse=-math.inf),
        _dense(**_plan_of(), **results, batch_invariant=True, attn_sink=torch.zeros(16)),
        _dense(**_plan_of(), causal=False, tree_mask=torch.zeros(2, 2, 1, dtype=torch.int32)),
        _dense(**_plan_of(), dtype=torch.float8_e4m3fn, descale_q=torch.ones(1), descale_k=torch.ones(1), kv_format="fp8_576"),
        _dense(**_plan_of(cu_seqlens_q=ragged["cu_seqlens_q"], total_q=3), **ragged),
        _sparse(),
    ]


def _prefills() -> list[Arguments]:
    base = {"q": bf16(2, 3, 16, 576), "indices": torch.zeros(2, 3, 1, 70, dtype=torch.int32), "sm_scale": 0.25, "d_v": 512}
    rows = {name: torch.zeros(2, 3, 16) for name in ("lse", "max_logits", "lse_indexer")}
    lengths = torch.zeros(2, 3, dtype=torch.int32)
    return [
        {**base, "kv": bf16(90, 1, 576), "kv_offsets": counts(0, 50, 90), "attn_sink": torch.zeros(16), "empty_lse": -math.inf},
        {**base, "kv": bf16(2, 90, 1, 576), "topk_length": lengths, "indexer_topk": 7, "out": bf16(2, 3, 16, 512), **rows},
    ]


def _varlen() -> Arguments:
    return {"cu_seqlens_qo": counts(0, 3, 5), "cu_seqlens_kv": counts(0, 70, 71), "max_seqlen_qo": 3, "max_seqlen_kv": 70}


def _flags() -> Arguments:
    flags = {"causal": True, "deterministic": True, "is_varlen": False}
    return {"dropout_p": 0.0, "softmax_scale": 0.25, **flags, "empty_lse": -math.inf}


def _varlens() -> list[Arguments]:
    base = {"q": bf16(5, 4, 192), "k": bf16(71, 2, 192), "v": bf16(71, 2, 128), **_varlen(), **_flags()}
    return [
        {**base, "key_mask": torch.zeros(5, 3, dtype=torch.int32)},
        {**base, "out": bf16(5, 4, 128), "lse": torch.zeros(5, 4)},
    ]


def _backwards() -> list[Arguments]:
    operands = {"dout": bf16(5, 4, 128), "q": bf16(5, 4, 192), "k": bf16(71, 2, 192), "v": bf16(71, 2, 128), "out": bf16(5, 4, 128)}
    results = {"dq": bf16(5, 4, 192), "dk": bf16(71, 2, 192), "dv": bf16(71, 2, 128), "workspace": torch.zeros(1 << 16, dtype=torch.uint8)}
    flags = {"softmax_scale": 0.25, "causal": True, "deterministic": False}
    return [{**operands, "lse": torch.zeros(5, 4), **_varlen(), **flags, **results}]


def _kvpacked() -> list[Arguments]:
    packed = {"q": bf16(5, 4, 192), "kv": bf16(71, 2, 320), "head_dim_qk": 192}
    return [{**packed, **_varlen(), **_flags(), "out": bf16(5, 4, 128), "lse": torch.zeros(5, 4)}]


def _qkvpacked() -> list[Arguments]:
    packed = {"qkv": bf16(5, 4, 512), "cu_seqlens": counts(0, 3, 5), "max_seqlen": 3, "head_dim_qk": 192}
    return [{**packed, **_flags(), "out": bf16(5, 4, 128), "lse": torch.zeros(5, 4)}]


def _merges() -> list[Arguments]:
    results = {"out": bf16(3, 2, 128), "lse": torch.zeros(3, 2), "empty_lse": -math.inf}
    stacked = {"outs": bf16(9, 3, 2, 128), "lses": torch.zeros(9, 3, 2)}
    return [stacked, {"outs": list(bf16(2, 3, 2, 128)), "lses": list(torch.zeros(2, 3, 2)), **results}]


def _writes() -> list[Arguments]:
    base = {"kv_c": bf16(2, 512), "slot_mapping": torch.tensor([17, -1])}
    paged, scaled = torch.zeros(2, 16, 1, 528, dtype=torch.uint8), {"k_cache": codes(2, 16, 1, 576), "descale_k": torch.ones(1)}
    return [
        {**base, "k_pe": None, "k_cache": paged, "power_of_two": True, "kv_format": "nope_528"},
        {**base, "k_pe": bf16(2, 64), **scaled},
    ]


def _inserts() -> list[Arguments]:
    more = {"norm_weight": bf16(512), "eps": 1e-5}
    rotary = {"cos_sin": torch.zeros(5, 64), "positions": torch.tensor([4, 1]), "q_pe": bf16(2, 3, 64), "keys": bf16(2, 576)}
    plain, scaled = _writes()
    return [{**plain, **more, "q_pe": None}, {**scaled, **more, **rotary}]


def _gathers() -> list[Arguments]:
    base = {"block_table": counts(1, 2).view(2, 1), "cu_seqlens": counts(0, 2, 5), "rows": 5, "starts": counts(0, 1)}
    return [
        {**base, "k_cache": codes(3, 16, 1, 576), "descale_k": torch.ones(1), "dtype": torch.bfloat16},
        {**base, "k_cache": torch.zeros(3, 16, 1, 528, dtype=torch.uint8), "kv_format": "v41", "out": bf16(5, 512)},
    ]


def _row_logits() -> Arguments:
    bounds = {"ks": counts(0, 0), "ke": counts(70, 3)}
    return {"q": codes(2, 9, 128), "kv": (codes(70, 128), torch.zeros(70)), "weights": torch.zeros(2, 9), **bounds}


def _page_logits(cache: str) -> Arguments:
    table = {"context_lens": counts(70, 3), "block_table": counts(1, 2, 0, 0).view(2, 2)}
    return {"q": codes(2, 1, 9, 128), "weights": torch.zeros(2, 9), cache: torch.zeros(3, 64, 1, 132, dtype=torch.uint8), **table}


def _topks() -> Arguments:
    return {"topk": 20, "out": torch.zeros(2, 20, dtype=torch.int32), "workspace": torch.zeros(1 << 12, dtype=torch.uint8)}


def _index_tables() -> Arguments:
    return {"cos_sin": torch.zeros(5, 64), "positions": torch.tensor([4, 1]), "rope": "interleaved", "hadamard": True}


def _index_keys() -> list[Arguments]:
    cache = {"index_cache": torch.zeros(2, 16, 1, 132, dtype=torch.uint8), "slot_mapping": torch.tensor([17, -1])}
    norm = {"norm_weight": torch.zeros(128), "norm_bias": torch.zeros(128), "eps": 1e-5}
    return [{"k": bf16(2, 128), **cache, **norm, **_index_tables(), "scale_format": "ue8m0"}]


def _index_queries() -> list[Arguments]:
    results = {"out": codes(2, 3, 128), "out_weights": torch.zeros(2, 3)}
    return [{"q": bf16(2, 3, 128), "weights": torch.zeros(2, 3), **_index_tables(), **results}]


_MADE: dict[str, Callable[[], list[Arguments]]] = {
    "get_mla_metadata": _plans,
    "flash_mla_with_kvcache": _decodes,
    "flash_mla_sparse_fwd": _prefills,
    "flash_attn_varlen_func": _varlens,
    "flash_attn_varlen_backward": _backwards,
    "flash_attn_varlen_kvpacked_func": _kvpacked,
    "flash_attn_varlen_qkvpacked_func": _qkvpacked,
    "merge_states": _merges,
    "write_kv_cache": _writes,
    "insert_kv_cache": _inserts,
    "gather_kv_cache": _gathers,
    "fp8_mqa_logits": lambda: [{**_row_logits(), "clean_logits": False, "max_seqlen_k": 8, "out": torch.zeros(2, 8)}],
    "fp8_paged_mqa_logits": lambda: [
        {**_page_logits("cache"), "metadata": counts(0), "max_context_len": 70, "clean_logits": False, "out": torch.zeros(2, 70)}
    ],
    "get_paged_mqa_logits_metadata": lambda: [{"context_lens": counts(70, 3), "block_kv": 64, "num_sms": 4}],
    "indexer_topk": lambda: [{**_page_logits("index_cache"), **_topks(), "slots": True}],
    "indexer_topk_prefill": lambda: [{**_row_logits(), **_topks(), "max_seqlen_k": 60}],
    "topk_indices": lambda: [{"logits": torch.zeros(2, 300), "lengths": counts(300, 7), "topk": 20, "out": _topks()["out"]}],
    "prepare_index_queries": _index_queries,
    "write_index_cache": _index_keys,
}


def calls_of(name: str) -> list[Arguments]:
    """Return the arguments of the calls of a public function. KeyError if it has none."""
    return _MADE[name]()
