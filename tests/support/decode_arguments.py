"""Arguments of decode calls, small, and with tensors where a test wants them."""

from __future__ import annotations

from typing import Any

import torch

import cute_mla


def bytes_from(offset: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a contiguous tensor, so many bytes behind an address that is a multiple of 64."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(size + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    return memory[start : start + size].view(dtype).view(shape)


def dense(**changes: Any) -> dict[str, Any]:
    """Return arguments of a dense call."""
    lengths = torch.zeros(2, dtype=torch.int32)
    metadata, num_splits = cute_mla.get_mla_metadata(lengths, 16, 1, 16)
    arguments = {
        "q": bytes_from(0, 2, 1, 16, 576),
        "k_cache": bytes_from(0, 4, 64, 1, 576),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "cache_seqlens": lengths,
        "head_dim_v": 512,
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
        "out": bytes_from(0, 2, 1, 16, 512),
        "lse": torch.zeros(2, 16, 1),
        "workspace": bytes_from(0, 1 << 20, dtype=torch.uint8),
    }
    return {**arguments, **changes}


def dense_fp8(**changes: Any) -> dict[str, Any]:
    """Return arguments of a dense call over e4m3 with both scales."""
    return dense(
        **{
            "q": bytes_from(0, 2, 1, 16, 576, dtype=torch.float8_e4m3fn),
            "k_cache": bytes_from(0, 4, 64, 1, 576, dtype=torch.float8_e4m3fn),
            "descale_q": torch.ones(1),
            "descale_k": torch.ones(1),
            **changes,
        }
    )


def sparse(**changes: Any) -> dict[str, Any]:
    """Return arguments of a sparse call over a 656-byte cache, with all that may be given but a second cache."""
    topk = 96 if changes.get("extra_k_cache") is not None else 64
    metadata, num_splits = cute_mla.get_mla_metadata(torch.zeros(2, dtype=torch.int32), 16, 1, 16, topk=topk)
    arguments = dense(
        k_cache=bytes_from(0, 4, 64, 1, 656, dtype=torch.uint8),
        is_fp8_kvcache=True,
        block_table=None,
        cache_seqlens=None,
        tile_scheduler_metadata=metadata,
        num_splits=num_splits,
        indices=torch.zeros(2, 1, 64, dtype=torch.int32),
        topk_length=torch.zeros(2, dtype=torch.int32),
        attn_sink=torch.zeros(16),
    )
    return {**arguments, **changes}


def sparse_extra(**changes: Any) -> dict[str, Any]:
    """Return arguments of a sparse call with a second cache."""
    return sparse(
        **{
            "extra_k_cache": bytes_from(0, 4, 16, 1, 656, dtype=torch.uint8),
            "extra_indices_in_kvcache": torch.zeros(2, 1, 32, dtype=torch.int32),
            "extra_topk_length": torch.zeros(2, dtype=torch.int32),
            **changes,
        }
    )
