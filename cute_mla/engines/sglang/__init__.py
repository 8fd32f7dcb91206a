"""Attention backend cute_mla of SGLang 0.5.23, for decode and for verification of draft tokens.

SGLang calls register() in each of its processes, through the entry point `cute_mla` of the group `sglang.srt.plugins`.
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
    """Create the backend of a model runner. Its module is imported only when SGLang creates a backend."""
    from .decode import CuteMlaDecode

    return CuteMlaDecode(runner)
