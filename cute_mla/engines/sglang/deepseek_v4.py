"""DeepSeek-V4 and V4.1 in SGLang: its backend `dsv4`, with the kernels of cute_mla where it calls FlashMLA.

The backend's metadata, pools, indexer and gathering of rows for prefill are kept. Replaced, in the process, before the backend is made:

    sglang.kernels.ops.attention.flash_mla_interface      flash_mla_with_kvcache, flash_mla_sparse_fwd, get_mla_metadata
    sglang.kernels.ops.attention.flash_mla_sm120          flash_mla_with_kvcache_sm120: decodes and prefills on RTX boards
    sglang.srt.layers.attention.deepseek_v4_backend       _maybe_precompute_flashmla_sched_meta: schedules are made by the first call
                                                          can_use_swapab_attention: False, as another kernel would decode V4.1 on Blackwell
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, use_dsv4_q8kv8_sparse_prefill
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec

from ...api import flash_mla_sparse_fwd, get_mla_metadata
from ...spec.cache_format import V41, V41_FP4, V41_PAGED
from .. import two_caches

_INTERFACE = "sglang.kernels.ops.attention.flash_mla_interface"
_RTX = "sglang.kernels.ops.attention.flash_mla_sm120"
_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"


def create(runner: Any) -> DeepseekV4AttnBackend:
    """Create SGLang's backend over the kernels of cute_mla. Raises ValueError for options with which it calls others."""
    _check_version()
    execution = get_exec()
    deterministic = execution.deterministic.enable_deterministic_inference
    for option, given, supported in (
        ("--dsv4-attn-backend", execution.kernel.dsv4_attn_backend, ("flashmla",)),
        ("--dsv4-prefill-backend", execution.kernel.dsv4_prefill_backend, ("auto", "flashmla_sparse")),
        ("SGLANG_DSV4_Q8KV8_PREFILL, which overrides that option,", use_dsv4_q8kv8_sparse_prefill("auto"), (False,)),
        ("--enable-deterministic-inference", deterministic, (False,)),
    ):
        if given not in supported:
            raise ValueError(f"{option} is {given} for DeepSeek-V4; supported: {', '.join(map(str, supported))}")
    _replace_flashmla()
    return DeepseekV4AttnBackend(runner)


def _check_version() -> None:
    """Raise ValueError for versions of SGLang whose backend calls FlashMLA elsewhere: hooks of missing names are only logged."""
    for target in _SERVED:
        module, _, name = target.rpartition(".")
        try:
            is_there = hasattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            is_there = False
        if not is_there:
            raise ValueError(f"SGLang has no {target}; DeepSeek-V4 is supported with SGLang 0.5.23")


def flash_mla_with_kvcache(*, use_legacy: bool = True, **call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode over one or two caches. use_legacy: scales of V4.1 lie behind all rows of a page, else behind each token."""
    extra = call.get("extra_k_cache")
    if use_legacy and extra is not None and extra.shape[-1] == V41_FP4.page_bytes(1):
        raise ValueError(
            "compressed keys of 4 bits have their scales behind all rows of a page; supported: behind each token "
            "(SGLANG_DSV4_KV_LAYOUT=v41_new), or keys of 8 bits (SGLANG_DSV4_COMPRESSED_KV_LAYOUT=fp8)"
        )
    return two_caches.decode(v41=V41_PAGED if use_legacy else V41, **call)


def _decode_on_rtx(**call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode, or prefill with every token as a request. SGLang has no schedules on RTX boards, so each call plans."""
    plan, _ = get_mla_metadata()
    return two_caches.decode(block_table=None, cache_seqlens=None, tile_scheduler_metadata=plan, is_fp8_kvcache=True, **call)


def _sparse_prefill(*, use_legacy: bool = True, **call: Any) -> tuple[torch.Tensor, ...]:
    """Attend to gathered rows of 16 bits. Of the results, SGLang's backend reads out alone."""
    return flash_mla_sparse_fwd(**call)


_SERVED: dict[str, Callable[..., Any]] = {
    f"{_INTERFACE}.flash_mla_with_kvcache": flash_mla_with_kvcache,
    f"{_INTERFACE}.flash_mla_sparse_fwd": _sparse_prefill,
    f"{_INTERFACE}.get_mla_metadata": get_mla_metadata,
    f"{_RTX}.flash_mla_with_kvcache_sm120": _decode_on_rtx,
    f"{_BACKEND}._maybe_precompute_flashmla_sched_meta": lambda *_, **__: None,
    f"{_BACKEND}.can_use_swapab_attention": lambda *_, **__: False,
}


@cache
def _replace_flashmla() -> None:
    """Have SGLang's backend call the functions of cute_mla."""
    for target, function in _SERVED.items():
        HookRegistry.register(target, function, HookType.REPLACE)
    HookRegistry.apply_hooks()
