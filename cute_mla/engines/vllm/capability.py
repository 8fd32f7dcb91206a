"""Capabilities that vLLM queries before it selects a backend, answered by is_supported."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import MultipleOf

from ...api import is_supported
from ...spec.arch import ARCHS, arch_for
from ...spec.dense_decode import SMALL_PAGES
from ...spec.kernel_ops import ARCHS_OF
from ...spec.split_plan import TILE_KEYS

# vLLM's names of cache dtypes; "auto" is the dtype of the model.
WIDE_CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
E4M3_CACHES = ("fp8", "fp8_e4m3")
PACKED_CACHE = "fp8_ds_mla"  # 656 bytes a token
DTYPES = [torch.bfloat16, torch.float16]
HEAD_SIZES = (320, 512, 576)  # head sizes of MLA models in vLLM


def supported_on_any(op: str, **features: Any) -> bool:
    """Return True if an op with these features is supported on any architecture."""
    return any(is_supported(op, arch, **features)[0] for arch in ARCHS)


def has_kernels_for(op: str, capability: DeviceCapability | None) -> bool:
    """Return True if devices of this compute capability run an op's kernels."""
    return capability is not None and arch_for((capability.major, capability.minor)) in ARCHS_OF[op]


def head_sizes(op: str) -> list[int]:
    """Return the supported columns of queries and keys."""
    return [size for size in HEAD_SIZES if supported_on_any(op, head_dim=size)]


def block_sizes(op: str) -> list[int | MultipleOf]:
    """Return the supported keys per page."""
    sizes: list[int | MultipleOf] = [size for size in SMALL_PAGES if supported_on_any(op, page_size=size)]
    return [*sizes, MultipleOf(TILE_KEYS)]


def unsupported_reason(
    op: str, capability: DeviceCapability, dtype: torch.dtype, kv_cache_dtype: str | None, **features: Any
) -> str | None:
    """Return why an op is not supported over this cache on devices of this compute capability, or None if it is supported.

    dtype: dtype of the model. kv_cache_dtype: vLLM's name, None for "auto".
    """
    arch = arch_for((capability.major, capability.minor))
    if arch is None or arch not in ARCHS_OF[op]:
        served = ", ".join(known.capabilities_text for known in ARCHS_OF[op])
        return f"compute capability is {capability.major}.{capability.minor}; supported: {served}"
    wide = WIDE_CACHES.get(kv_cache_dtype or "auto", dtype)
    if wide != dtype:
        return f"kv_cache_dtype is {kv_cache_dtype} with a model of {dtype}; supported: the model's own type, or an FP8 one"
    quantised = kv_cache_dtype in (*E4M3_CACHES, PACKED_CACHE)
    supported, reason = is_supported(op, arch.name, dtype=dtype, fp8_kvcache=quantised, **features)
    return None if supported else reason
