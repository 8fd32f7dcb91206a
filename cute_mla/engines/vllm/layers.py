"""Code shared by the dense and the sparse layer: checks of options, concatenated queries, and writing keys to the cache."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType, max_decode_query_len
from vllm.v1.worker.workspace import current_workspace_manager

from ...cache import write_kv_cache
from ...spec.mla import D_QK
from .capability import E4M3_CACHES


def check_options(options: dict[str, Any]) -> None:
    """Raise NotImplementedError for options that no kernel supports."""
    for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
        if options.get(name):
            raise NotImplementedError(f"{name} is {options[name]!r}; supported: None")
    attn_type = options.get("attn_type", AttentionType.DECODER)
    if attn_type != AttentionType.DECODER:
        raise NotImplementedError(f"attn_type is {attn_type!r}; supported: {AttentionType.DECODER!r}")


def max_decode_tokens() -> int:
    """Return the largest number of query tokens that vLLM decodes in one step."""
    config = get_current_vllm_config()
    scheduler = config.scheduler_config
    return min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max_decode_query_len(config))


def reserve_queries(tokens: int, heads: int) -> None:
    """Reserve space for this many queries in vLLM's workspace, before vLLM locks it."""
    current_workspace_manager().get_simultaneous(((tokens, heads, D_QK), torch.get_default_dtype()))


def concatenate_queries(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return queries [tokens, heads, 576]; separate latent and rotary columns are concatenated in vLLM's workspace."""
    if isinstance(q, torch.Tensor):
        return q
    latent, _ = q
    (whole,) = current_workspace_manager().get_simultaneous(((*latent.shape[:2], D_QK), latent.dtype))
    torch.cat(q, dim=-1, out=whole)
    return whole


class CacheWriteMixin:
    """Mixin of a layer that writes keys to the cache with cache_write."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write new keys to their slots.

        kv_c_normed: [at least tokens, 512], k_pe: [at least tokens, 1, 64], both of the model's dtype; slot_mapping: int64 [tokens], -1
        skips a key; kv_cache: [blocks, block size, 576 or 656], of any dtype of the right size. k_scale: scale of e4m3 caches, fp32, one
        element. skip_scale: True if k_scale is 1; ignored, since skipping the scale is no faster.
        """
        if kv_cache.numel() == 0:
            return
        scale = None
        if kv_cache_dtype in E4M3_CACHES:
            kv_cache, scale = kv_cache.view(torch.float8_e4m3fn), k_scale
        slots = slot_mapping.flatten()
        tokens = slots.shape[0]
        write_kv_cache(kv_c_normed[:tokens], k_pe.squeeze(1)[:tokens], kv_cache.unsqueeze(2), slots, descale_k=scale)
