"""Sparse decode over two caches by FlashMLA's arguments, for engines that run DeepSeek-V4 and V4.1."""

from __future__ import annotations

from typing import Any

import torch

from ..api import flash_mla_with_kvcache
from ..spec.cache_format import V41, CacheFormat


def decode(
    *, k_cache: torch.Tensor, extra_k_cache: torch.Tensor | None = None, v41: CacheFormat = V41, **call: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call cute_mla.flash_mla_with_kvcache. v41: format of caches of 528 bytes a token; of others, the bytes decide."""

    def name(cache: torch.Tensor | None) -> str | None:
        return v41.name if cache is not None and cache.shape[-1] == v41.page_bytes(1) else None

    formats = name(k_cache), name(extra_k_cache)
    return flash_mla_with_kvcache(k_cache=k_cache, extra_k_cache=extra_k_cache, kv_format=formats[0], extra_kv_format=formats[1], **call)
