"""dots3-note in SGLang: its hybrid backend, with the kernels of cute_mla.

SGLang attends by its backend `dsa` in layers with sparse attention, and wraps FlashAttention for layers with a window. Prefill of these
decompresses keys; decode and verification attend to latent keys of 1,024 + 64 columns, in torch. FlashAttention stays for that prefill.
Replaced, in the process, before the backend is wrapped:

    sglang.srt.layers.attention.attention_registry     create_dsa_backend      makes the sparse backend of cute_mla
    sglang.srt.layers.attention.dots_hybrid_backend    DotsSWAMLAAttnBackend   a subclass decodes with a window
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.dots_hybrid_backend import (
    DotsSWAMLAAttnBackend,
    _normalize_cache_seqlens_rows,
    _normalize_page_table_rows,
)
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ...api import flash_mla_with_kvcache, get_mla_metadata
from .sparse import CuteMlaSparse

_PREFILL = "fa3"  # of window layers; SGLang has it on Hopper
_ATTENTION = "sglang.srt.layers.attention"


def create(runner: Any) -> Any:
    """Create the backend of prefill of window layers, which SGLang wraps. Raises ValueError for pools that dense decode does not read."""
    if runner.kv_cache_dtype != torch.bfloat16:
        raise ValueError(f"--kv-cache-dtype is {runner.kv_cache_dtype} for dots3-note; supported: {torch.bfloat16}")
    _replace_backends()
    return ATTENTION_BACKENDS[_PREFILL](runner)


class CuteMlaWindow(DotsSWAMLAAttnBackend):
    """SGLang's wrapper of FlashAttention, whose decode and verification of window layers run a kernel over latent keys.

    The first window layer of a step plans for all of them.
    """

    _schedule: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Compute the metadata of a batch that runs eagerly."""
        self._schedule = None
        super().init_forward_metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Begin a step of a CUDA graph: each of its warm-ups, and its capture, so that the plan is part of the graph."""
        self._schedule = None
        super().init_forward_metadata_in_graph(forward_batch)

    def forward_swa_mla_absorbed(self, q: torch.Tensor, layer: Any, forward_batch: Any) -> torch.Tensor:
        """Attend to the last keys of each request's window pool.

        q: [all tokens, heads, 1,088], as many tokens of each request. Returns [all tokens, heads * 1,024].
        """
        self.maybe_rebuild_metadata_after_dp_padding(forward_batch)
        backend, batch = self.selected_backend(forward_batch), forward_batch.batch_size
        metadata = backend.forward_metadata
        if metadata.swa_page_table is None:
            raise ValueError("window layers have no pool of their own; supported: SGLang's pool of window layers, its default")
        pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if self._schedule is None:
            self._schedule, _ = get_mla_metadata()
        out, _ = flash_mla_with_kvcache(
            q.view(batch, -1, layer.tp_q_head_num, layer.head_dim),
            pool.unflatten(0, (-1, backend.page_size)),
            _normalize_page_table_rows(metadata.swa_page_table, batch),
            _normalize_cache_seqlens_rows(metadata.cache_seqlens_int32, forward_batch.seq_lens, batch),
            layer.v_head_dim,
            self._schedule,
            softmax_scale=layer.scaling,
            causal=True,
            window=layer.sliding_window_size + 1,
        )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


@cache
def _replace_backends() -> None:
    """Have SGLang's hybrid backend of dots3-note made of the backends of cute_mla."""
    for target, served in (
        (f"{_ATTENTION}.attention_registry.create_dsa_backend", CuteMlaSparse),
        (f"{_ATTENTION}.dots_hybrid_backend.DotsSWAMLAAttnBackend", CuteMlaWindow),
    ):
        HookRegistry.register(target, served, HookType.REPLACE)
    HookRegistry.apply_hooks()
