"""FlashMLA's functions in their form of 2025 (form A): plans are two tensors, and sparse prefill has logarithms to base 2."""

from __future__ import annotations

import math

import torch

from .. import api
from ..spec.mla import D_V, LOG2E
from .flash_mla_interface import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]


def get_mla_metadata(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call cute_mla.get_mla_metadata: plan on the device of cache_seqlens.

    Returns tile_scheduler_metadata int32 [num_sm_parts, 8] and num_splits int32 [batch + 1].
    """
    return api.get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call cute_mla.flash_mla_with_kvcache, dense or with indices sparse.

    Returns out [batch, s_q, h_q, 512] and lse fp32 [batch, h_q, s_q] in natural log, +inf for a row that attends to nothing.
    """
    return api.flash_mla_with_kvcache(
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
    )


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Call cute_mla.flash_mla_sparse_fwd, and return its logarithms to base 2.

    Returns out [s_q, h_q, 512], max_logits and lse fp32 [s_q, h_q]: max_logits = max(log2(e) * sm_scale * q k^T) over the keys of a row,
    lse = log2(sum(2^(log2(e) * sm_scale * q k^T))). Both are -inf for a row that attends to nothing.
    """
    out, max_logits, lse = api.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v, empty_lse=-math.inf)
    return out, max_logits.mul_(LOG2E), lse.mul_(LOG2E)
