"""Code shared by the dense and the sparse layer: checks of options, concatenated queries, and writing keys to the cache."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionType, max_decode_query_len
from vllm.v1.worker.workspace import current_workspace_manager

from ...cache import write_kv_cache
from ...spec.mla import D_ROPE, LATENT_DIMS
from .capability import E4M3_CACHES, PACKED_CACHE


def check_options(head_size: int, options: dict[str, Any]) -> None:
    """Raise NotImplementedError for columns of a key and options that no kernel supports."""
    dims = LATENT_DIMS[head_size]
    for name, columns in (("kv_lora_rank", dims.latent), ("qk_rope_head_dim", dims.rotary)):
        if options.get(name, columns) != columns:
            raise NotImplementedError(f"{name} is {options[name]} with a head size of {head_size}; supported: {columns}")
    for name in ("alibi_slopes", "sliding_window", "logits_soft_cap"):
        if options.get(name):
            raise NotImplementedError(f"{name} is {options[name]!r}; supported: None")
    attn_type = options.get("attn_type", AttentionType.DECODER)
    if attn_type != AttentionType.DECODER:
        raise NotImplementedError(f"attn_type is {attn_type!r}; supported: {AttentionType.DECODER!r}")


def decodes_all(config: Any) -> bool:
    """Return whether batches with prefill run from CUDA graphs, too (cudagraph_mode FULL). All of their tokens are decoded then.

    Prefill itself has shapes from the host. With decode context parallelism, dense decode takes one token a request.
    """
    mode, parallel = config.compilation_config.cudagraph_mode, config.parallel_config
    whole = mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL
    return whole and parallel.decode_context_parallel_size == 1 and parallel.prefill_context_parallel_size == 1


def max_decode_tokens(config: Any) -> int:
    """Return the largest number of query tokens that vLLM decodes in one step."""
    scheduler = config.scheduler_config
    tokens: int = scheduler.max_num_batched_tokens
    return tokens if decodes_all(config) else min(tokens, scheduler.max_num_seqs * max_decode_query_len(config))


def reserve_queries(tokens: int, heads: int, columns: int) -> None:
    """Reserve space for this many queries in vLLM's workspace, before vLLM locks it."""
    current_workspace_manager().get_simultaneous(((tokens, heads, columns), torch.get_default_dtype()))


def concatenate_queries(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], columns: int) -> torch.Tensor:
    """Return queries [tokens, heads, columns].

    Separate latent and rotary columns are concatenated in vLLM's workspace, and zeros fill the columns that a model does not have.
    """
    parts = [part for part in ([q] if isinstance(q, torch.Tensor) else q) if part.shape[-1]]
    given = sum(part.shape[-1] for part in parts)
    if len(parts) == 1 and given == columns:
        return parts[0]
    (whole,) = current_workspace_manager().get_simultaneous(((*parts[0].shape[:2], columns), parts[0].dtype))
    torch.cat(parts, dim=-1, out=whole[..., :given])
    whole[..., given:].zero_()
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

        kv_c_normed: [at least tokens, latent columns], k_pe: [at least tokens, 1, rotary columns], both of the model's dtype; slot_mapping:
        int64 [tokens], -1 skips a key; kv_cache: [blocks, block size, columns or 656], of any dtype of the right size. k_scale: scale of
        e4m3 caches, fp32, one element. skip_scale: True if k_scale is 1; ignored, since skipping the scale is no faster. In rows of 656
        bytes, zeros stand for rotary columns that a model does not have, as vLLM's own backends write them.
        """
        if kv_cache.numel() == 0:
            return
        scale = None
        if kv_cache_dtype in E4M3_CACHES:
            kv_cache, scale = kv_cache.view(torch.float8_e4m3fn), k_scale
        slots = slot_mapping.flatten()
        tokens = slots.shape[0]
        rotary: torch.Tensor | None = k_pe.squeeze(1)[:tokens]
        if not k_pe.shape[-1]:
            rotary = k_pe.new_zeros(tokens, D_ROPE) if kv_cache_dtype == PACKED_CACHE else None
        write_kv_cache(kv_c_normed[:tokens], rotary, kv_cache.unsqueeze(2), slots, descale_k=scale)
