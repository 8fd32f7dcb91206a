"""What is supported: one answer for engines that ask (is_supported) and for the functions that check their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .cache import page_size_problem
from .spec import dense_prefill, sparse_prefill
from .spec.arch import ALIASES, ARCHS
from .spec.dense_decode import MAX_KEYS
from .spec.mla import D_QK, D_V, DTYPES, MAX_HEADS
from .tensors import DTYPE_NAMES, is_flag, is_integer, shown

OPS = ("dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill")
CACHE_OPS = ("cache_write", "cache_gather")

MAX_QUERY_TOKENS = 1 << 24  # per request; query rows are numbered in 32 bits
MAX_GRID_TOKENS = 65_535  # of sparse decode, whose grid has them along its second dimension
_MAX_HEADS_OF = {"dense_prefill": dense_prefill.MAX_ITEMS}  # where each head is work of its own


def heads_problem(h_q: int, h_kv: int, op: str = "dense_decode") -> str | None:
    """Why these numbers of query and KV heads are not supported, or None if they are."""
    problem = _between("h_q", 1, _MAX_HEADS_OF.get(op, MAX_HEADS))(h_q)
    if problem is not None:
        return problem
    if op in ("sparse_decode", "sparse_prefill") and not (is_integer(h_kv) and h_kv == 1):
        return f"h_kv is {shown(h_kv)}; supported with indices: 1"
    if not is_integer(h_kv) or h_kv < 1 or h_q % h_kv:
        return f"h_kv is {shown(h_kv)} with h_q {h_q}; supported: divisors of h_q"
    return None


def _one_of(name: str, *supported: Any) -> Callable[[Any], str | None]:
    def problem(value: Any) -> str | None:
        if any(_is_same(value, known) for known in supported):
            return None
        return f"{name} is {shown(value)}; supported: {', '.join(map(repr, supported))}"

    return problem


def _is_same(value: Any, known: bool | int | str | None) -> bool:
    """Whether an argument is this one: of equal kind, so that 0 is not False."""
    if isinstance(known, bool):
        return is_flag(value) and bool(value) == known
    if isinstance(known, int):
        return is_integer(value) and bool(value == known)
    return value is None if known is None else isinstance(value, str) and value == known


def _between(name: str, least: int, most: int) -> Callable[[Any], str | None]:
    def problem(value: Any) -> str | None:
        return None if is_integer(value) and least <= value <= most else f"{name} is {shown(value)}; supported: {least} to {most}"

    return problem


def _dtype_name(value: Any) -> Any:
    return DTYPE_NAMES.get(value, str(value)) if isinstance(value, torch.dtype) else value


def _dtype_of(*supported: str) -> Callable[[Any], str | None]:
    return lambda value: _one_of("dtype", *supported)(_dtype_name(value))


E4M3 = "e4m3"  # of queries, where the cache is e4m3 too


_DENSE_DECODE: dict[str, Callable[[Any], str | None]] = {
    "dtype": _dtype_of(*DTYPES, E4M3),
    "h_q": _between("h_q", 1, MAX_HEADS),
    "h_kv": _between("h_kv", 1, MAX_HEADS),
    "s_q": _between("s_q", 1, MAX_QUERY_TOKENS),
    "head_dim": _one_of("head_dim", D_QK),
    "head_dim_v": _one_of("head_dim_v", D_V),
    "page_size": page_size_problem,
    "causal": _one_of("causal", False, True),
    "batch_invariant": _one_of("batch_invariant", False, True),
    "fp8_kvcache": _one_of("fp8_kvcache", False, True),
    "attn_sink": _one_of("attn_sink", False),
    "extra_cache": _one_of("extra_cache", False),
    "topk_length": _one_of("topk_length", False),
    "topk": _one_of("topk", None),
    "kv_offsets": _one_of("kv_offsets", False),
}
_SPARSE_DECODE: dict[str, Callable[[Any], str | None]] = {
    **_DENSE_DECODE,
    "dtype": _dtype_of(*DTYPES),
    "h_kv": _one_of("h_kv", 1),
    "s_q": _between("s_q", 1, MAX_GRID_TOKENS),
    "head_dim": _one_of("head_dim", D_QK, D_V),
    "page_size": _between("page_size", 1, MAX_KEYS),
    "causal": _one_of("causal", False),
    **{name: _one_of(name, False, True) for name in ("fp8_kvcache", "attn_sink", "extra_cache", "topk_length")},
    "topk": _between("topk", 0, MAX_KEYS),
}
_DENSE_PREFILL: dict[str, Callable[[Any], str | None]] = {
    **_DENSE_DECODE,
    "dtype": _dtype_of(*DTYPES),
    "fp8_kvcache": _one_of("fp8_kvcache", False),
    **{name: _between(name, 1, dense_prefill.MAX_ITEMS) for name in ("h_q", "h_kv")},
    "s_q": _between("s_q", 1, dense_prefill.MAX_TOKENS),
    "head_dim": _one_of("head_dim", *dense_prefill.HEAD_DIMS),
    "head_dim_v": _one_of("head_dim_v", dense_prefill.D_V),
    "page_size": _one_of("page_size", None),
}
_SPARSE_PREFILL: dict[str, Callable[[Any], str | None]] = {
    **_SPARSE_DECODE,
    "s_q": _between("s_q", 1, sparse_prefill.MAX_TOKENS),
    "head_dim": _one_of("head_dim", *sparse_prefill.HEAD_DIMS),
    "page_size": _one_of("page_size", None),
    **{name: _one_of(name, False) for name in ("fp8_kvcache", "extra_cache")},
    "kv_offsets": _one_of("kv_offsets", False, True),
}
_CACHE_ROWS: dict[str, Callable[[Any], str | None]] = {
    **_DENSE_DECODE,
    "dtype": _dtype_of(*DTYPES),
    **{name: _one_of(name, None) for name in ("h_q", "s_q", "head_dim_v")},
    "h_kv": _one_of("h_kv", 1),
    "head_dim": _one_of("head_dim", D_QK, D_V),
    "page_size": _between("page_size", 1, MAX_KEYS),
    "causal": _one_of("causal", False),
}
_FEATURES_OF = {
    **dict.fromkeys(CACHE_OPS, _CACHE_ROWS),
    "dense_decode": _DENSE_DECODE,
    "sparse_decode": _SPARSE_DECODE,
    "dense_prefill": _DENSE_PREFILL,
    "sparse_prefill": _SPARSE_PREFILL,
}

FEATURES = tuple(_DENSE_DECODE)


def check_op(op: Any, ops: tuple[str, ...] = OPS) -> None:
    """ValueError unless it is the name of an op."""
    if not isinstance(op, str) or op not in ops:
        raise ValueError(f"op is {shown(op)}; supported: {', '.join(ops)}")


def is_supported(op: str, arch: str, **features: Any) -> tuple[bool, str]:
    """Whether this version has a kernel for an op on an architecture with these features.

    op: "dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill"; "cache_write", "cache_gather".
    arch: "sm90", "sm100", or "sm103" (B300), which the cubins of sm100 serve.
    features, any of them, each with the value a call would have:
        dtype            "bf16", "fp16" or the torch dtype, of queries, cache and output; in dense decode over an FP8 cache also
                         "e4m3", of queries; of cache_write and cache_gather, of the keys outside the cache
        h_q, h_kv, s_q   query heads, KV heads, query tokens per request
        head_dim, head_dim_v   columns of q, and of out: 576 (or 512, of an FP8 cache in sparse decode and in sparse prefill), 512;
                         in dense prefill 192 or 128, and 128; of a key in cache_write and cache_gather, 576 or 512, and None
        page_size        keys of a page; None in prefill, whose keys have no pages
        causal, batch_invariant        True or False; prefill is always batch invariant, without being asked
        fp8_kvcache, attn_sink, extra_cache, topk_length, kv_offsets   True if the call passes such an argument
        topk             indices of a query token; None without indices

    Returns (True, what stands behind the kernels: whether they have run on hardware, and what was done instead) or (False,
    the reason), also for a value that no call could have. ValueError for a name that is none of the above. Says nothing of the
    machine: whether there is a device, a driver, or a build.
    """
    check_op(op, (*OPS, *CACHE_OPS))
    if not isinstance(arch, str) or (arch not in ARCHS and arch not in ALIASES):
        raise ValueError(f"arch is {shown(arch)}; supported: {', '.join((*ARCHS, *ALIASES))}")
    for feature in features:
        if feature not in FEATURES:
            raise ValueError(f"feature {feature!r} is unknown; supported: {', '.join(FEATURES)}")
    for feature, value in features.items():
        problem = _FEATURES_OF[op][feature](value)
        if problem is not None:
            return False, problem
    problem = _problem_together(op, features)
    if problem is not None:
        return False, problem
    return True, ARCHS[ALIASES.get(arch, arch)].proof


def _problem_together(op: str, features: dict[str, Any]) -> str | None:
    """Why features that are each supported are not supported together, or None if they are."""
    if "h_q" in features and "h_kv" in features:
        problem = heads_problem(features["h_q"], features["h_kv"], op)
        if problem is not None:
            return problem
    fp8 = features.get("fp8_kvcache")
    if op == "dense_decode" and fp8 and features.get("h_kv", 1) != 1:
        return f"h_kv is {features['h_kv']} with an FP8 cache; supported: 1"
    if op == "dense_decode" and fp8 is False and _dtype_name(features.get("dtype")) == E4M3:
        return "dtype is e4m3 without an FP8 cache; supported: bf16, fp16"
    if op == "sparse_decode" and fp8 and _dtype_name(features.get("dtype")) == "fp16":
        return "dtype is fp16 with an FP8 cache; supported: bf16"
    if op in ("sparse_decode", *CACHE_OPS) and fp8 is False and features.get("head_dim") == D_V:
        return f"head_dim is {D_V} without an FP8 cache; supported: {D_QK}"
    return None
