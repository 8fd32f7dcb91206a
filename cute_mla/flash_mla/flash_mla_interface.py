"""FlashMLA's functions in their forms of 2026 (B and C): its parameters in its order, its schedule object and its conventions.

The functions call those of cute_mla, which documents shapes, dtypes and errors. Results have FlashMLA's layouts and conventions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .. import api
from ..ops.arguments import check_flag, needs_grad, short_repr
from ..ops.split_plan import MlaSchedule
from ..spec.cache_format import V41
from ..spec.mla import D_V


class FlashMLASchedMeta(MlaSchedule):
    """The schedule object of get_mla_metadata(), with FlashMLA's attributes. The first call that gets it makes its plan on the device.

    config: the shapes and options of the first call, None before. tile_scheduler_metadata, num_splits: the plan, None before.
    Assigning None to either tensor, or False to have_initialized, discards the plan: the next call makes another.
    """

    @dataclass(frozen=True)
    class Config:
        """Shapes and options of the first call. None where the call had no such tensor."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool

    def __init__(self) -> None:
        super().__init__()
        self.config: FlashMLASchedMeta.Config | None = None

    @property
    def have_initialized(self) -> bool:
        """Return whether a call has made the plan."""
        return self.plan is not None

    @have_initialized.setter
    def have_initialized(self, value: bool) -> None:
        if value != self.have_initialized:
            self._discard("have_initialized", value, False)

    @property
    def tile_scheduler_metadata(self) -> torch.Tensor | None:
        """Return the first tensor of the plan, or None before the first use."""
        return None if self.plan is None else self.plan[0]

    @tile_scheduler_metadata.setter
    def tile_scheduler_metadata(self, value: None) -> None:
        self._discard("tile_scheduler_metadata", value, None)

    @property
    def num_splits(self) -> torch.Tensor | None:
        """Return the second tensor of the plan, or None before the first use."""
        return None if self.plan is None else self.plan[1]

    @num_splits.setter
    def num_splits(self, value: None) -> None:
        self._discard("num_splits", value, None)

    def _discard(self, name: str, value: Any, supported: bool | None) -> None:
        """Discard the plan. ValueError unless the value assigned to the attribute is the one that means so."""
        if value is not supported:
            raise ValueError(f"{name} is set to {short_repr(value)}; supported: {supported}, which discards the plan")
        self.plan = self.key = self.config = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Return (schedule, None), an empty schedule object for flash_mla_with_kvcache. Arguments are ignored; no device is needed."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call cute_mla.flash_mla_with_kvcache, dense or with indices sparse.

    tile_scheduler_metadata  a schedule object, of get_mla_metadata() or new. One that has a plan serves calls of the same shapes, also with
                             another causal or other lengths
    k_cache, extra_k_cache   528 bytes a token are the format v41, each token's scales behind it; 288 bytes of extra_k_cache are v41_fp4
    is_fp8_kvcache           a k_cache of v41 counts as FP8 also without it: form C, which has no other, has True as default
    enable_batch_invariant   batch_invariant of cute_mla.flash_mla_with_kvcache

    Returns out [batch, s_q, h_q, 512] and lse fp32 [batch, h_q, s_q] in natural log, +inf for a row that attends to nothing.
    """
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    check_flag("enable_batch_invariant", enable_batch_invariant)
    kv_format = None if indices is None else _format_of(k_cache)
    is_fp8_kvcache = is_fp8_kvcache or kv_format is not None
    results = api.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale,
        causal,
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        batch_invariant=enable_batch_invariant,
        kv_format=kv_format,
        extra_kv_format=None if indices is None else _format_of(extra_k_cache),
    )
    schedule = tile_scheduler_metadata
    if isinstance(schedule, FlashMLASchedMeta) and schedule.config is None and schedule.plan is not None:
        schedule.config = FlashMLASchedMeta.Config(
            b=q.shape[0],
            s_q=q.shape[1],
            h_q=q.shape[2],
            page_block_size=k_cache.shape[1],
            h_k=k_cache.shape[2],
            causal=causal,
            is_fp8_kvcache=is_fp8_kvcache,
            topk=None if indices is None else indices.shape[-1],
            extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
            extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
            enable_batch_invariant=enable_batch_invariant,
        )
    return results


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Call cute_mla.flash_mla_sparse_fwd.

    Returns out [s_q, h_q, 512], max_logits and lse fp32 [s_q, h_q], both in natural log. With indexer_topk, lse_indexer fp32 [s_q, h_q]
    comes behind them: the natural log over a token's first indexer_topk indices. FlashMLA has an indexer_topk of 512, 1024 and 2048. A row
    that attends to nothing has max_logits -inf, lse and lse_indexer +inf.
    """
    return api.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, indexer_topk)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call cute_mla.flash_attn_varlen_func.

    Returns out [total_q, h_q, 128] and lse fp32 [total_q, h_q] in natural log with strides (1, total_q), -inf for a row that attends to
    nothing. Gradients of out reach q, k and v; those of lse raise ValueError.
    """
    lse = None if needs_grad(q, k, v) else _new_lse(q)
    results = api.flash_attn_varlen_func(
        q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv,
        dropout_p, softmax_scale, causal, deterministic, is_varlen,
        lse=lse, empty_lse=-math.inf,
    )  # fmt: skip
    return _tokens_first(lse, *results)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call cute_mla.flash_attn_varlen_qkvpacked_func. Results are those of flash_attn_varlen_func."""
    lse = None if needs_grad(qkv) else _new_lse(qkv)
    results = api.flash_attn_varlen_qkvpacked_func(
        qkv, cu_seqlens, max_seqlen, head_dim_qk,
        dropout_p, softmax_scale, causal, deterministic, is_varlen,
        lse=lse, empty_lse=-math.inf,
    )  # fmt: skip
    return _tokens_first(lse, *results)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call cute_mla.flash_attn_varlen_kvpacked_func. Results are those of flash_attn_varlen_func."""
    lse = None if needs_grad(q, kv) else _new_lse(q)
    results = api.flash_attn_varlen_kvpacked_func(
        q, kv, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, head_dim_qk,
        dropout_p, softmax_scale, causal, deterministic, is_varlen,
        lse=lse, empty_lse=-math.inf,
    )  # fmt: skip
    return _tokens_first(lse, *results)


def _format_of(cache: Any) -> str | None:
    """Return the name of the format that FlashMLA means where the bytes of a token fit several; None where they decide."""
    return V41.name if isinstance(cache, torch.Tensor) and cache.dim() == 4 and cache.shape[3] == V41.page_bytes(1) else None


def _new_lse(q: Any) -> torch.Tensor | None:
    """Allocate lse [total_q, h_q], contiguous along the tokens. Return None if q has not three dimensions, which the call refuses."""
    if not isinstance(q, torch.Tensor) or q.dim() != 3:
        return None
    tokens, heads, _ = q.shape
    return q.new_empty((heads, tokens), dtype=torch.float32).t()


def _tokens_first(given: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse, the latter contiguous along the tokens. given: the lse that the call wrote to, if it was one of these strides."""
    return out, lse if given is not None else lse.t().contiguous().t()
