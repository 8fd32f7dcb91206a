"""is_supported: which calls this version has kernels for."""

from __future__ import annotations

import re
from typing import Any

import torch

from ..ops.arguments import short_repr
from ..ops.limits import (
    BACKWARD_OPS,
    CACHE_OPS,
    INDEXER_OPS,
    MAX_GRID_TOKENS,
    MAX_QUERY_TOKENS,
    OPS,
    SPARSE_BACKWARD,
    Limit,
    between,
    check_op,
    heads_error,
    one_of,
    page_size_error,
)
from ..ops.tensor_spec import DTYPE_NAMES
from ..spec import (
    cache_insert,
    dense_prefill,
    dense_prefill_dq,
    head_sums,
    index_write,
    masked_prefill,
    mqa_logits,
    sparse_prefill,
    topk_indices,
)
from ..spec.arch import ALIASES, ARCHS, Arch
from ..spec.cache_format import FP8_656, CacheFormat
from ..spec.cache_rows import CACHED, FP8_576, KNOWN, LATENTS, key_types
from ..spec.dense_decode import (
    FEW_HEADS,
    FP8,
    FP8_CACHE,
    LATENT,
    MAX_KEYS,
    DenseDecodeProblem,
    key_columns,
    reads_by_address,
    takes_key_masks,
)
from ..spec.kernel_ops import ARCHS_OF
from ..spec.mla import BF16, D_QK, D_V, DENSE_DIMS, DENSE_VALUE_COLUMNS, DTYPES, FP16, MAX_HEADS, key_dtypes
from ..spec.sparse_decode import DECODED, DECODED_BESIDE, few_heads_caches, serving_kernels
from ..spec.split_plan import TILE_KEYS


def _dtype_name(value: Any) -> Any:
    return DTYPE_NAMES.get(value, str(value)) if isinstance(value, torch.dtype) else value


def _dtype_of(*supported: str) -> Limit:
    return lambda value: one_of("dtype", *supported)(_dtype_name(value))


MASKED_D_V = dense_prefill.HEAD_DIMS[masked_prefill.HEAD_DIMS[0]]
_FEW_HEADS = "; the kernels for up to {} heads, in dense decode query rows, with keys on M"
E4M3 = "e4m3"  # dtype of queries over an e4m3 cache
_DENSE_DECODE: dict[str, Limit] = {
    "dtype": _dtype_of(*DTYPES, E4M3),
    "h_q": between("h_q", 1, MAX_HEADS),
    "h_kv": between("h_kv", 1, MAX_HEADS),
    "s_q": between("s_q", 1, MAX_QUERY_TOKENS),
    "head_dim": one_of("head_dim", *DENSE_DIMS),
    "head_dim_v": one_of("head_dim_v", *DENSE_VALUE_COLUMNS),
    "page_size": page_size_error,
    "causal": one_of("causal", False, True),
    "batch_invariant": one_of("batch_invariant", False, True),
    "fp8_kvcache": one_of("fp8_kvcache", False, True),
    "attn_sink": one_of("attn_sink", False, True),
    "tree_mask": one_of("tree_mask", False, True),
    "window": one_of("window", False, True),
    "key_mask": one_of("key_mask", False),
    "extra_cache": one_of("extra_cache", False),
    "topk_length": one_of("topk_length", False),
    "topk": one_of("topk", None),
    "indexer_topk": one_of("indexer_topk", 0),
    "kv_offsets": one_of("kv_offsets", False),
    "cu_seqlens_q": one_of("cu_seqlens_q", False, True),
    "kv_format": one_of("kv_format", None, *(cache.name for cache in LATENTS.values()), FP8_576.name),
    "extra_kv_format": one_of("extra_kv_format", None),
}
_SPARSE_DECODE: dict[str, Limit] = {
    **_DENSE_DECODE,
    "dtype": _dtype_of(BF16),
    "h_kv": one_of("h_kv", 1),
    "s_q": between("s_q", 1, MAX_GRID_TOKENS),
    "head_dim": one_of("head_dim", D_QK, D_V),
    "head_dim_v": one_of("head_dim_v", D_V),
    "page_size": between("page_size", 1, MAX_KEYS),
    "causal": one_of("causal", False),
    **{name: one_of(name, False) for name in ("tree_mask", "window")},
    **{name: one_of(name, False, True) for name in ("fp8_kvcache", "attn_sink", "extra_cache", "topk_length")},
    "topk": between("topk", 0, MAX_KEYS),
    "kv_format": one_of("kv_format", None, *DECODED),
    "extra_kv_format": one_of("extra_kv_format", None, *DECODED_BESIDE),
}
_DENSE_PREFILL: dict[str, Limit] = {
    **_DENSE_DECODE,
    "dtype": _dtype_of(*DTYPES),
    **{name: one_of(name, False) for name in ("fp8_kvcache", "attn_sink", "tree_mask", "window")},
    "key_mask": one_of("key_mask", False, True),
    **{name: between(name, 1, dense_prefill.MAX_ITEMS) for name in ("h_q", "h_kv")},
    "s_q": between("s_q", 1, dense_prefill.MAX_TOKENS),
    "head_dim": one_of("head_dim", *dense_prefill.HEAD_DIMS),
    "head_dim_v": one_of("head_dim_v", *dict.fromkeys(dense_prefill.HEAD_DIMS.values())),
    **{name: one_of(name, None) for name in ("page_size", "kv_format")},
    "cu_seqlens_q": one_of("cu_seqlens_q", False),
}
_DENSE_PREFILL_BACKWARD: dict[str, Limit] = {
    **_DENSE_PREFILL,
    "dtype": _dtype_of(dense_prefill_dq.DTYPE),
    "key_mask": one_of("key_mask", False),
}
_SPARSE_PREFILL: dict[str, Limit] = {
    **_SPARSE_DECODE,
    "s_q": between("s_q", 1, sparse_prefill.MAX_TOKENS),
    "head_dim": one_of("head_dim", *sparse_prefill.HEAD_DIMS),
    **{name: one_of(name, None) for name in ("page_size", "kv_format", "extra_kv_format")},
    **{name: one_of(name, False) for name in ("fp8_kvcache", "extra_cache", "cu_seqlens_q")},
    "kv_offsets": one_of("kv_offsets", False, True),
    "indexer_topk": between("indexer_topk", 0, MAX_KEYS),
}
_SPARSE_PREFILL_BACKWARD: dict[str, Limit] = {**_SPARSE_PREFILL, "indexer_topk": one_of("indexer_topk", 0)}
_CACHE_ROWS: dict[str, Limit] = {
    **_DENSE_DECODE,
    "dtype": _dtype_of(*DTYPES),
    **{name: one_of(name, None) for name in ("h_q", "s_q", "head_dim_v")},
    "h_kv": one_of("h_kv", 1),
    "head_dim": one_of("head_dim", *DENSE_DIMS),
    "page_size": between("page_size", 1, MAX_KEYS),
    **{name: one_of(name, False) for name in ("causal", "attn_sink", "tree_mask", "window", "cu_seqlens_q")},
    "kv_format": one_of("kv_format", None, *CACHED),
}
_TOPK_INDICES: dict[str, Limit] = {
    **{name: one_of(name, None) for name in _DENSE_DECODE},
    **{
        name: one_of(name, False)
        for name in (
            *("causal", "fp8_kvcache", "attn_sink", "tree_mask", "window", "key_mask", "extra_cache", "topk_length", "kv_offsets"),
            "cu_seqlens_q",
        )
    },
    "dtype": _dtype_of(topk_indices.DTYPE),
    "topk": between("topk", 0, topk_indices.MAX_TOPK),
    "batch_invariant": one_of("batch_invariant", False, True),
}
_MQA_LOGITS: dict[str, Limit] = {
    **_TOPK_INDICES,
    "dtype": _dtype_of(mqa_logits.DTYPE),
    "h_q": between("h_q", 1, mqa_logits.MAX_HEADS),
    "h_kv": one_of("h_kv", 1),
    "s_q": between("s_q", 1, MAX_QUERY_TOKENS),
    "head_dim": one_of("head_dim", mqa_logits.COLUMNS),
    "page_size": one_of("page_size", None, *mqa_logits.PAGE_SIZES),
    "topk": one_of("topk", None),
}
_INDEX_WRITE: dict[str, Limit] = {
    **_MQA_LOGITS,
    "dtype": _dtype_of(index_write.DTYPE),
    "s_q": one_of("s_q", None),
}
_HEAD_SUMS: dict[str, Limit] = {
    **_SPARSE_PREFILL_BACKWARD,
    "s_q": between("s_q", 1, head_sums.MAX_TOKENS),
    "head_dim": one_of("head_dim", *(config.columns for config in head_sums.closed_variants())),
    "head_dim_v": one_of("head_dim_v", None),
}
_INDEXER_BACKWARD: dict[str, Limit] = {
    **_HEAD_SUMS,
    "h_q": between("h_q", 1, head_sums.INDEX_HEADS),
    "head_dim": one_of("head_dim", head_sums.INDEX_COLUMNS),
    "attn_sink": one_of("attn_sink", False),
}
_FEATURES_OF = {
    **dict.fromkeys(CACHE_OPS, _CACHE_ROWS),
    "cache_insert": {**_CACHE_ROWS, "h_q": between("h_q", 1, MAX_HEADS)},
    "dense_decode": _DENSE_DECODE,
    "sparse_decode": _SPARSE_DECODE,
    "dense_prefill": _DENSE_PREFILL,
    "dense_prefill_backward": _DENSE_PREFILL_BACKWARD,
    "sparse_prefill": _SPARSE_PREFILL,
    SPARSE_BACKWARD: _SPARSE_PREFILL_BACKWARD,
    "topk_indices": _TOPK_INDICES,
    "mqa_logits": _MQA_LOGITS,
    "index_write": _INDEX_WRITE,
    "indexer_topk": {**_MQA_LOGITS, "topk": _TOPK_INDICES["topk"]},
    "head_sums": _HEAD_SUMS,
    "indexer_backward": _INDEXER_BACKWARD,
}
FEATURES = tuple(_DENSE_DECODE)
# By op and columns (of q, of out), where 16-bit types differ
_DTYPES_OF_COLUMNS: dict[str, dict[tuple[int, int | None], tuple[str, ...]]] = {
    "dense_decode": {(d_qk, dims.latent): key_dtypes(d_qk) for d_qk, dims in DENSE_DIMS.items()},
    "dense_prefill": {dims: dense_prefill.head_dtypes(dims[0]) for dims in dense_prefill.HEAD_DIMS.items()},
    "cache_insert": {(cache.d_qk, None): cache_insert.key_types(cache) for cache in LATENTS.values()},
}


def is_supported(op: str, arch: str, **features: Any) -> tuple[bool, str]:
    """Return whether this version has a kernel for an op on an architecture with these features.

    op: "dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill"; "dense_prefill_backward", "sparse_prefill_backward";
    "cache_write", "cache_gather"; "cache_insert", which is insert_kv_cache; "topk_indices", which has the features dtype, topk and
    batch_invariant alone; "mqa_logits", fp8_mqa_logits and fp8_paged_mqa_logits; "indexer_topk", also of indexer_topk_prefill;
    "index_write", write_index_cache and prepare_index_queries; "head_sums", attention_head_sums and with a head_dim of 128
    indexer_scores; "indexer_backward".
    arch: "sm90", "sm100", or "sm103" (B300), which the cubins of sm100 serve; "sm120" or "sm121" for all but gradients. Other compute
    capabilities, such as "sm80", have no kernels.
    features: any of these, each with the value that a call would have
        dtype            "bf16", "fp16" or the torch dtype of queries, cache and output; in dense decode over an FP8 cache queries may
                         be "bf16" or "e4m3"; in cache_write and cache_gather, dtype of the keys outside the cache; "fp32" in topk_indices;
                         "e4m3" in mqa_logits and indexer_topk, "bf16" in index_write, where it is that of keys and queries before
        h_q, h_kv, s_q   query heads, KV heads, query tokens per request
        head_dim         columns of q: in dense decode 576, over a 16-bit cache also 512, 320 or 1088; in sparse decode
                         576, or 512 with an FP8 cache; 576 or 512 in sparse prefill; 192, 128 or 256 in dense prefill, and in its
                         backward pass; columns of a key in cache_write, cache_gather and cache_insert: 576, 512, 320 or 1088; 128 in
                         mqa_logits, indexer_topk and indexer_backward; 576, 512 or 128 in head_sums
        head_dim_v       columns of out: 512, or in dense decode 256 with head_dim 320 and 1024 with 1088; 128 in dense prefill, or
                         256 with a head_dim of 256; None in cache_write, cache_gather, head_sums and indexer_backward
        page_size        keys of a page; None in prefill, whose keys have no pages, and of logits of keys in a row
        causal, batch_invariant        True or False; prefill is always batch invariant, without being asked
        fp8_kvcache, attn_sink, tree_mask, window, key_mask, extra_cache, topk_length, kv_offsets, cu_seqlens_q
                         True if the call passes such an argument
        topk             indices of a query token; None without indices; in topk_indices the positions of a row
        indexer_topk     the first indices, over which lse_indexer is asked for; 0: it is not
        kv_format, extra_kv_format     names of the formats of the cache and of the extra cache; None: dtype and bytes a token decide

    Returns (True, the verification status of the kernels: whether they have run on hardware, and how else they were checked; and whether
    they are those for few heads) or
    (False, the reason), also for a value that no call could have. Raises ValueError for an unknown op or feature, and for an arch that is
    not "sm" with digits. The answer does not depend on the machine: its device, driver or build.
    """
    check_op(op, (*OPS, *BACKWARD_OPS, SPARSE_BACKWARD, *CACHE_OPS, *INDEXER_OPS))
    other_arch = f"arch is {short_repr(arch)}; supported: {', '.join((*ARCHS, *ALIASES))}"
    if not isinstance(arch, str) or not re.fullmatch("sm[0-9]+", arch):
        raise ValueError(other_arch)
    for feature in features:
        if feature not in FEATURES:
            raise ValueError(f"feature {feature!r} is unknown; supported: {', '.join(FEATURES)}")
    if arch not in ARCHS and arch not in ALIASES:
        return False, other_arch
    for feature, value in features.items():
        error = _FEATURES_OF[op][feature](value)
        if error is not None:
            return False, error
    error = _conflict(op, features) or _mask_conflict(features)
    if error is not None:
        return False, error
    known = ARCHS[ALIASES.get(arch, arch)]
    error = _arch_conflict(op, known, features)
    if error is not None:
        return False, error
    few = _few_heads(op, known, features)
    return True, known.proof + (_FEW_HEADS.format(few) if few else "")


def _arch_conflict(op: str, arch: Arch, features: dict[str, Any]) -> str | None:
    """Return why an op, or features of it, are not supported on one of the architectures, or None if they are."""
    if arch not in ARCHS_OF[op]:
        return f"arch is {arch.name}; supported for {op}: {', '.join(known.name for known in ARCHS_OF[op])}"
    if op == "dense_decode":
        columns = key_columns(arch)
        formats = (None, *(LATENTS[each].name for each in columns), FP8_576.name)
        values = tuple(dict.fromkeys(DENSE_DIMS[each].latent for each in columns))
        error = _lacking(arch, features, {"head_dim": columns, "head_dim_v": values, "kv_format": formats})
        return error or _cache_conflict(arch, features)
    return None


def _lacking(arch: Arch, features: dict[str, Any], supported: dict[str, tuple[Any, ...]]) -> str | None:
    """Return which feature has a value that one of the architectures does not support, or None if none has."""
    for name, values in supported.items():
        if features.get(name) is not None and features[name] not in values:
            return f"{name} is {features[name]} on {arch.name}; supported: {', '.join(map(str, values))}"
    return None


def _cache_conflict(arch: Arch, features: dict[str, Any]) -> str | None:
    """Return why dense decode on one of the architectures does not support the cache, or None if it does."""
    if features.get("h_kv", 1) != 1 and reads_by_address(arch, LATENT):
        return f"h_kv is {features['h_kv']} on {arch.name}; supported: 1"
    return None


def _dense_operands(features: dict[str, Any]) -> str | None:
    """Return the operands of dense decode for which kernels for few heads may be asked; None: there are none, or features leave it open."""
    dtype = _dtype_name(features.get("dtype"))
    if features.get("fp8_kvcache") or features.get("kv_format") == FP8_576.name:
        return {BF16: FP8_CACHE, E4M3: FP8}.get(str(dtype))
    masked = features.get("tree_mask") or features.get("window")
    return LATENT if dtype == BF16 and features.get("head_dim") == D_QK and not masked else None


def _few_heads(op: str, arch: Arch, features: dict[str, Any]) -> int:
    """Return the most heads or query rows of the kernels for few heads; 0 if calls with these features do not take one."""
    if op == "dense_decode":
        operands = _dense_operands(features)
        if operands is None:
            return 0
        invariant = bool(features.get("batch_invariant"))
        sizes = 1, features.get("s_q", 1), features.get("h_q", FEW_HEADS + 1), features.get("h_kv") or 1
        return DenseDecodeProblem(arch, BF16, *sizes, TILE_KEYS, 1, batch_invariant=invariant, operands=operands).few_rows
    if op != "sparse_decode":
        return 0
    first, second = DECODED.get(str(features.get("kv_format"))), DECODED_BESIDE.get(str(features.get("extra_kv_format")))
    kernels = serving_kernels(first, second) if first else FP8_656.name if features.get("fp8_kvcache") else None
    return FEW_HEADS if features.get("h_q", FEW_HEADS + 1) <= FEW_HEADS and kernels in few_heads_caches(arch) else 0


def _conflict(op: str, features: dict[str, Any]) -> str | None:
    """Return why features that are supported one by one are not supported together, or None if they are."""
    if "h_q" in features and "h_kv" in features:
        error = heads_error(features["h_q"], features["h_kv"], op)
        if error is not None:
            return error
    error = _format_conflict(op, features)
    if error is not None:
        return error
    if "topk" in features and features.get("indexer_topk", 0) > (features["topk"] or 0):
        return f"indexer_topk is {features['indexer_topk']} with topk {features['topk']}; supported: 0 to topk"
    d_qk, d_v = (features.get(name) for name in ("head_dim", "head_dim_v"))
    if op in ("dense_prefill", "dense_prefill_backward") and d_qk is not None and d_v is not None and dense_prefill.HEAD_DIMS[d_qk] != d_v:
        return f"head_dim_v is {d_v} with head_dim {d_qk}; supported: {dense_prefill.HEAD_DIMS[d_qk]}"
    fp8 = features.get("fp8_kvcache")
    if op == "dense_decode" and fp8 and features.get("h_kv", 1) != 1:
        return f"h_kv is {features['h_kv']} with an FP8 cache; supported: 1"
    if op == "dense_decode" and fp8 is False and _dtype_name(features.get("dtype")) == E4M3:
        return "dtype is e4m3 without an FP8 cache; supported: bf16, fp16"
    if fp8 and _dtype_name(features.get("dtype")) == FP16:
        return f"dtype is fp16 with an FP8 cache; supported: {BF16}{f', {E4M3}' if op == 'dense_decode' else ''}"
    if op == "head_sums" and d_qk == head_sums.INDEX_COLUMNS:
        for name in ("h_q", "attn_sink"):
            error = _INDEXER_BACKWARD[name](features[name]) if name in features else None
            if error is not None:
                return error.replace(";", f" with head_dim {d_qk};")
    if op == "sparse_decode" and fp8 is False and features.get("head_dim") == D_V:
        return f"head_dim is {D_V} without an FP8 cache; supported: {D_QK}"
    return _columns_conflict(op, features) or _dtype_conflict(op, features)


def _dtype_conflict(op: str, features: dict[str, Any]) -> str | None:
    """Return why the dtype is not supported with the columns of keys or heads, or None if it is."""
    dtype = _dtype_name(features.get("dtype"))
    kinds = _DTYPES_OF_COLUMNS.get(op, {})
    for place, name in enumerate(("head_dim", "head_dim_v")):
        columns = features.get(name)
        supported = {known for pair, dtypes in kinds.items() if pair[place] == columns for known in dtypes}
        if dtype in DTYPES and supported and dtype not in supported:
            return f"dtype is {dtype} with {name} {columns}; supported: {', '.join(sorted(supported))}"
    return None


def _mask_conflict(features: dict[str, Any]) -> str | None:
    """Return why a mask or a window is not supported with the other features, or None if all are."""
    if features.get("tree_mask") and features.get("window"):
        return "window is True with tree_mask; supported: False"
    fp8 = features.get("fp8_kvcache") or _dtype_name(features.get("dtype")) == E4M3
    for name in ("tree_mask", "window"):
        if features.get(name) and fp8 and not takes_key_masks(FP8_CACHE):
            return f"{name} is True with an FP8 cache; supported: False"
    if features.get("window") and features.get("cu_seqlens_q") and features.get("causal") is False:
        return "window is True with cu_seqlens_q and causal False; supported: causal True"
    if features.get("key_mask"):
        for name, supported in (("dtype", (masked_prefill.DTYPE,)), ("head_dim", masked_prefill.HEAD_DIMS), ("head_dim_v", (MASKED_D_V,))):
            value = _dtype_name(features.get(name))
            if value is not None and value not in supported:
                return f"{name} is {value} with key_mask; supported: {', '.join(map(str, supported))}"
    return None


def _columns_conflict(op: str, features: dict[str, Any]) -> str | None:
    """Return why the columns of a key are not supported with the other features, or None if they are."""
    columns, columns_v, fp8 = features.get("head_dim"), features.get("head_dim_v"), features.get("fp8_kvcache")
    if op == "dense_decode" and columns is not None:
        if columns_v is not None and columns_v != DENSE_DIMS[columns].latent:
            return f"head_dim_v is {columns_v} with head_dim {columns}; supported: {DENSE_DIMS[columns].latent}"
        if columns != D_QK and (fp8 or _dtype_name(features.get("dtype")) == E4M3):
            return f"head_dim is {columns} with an FP8 cache; supported: {D_QK}"
    if op in CACHE_OPS and fp8 and columns is not None:
        quantised = tuple(dict.fromkeys(cache.d_qk for cache in CACHED.values() if cache.quantised))
        if columns not in quantised:
            return f"head_dim is {columns} with an FP8 cache; supported: {', '.join(map(str, quantised))}"
    return None


def _dtypes_of(op: str, cache: CacheFormat) -> tuple[str, ...]:
    """Return the dtypes of queries or keys with a cache of this format."""
    if op in CACHE_OPS:
        return (cache_insert.key_types if op == "cache_insert" else key_types)(cache)
    if cache.quantised:
        return (BF16, E4M3) if op == "dense_decode" else (BF16,)
    return key_dtypes(cache.d_qk)


def _format_conflict(op: str, features: dict[str, Any]) -> str | None:
    """Return why the named formats and the other features are not supported together, or None if they are."""
    named = {name: features[name] for name in ("kv_format", "extra_kv_format") if features.get(name) is not None}
    if len(named) > 1:
        first, second = named.values()
        if serving_kernels(KNOWN[first], KNOWN[second]) is None:
            beside = ", ".join(name for name, cache in DECODED_BESIDE.items() if serving_kernels(KNOWN[first], cache) is not None)
            return f"extra_kv_format is {second!r} with kv_format {first!r}; supported: {beside}"
    for argument, value in named.items():
        cache = KNOWN[value]
        dtypes = _dtypes_of(op, cache)
        fitting = {"fp8_kvcache": (bool(cache.quantised),), "head_dim": (cache.d_qk,), "dtype": dtypes}
        for name, supported in fitting.items():
            given = _dtype_name(features.get(name))
            if given is not None and given not in supported:
                return f"{name} is {given} with {argument} {value!r}; supported: {', '.join(map(str, supported))}"
    return None
