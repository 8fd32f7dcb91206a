"""dots3-note in vLLM: decode of window layers over keys of 1,024 + 64 columns, and sparse attention over rows padded to as many.

The model's module names the backend of each kind of layer. serve() is called when vLLM loads the class of the model or of its MTP draft.
Replaced, in the process, by subclasses that are of use where CUTE_MLA_SPARSE is chosen:

    vllm.models.dots3_note.nvidia.model    Dots3NoteTritonMLABackend     gathers the keys of a window and multiplies them in torch
                                           Dots3NotePaddedMLAAttention   layer with sparse attention, by FlashAttention

Prefill of window layers, which decompresses keys for FlashAttention, stays vLLM's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.models.dots3_note.nvidia.attention import (
    Dots3NoteDecodeMetadata,
    Dots3NoteMLAMetadataBuilder,
    Dots3NoteTritonMLABackend,
    Dots3NoteTritonMLAImpl,
)
from vllm.models.dots3_note.nvidia.model import Dots3NotePaddedMLAAttention
from vllm.v1.kv_cache_interface import KVCacheLayout

from ...api import flash_mla_with_kvcache, get_mla_metadata
from ..plan_buffers import Plan, PlanBuffers
from . import SPARSE
from .capability import PACKED_CACHE, WIDE_CACHES
from .layers import CacheWriteMixin, concatenate_queries, max_decode_tokens, reserve_queries
from .sparse import CuteMlaSparse, CuteMlaSparseImpl


def serve(package: str) -> None:
    """Replace the two names in a package that is loaded. A second call does nothing."""
    model: Any = sys.modules[f"{package}.nvidia.model"]
    model.Dots3NoteTritonMLABackend, model.Dots3NotePaddedMLAAttention = CuteMlaWindow, CuteMlaPaddedAttention


def _is_chosen() -> bool:
    """Return whether the backend of the current configuration is CUTE_MLA_SPARSE."""
    backend = get_current_vllm_config().attention_config.backend
    return backend is not None and backend.name == SPARSE


class CuteMlaWindow(Dots3NoteTritonMLABackend):
    """Backend of window layers: vLLM's own for other choices than CUTE_MLA_SPARSE."""

    @staticmethod
    def get_impl_cls() -> type[Dots3NoteTritonMLAImpl]:
        """Return the class of a layer's attention."""
        return CuteMlaWindowImpl if _is_chosen() else Dots3NoteTritonMLABackend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> type[Dots3NoteMLAMetadataBuilder]:
        """Return the class of the metadata builder, which serves both kinds of layers."""
        return CuteMlaWindowMetadataBuilder


@dataclass
class WindowDecodeMetadata(Dots3NoteDecodeMetadata):
    """Metadata of the decode requests. plan: tile_scheduler_metadata and num_splits; None where vLLM's layers decode."""

    plan: Plan | None = None


class CuteMlaWindowMetadataBuilder(Dots3NoteMLAMetadataBuilder):
    """Metadata builder. It plans once a step for all window layers, in the buffers that CUDA graphs read."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._impl = layer.impl if isinstance(layer.impl, CuteMlaWindowImpl) else None
        self._plans = PlanBuffers(max_decode_tokens(vllm_config))

    def _build_decode(self, *args: Any, **given: Any) -> WindowDecodeMetadata:
        decode = super()._build_decode(*args, **given)
        return WindowDecodeMetadata(**vars(decode), plan=None if self._impl is None else self._plan(decode, self._impl))

    def _plan(self, decode: Dots3NoteDecodeMetadata, impl: CuteMlaWindowImpl) -> Plan:
        """Plan the requests, all of which have as many query tokens. Lengths stay on the device."""
        heads, tokens = impl.num_heads, decode.query_len
        plan = get_mla_metadata(decode.seq_lens, tokens * heads, 1, heads, window=impl.sliding_window, head_dim_v=impl.kv_lora_rank)
        return self._plans.store(tokens, plan)


class CuteMlaWindowImpl(CacheWriteMixin, Dots3NoteTritonMLAImpl):
    """Attention of a window layer: dense decode with a window over a 16-bit cache."""

    def __init__(self, num_heads: int, head_size: int, **options: Any) -> None:
        super().__init__(num_heads, head_size, **options)
        if self.kv_cache_dtype not in ("auto", *WIDE_CACHES):
            raise NotImplementedError(
                f"kv_cache_dtype is {self.kv_cache_dtype} in window layers of dots3-note; supported: auto, {', '.join(WIDE_CACHES)}"
            )
        if self.dcp_world_size > 1:
            raise NotImplementedError(f"decode_context_parallel_size is {self.dcp_world_size} in window layers; supported: 1")
        reserve_queries(max_decode_tokens(get_current_vllm_config()), num_heads, head_size)

    def forward_mqa(
        self, q: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Decode all tokens of the decode requests, as many of each.

        q: [tokens, heads, 1,088], or (latent [tokens, heads, 1,024], rotary [tokens, heads, 64]). Cache: [blocks, block size, 1,088].
        Returns out [tokens, heads, 1,024].
        """
        decode, q = attn_metadata.decode, concatenate_queries(q, self.head_size)
        requests = q.shape[0] // decode.query_len
        plan, num_splits = decode.plan
        out, _ = flash_mla_with_kvcache(
            q.view(requests, decode.query_len, *q.shape[1:]),
            kv_c_and_k_pe_cache.unsqueeze(2),
            decode.block_table[:requests],
            decode.seq_lens[:requests],
            self.kv_lora_rank,
            plan,
            num_splits,
            softmax_scale=self.scale,
            causal=True,
            window=self.sliding_window,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
        )
        return out.flatten(0, 1), None


class CuteMlaPaddedAttention(Dots3NotePaddedMLAAttention):
    """Layer with sparse attention, whose rows of the cache are as long as those of window layers; physical_head_size: their columns."""

    def __init__(self, *args: Any, physical_head_size: int, **options: Any) -> None:
        if not _is_chosen():
            super().__init__(*args, physical_head_size=physical_head_size, **options)
            return
        MLAAttention.__init__(self, *args, **options, attn_backend=CuteMlaPadded)
        self.physical_head_size = physical_head_size


class CuteMlaPadded(CuteMlaSparse):
    """Backend of such layers."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layout in which pages of the indexer's keys lie beside those of latent keys."""
        return (KVCacheLayout.BLHNC,)

    @staticmethod
    def get_impl_cls() -> type[CuteMlaSparseImpl]:
        """Return the class of a layer's attention."""
        return CuteMlaPaddedImpl


class CuteMlaPaddedImpl(CuteMlaSparseImpl):
    """Attention of such a layer, over a 16-bit cache [blocks, block size, 1,088] whose first 576 columns are its keys."""

    def __init__(self, num_heads: int, head_size: int, *args: Any, **options: Any) -> None:
        super().__init__(num_heads, head_size, *args, **options)
        if self.kv_cache_dtype == PACKED_CACHE:
            raise NotImplementedError(f"kv_cache_dtype is {PACKED_CACHE} for dots3-note; supported: auto, bfloat16")

    def do_kv_cache_update(self, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, *args: Any, **given: Any) -> None:
        """Write new keys to their slots, as in other layers."""
        super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache[..., : self.head_size], *args, **given)

    def forward_mha(
        self, q: torch.Tensor, kv_c_normed: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, *args: Any, **given: Any
    ) -> None:
        """Attend to all keys of short requests, decompressed."""
        super().forward_mha(q, kv_c_normed, k_pe, kv_cache[..., : self.head_size], *args, **given)
