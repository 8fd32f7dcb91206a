"""Attention backend cute_mla of SGLang 0.5.22 and 0.5.23.

SGLang calls register() in each of its processes, through the entry point `cute_mla` of the group `sglang.srt.plugins`. The module of a
backend is imported only when SGLang creates the backend of a model runner.

    dense    decode, verification of draft tokens, prefill
    sparse   the same of models with DeepSeek's sparse attention, over SGLang's own backend of it
"""

from __future__ import annotations

from typing import Any

NAME = "cute_mla"


def register() -> None:
    """Register the backend with SGLang, and add its name to the choices of the command line."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    """Create the backend of a model runner, and tell the layers of DeepSeek's models how to call a backend of this name.

    Without sparse attention, prefill decompresses new keys and chunks of the cached prefix, as for SGLang's own trtllm_mla.
    """
    from sglang.srt.configs.model_config import is_deepseek_dsa
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        handle_attention_dsa,
        handle_attention_trtllm_mla,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

    if not is_deepseek_dsa(runner.model_config.hf_config):
        from .dense import CuteMla

        AttentionBackendRegistry.register(NAME, handle_attention_trtllm_mla)
        return CuteMla(runner)
    from .sparse import CuteMlaSparse

    AttentionBackendRegistry.register(NAME, handle_attention_dsa)
    if NAME not in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)  # layers give rotary columns and indices on their own
    return CuteMlaSparse(runner)
