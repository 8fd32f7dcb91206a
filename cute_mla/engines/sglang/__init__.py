"""Attention backend cute_mla of SGLang 0.5.22 and 0.5.23.

SGLang calls register() in each of its processes, through the entry point `cute_mla` of the group `sglang.srt.plugins`. The module of a
backend is imported only when SGLang creates the backend of a model runner.

    dense    decode, verification of draft tokens, prefill
    sparse   the same of models with DeepSeek's sparse attention, over SGLang's own backend of it
    dots3    dots3-note: dense decode with a window, beside the backend of sparse attention
    deepseek_v4   SGLang's own backend of DeepSeek-V4 and V4.1, whose calls of FlashMLA are replaced; with SGLang 0.5.23
"""

from __future__ import annotations

from typing import Any

NAME = "cute_mla"


def register() -> None:
    """Register the backend with SGLang, and add its name to the lists of what the command line, prefill and deterministic mode accept."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import (
        ATTENTION_BACKEND_CHOICES,
        CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        add_attention_backend_choices,
        add_chunked_prefix_cache_attention_backend,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    for listed, add in (
        (ATTENTION_BACKEND_CHOICES, add_attention_backend_choices),
        (DETERMINISTIC_ATTENTION_BACKEND_CHOICES, add_deterministic_attention_backend_choices),
        (
            RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
            add_radix_supported_deterministic_attention_backend_choices,
        ),
    ):
        if NAME not in listed:
            add([NAME])
    if NAME not in CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS:
        add_chunked_prefix_cache_attention_backend(NAME)
    register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    """Create the backend of a model runner, and tell the layers of DeepSeek's models how to call a backend of this name.

    Without sparse attention, prefill decompresses new keys and chunks of the cached prefix, as for SGLang's own trtllm_mla. In
    deterministic mode it attends to latent keys, as for triton: the bits of a token then do not depend on what was cached.
    """
    from sglang.srt.configs.dots3 import Dots3Config
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        handle_attention_dsa,
        handle_attention_triton,
        handle_attention_trtllm_mla,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    from sglang.srt.runtime_context import get_exec

    if is_deepseek_v4(runner.model_config.hf_config):
        from .deepseek_v4 import create

        return create(runner)
    if not is_deepseek_dsa(runner.model_config.hf_config):
        from .dense import CuteMla

        deterministic = get_exec().deterministic.enable_deterministic_inference
        AttentionBackendRegistry.register(NAME, handle_attention_triton if deterministic else handle_attention_trtllm_mla)
        return CuteMla(runner)
    if isinstance(runner.model_config.hf_text_config, Dots3Config):
        from .dots3 import create as create_dots3

        return create_dots3(runner)
    from .sparse import CuteMlaSparse

    AttentionBackendRegistry.register(NAME, handle_attention_dsa)
    if NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)  # layers give rotary columns and indices on their own
    return CuteMlaSparse(runner)
