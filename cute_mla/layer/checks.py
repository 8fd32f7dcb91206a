"""Checks of a call of the layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..ops.limits import page_size_error
from ..ops.mqa_logits import check_cache
from ..ops.tensor_spec import TensorSpec, check_dtype, check_shape, spec_of
from ..spec.mla import D_QK
from ..spec.mqa_logits import ROW_BYTES
from .batch import MlaBatch
from .config import MlaConfig
from .forms import Forms
from .index_keys import PooledIndexCache
from .path import PACKED

_WITHOUT_CACHE = "prefill requests without cached keys, as plan_sequences makes them"


class Given(NamedTuple):
    """Caches and scales of a call of the layer."""

    k_cache: torch.Tensor | None
    index_cache: torch.Tensor | PooledIndexCache | None
    descale_q: torch.Tensor | None
    descale_k: torch.Tensor | None


def check_given(config: MlaConfig, weight: torch.Tensor, hidden: torch.Tensor, batch: MlaBatch, given: Given) -> None:
    """Raise ValueError unless hidden states, batch and caches fit the layer. weight: one of its matrices."""
    weights, states = spec_of("weights", weight), spec_of("hidden", hidden)
    check_shape("hidden", states, (batch.tokens, config.hidden_size), " with this batch")
    check_dtype("hidden", states, weights.dtype)
    _check_place("hidden", states, weights)
    if given.k_cache is None:
        _check_without_cache(batch, given)
    else:
        _check_cache(config, weights, given.k_cache)
    if given.descale_q is not None:
        _check_query_scale(weights, given.descale_q, given.k_cache)
    if given.index_cache is not None:
        _check_index_cache(config, weights, given, batch)
    for name in ("positions", "slot_mapping"):
        if getattr(batch, name).device != weights.device:
            raise ValueError(f"the batch is on {getattr(batch, name).device}; supported: the device of the weights, {weights.device}")


def check_forms(forms: Forms, given: Given, has_indexer: bool) -> None:
    """Raise ValueError if sparse attention of a step lacks what it needs. has_indexer: whether the layer has an indexer of its own."""
    if given.k_cache is None:
        return
    if given.k_cache.dtype == torch.float8_e4m3fn and forms.is_sparse:
        raise ValueError("k_cache is e4m3 with one scale, and attention is sparse; supported: 16 bits, or 656 bytes a token")
    if has_indexer and forms.is_chosen and given.index_cache is None:
        raise ValueError("index_cache is None, and tokens choose their keys; supported: a cache of the indexer's keys beside k_cache")


def check_differentiable(config: MlaConfig, batch: MlaBatch, forms: Forms) -> None:
    """Raise ValueError if a gradient would have to pass through the cache, through sparse attention, or through a window."""
    if config.sliding_window is not None:
        raise ValueError("hidden or a weight requires grad, and the config has a sliding_window; supported: inside `with torch.no_grad():`")
    uses = _cached_requests(batch)
    if not uses and forms.is_sparse:
        uses = "sparse attention"
    if uses:
        raise ValueError(
            f"hidden or a weight requires grad, and the batch has {uses}; supported: {_WITHOUT_CACHE}, or any batch inside "
            "`with torch.no_grad():`"
        )


def _cached_requests(batch: MlaBatch) -> str:
    """Describe the requests of a batch that read the cache, "" if there are none."""
    uses = [] if batch.decode is None else [f"{batch.decode.cache_seqlens.shape[0]} decode requests"]
    if batch.prefill is not None and batch.prefill.chunks:
        uses.append(f"{sum(chunk.keys for chunk in batch.prefill.chunks)} cached keys of prefill requests")
    return " and ".join(uses)


def _check_place(name: str, spec: TensorSpec, weights: TensorSpec) -> None:
    if spec.device != weights.device:
        raise ValueError(f"{name} is on {spec.device}; supported: the device of the weights, {weights.device}")


def _check_cache(config: MlaConfig, weights: TensorSpec, k_cache: torch.Tensor) -> None:
    cache = spec_of("k_cache", k_cache)
    columns = config.key_columns
    quantised = [packed.page_bytes(1) for packed in PACKED if packed.d_qk == columns]
    if config.indexer is not None and k_cache.dtype == torch.uint8 and quantised and list(cache.shape[3:]) == quantised:
        check_shape("k_cache", cache, ("pages", "page size", 1, *quantised))
    else:
        check_shape("k_cache", cache, ("pages", "page size", 1, columns))
        narrow = columns == D_QK and weights.dtype != torch.float16
        check_dtype("k_cache", cache, weights.dtype, *((torch.float8_e4m3fn,) if narrow else ()))
    problem = page_size_error(cache.shape[1])
    if problem is not None:
        raise ValueError(f"k_cache has shape {list(cache.shape)}: {problem}")
    _check_place("k_cache", cache, weights)


def _check_query_scale(weights: TensorSpec, descale_q: torch.Tensor, k_cache: torch.Tensor | None) -> None:
    if k_cache is None or k_cache.dtype != torch.float8_e4m3fn:
        raise ValueError("descale_q is given, and k_cache is not e4m3; supported: e4m3 queries over an e4m3 cache of 576 columns")
    scale = spec_of("descale_q", descale_q)
    if math.prod(scale.shape) != 1:
        raise ValueError(f"descale_q has shape {list(scale.shape)}; supported: one element, for all heads and requests")
    check_dtype("descale_q", scale, torch.float32)
    _check_place("descale_q", scale, weights)


def _check_index_cache(config: MlaConfig, weights: TensorSpec, given: Given, batch: MlaBatch) -> None:
    k_cache, index_cache = given.k_cache, given.index_cache
    if config.indexer is None or k_cache is None or index_cache is None:
        missing = "k_cache is None" if k_cache is None else "the config has no indexer"
        raise ValueError(f"index_cache is given, and {missing}; supported: the index cache of a layer with an indexer, beside k_cache")
    places = k_cache.shape[:2]
    if isinstance(index_cache, PooledIndexCache) != (config.indexer.key_pool > 1):
        given_as = f"{type(index_cache).__name__} with index_kpool {config.indexer.key_pool}"
        raise ValueError(f"index_cache is {given_as}; supported: PooledIndexCache with 2 or more, a tensor with 1")
    if isinstance(index_cache, PooledIndexCache):
        table = spec_of("index_cache.block_table", index_cache.block_table)
        check_shape("index_cache.block_table", table, (_requests(batch), "pages per request"), " with this batch")
        check_dtype("index_cache.block_table", table, torch.int32)
        index_cache = index_cache.keys
        places = index_cache.shape[:2]
        _check_room(batch, table.shape[1] * math.prod(places[1:]), config.indexer.key_pool)
    cache = spec_of("index_cache", index_cache)
    check_shape("index_cache", cache, (*places, 1, ROW_BYTES), " with this k_cache")
    check_cache("index_cache", cache, weights.device, "the weights")


def _check_room(batch: MlaBatch, pools: int, pool: int) -> None:
    """Raise ValueError if a request is known to have more pools than the block table of pools has places for, so many of each request."""
    keys = 0 if batch.prefill is None else batch.prefill.max_seqlen
    if batch.decode is not None and batch.decode.max_keys is not None:
        keys = max(keys, batch.decode.max_keys)
    if keys // pool > pools:
        raise ValueError(
            f"a request has {keys} keys; supported with index_cache.block_table: up to {pools * pool + pool - 1}, in {pools} pools"
        )


def _requests(batch: MlaBatch) -> int:
    """Return the requests of a batch."""
    decodes = 0 if batch.decode is None else batch.decode.cache_seqlens.shape[0]
    return decodes + (0 if batch.prefill is None else batch.prefill.cu_seqlens.shape[0] - 1)


def _check_without_cache(batch: MlaBatch, given: Given) -> None:
    """Raise ValueError if a call without a cache would read it."""
    uses = _cached_requests(batch)
    if uses:
        raise ValueError(f"k_cache is None, and the batch has {uses}; supported: {_WITHOUT_CACHE}")
    if given.descale_k is not None:
        raise ValueError("descale_k is given, and k_cache is None; supported: descale_k of a cache")
