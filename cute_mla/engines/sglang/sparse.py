"""DeepSeek's sparse attention in SGLang: the kernels of its backend `dsa` replaced, its pools, metadata and indexer kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, DSAFlashMLAMetadata
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec, get_parallel

from ...api import flash_attn_varlen_func, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from ...indexer import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
from ...spec.mla import D_QK

_PREFILL = ("flashmla_sparse", "flashmla_kv", "flashmla_auto")
_DECODE = ("flashmla_sparse", "flashmla_kv")
_UTILS = "sglang.srt.layers.attention.dsa.utils"


class CuteMlaSparse(DeepseekSparseAttnBackend):
    """SGLang's backend with the kernels of cute_mla where SGLang calls FlashMLA, dense attention or DeepGEMM's logits.

    flashmla_sparse runs sparse prefill over rows of 16 bits, flashmla_kv sparse decode over pools of 16 bits or of 656 bytes a token.
    Queries are not padded to a number of heads.
    """

    def __init__(self, model_runner: Any, *options: Any, **more: Any) -> None:
        if get_exec().deterministic.enable_deterministic_inference:
            raise ValueError(
                "--enable-deterministic-inference is given with sparse attention, whose keys SGLang's top-k orders; supported: dense models"
            )
        chosen = get_exec().kernel
        for option, backend, supported in (
            ("--dsa-prefill-backend", chosen.dsa_prefill_backend, _PREFILL),
            ("--dsa-decode-backend", chosen.dsa_decode_backend, _DECODE),
        ):
            if backend not in supported:
                raise ValueError(f"{option} is {backend}; supported: {', '.join(supported)}")
        if get_parallel().attn_dcp_size > 1:
            raise ValueError(f"--dcp-size is {get_parallel().attn_dcp_size}; supported: 1")
        super().__init__(model_runner, *options, **more)
        columns = self.kv_lora_rank + self.qk_rope_head_dim
        if columns != D_QK:
            raise ValueError(f"keys have {columns} columns; supported: {D_QK}")
        _serve_logits()

    def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> DSAFlashMLAMetadata:
        """Return the plan of sparse decode: of as many query tokens as there are lengths, with topk keys each."""
        heads = self.num_q_heads
        plan = get_mla_metadata(cache_seqlens, seq_len_q * heads, 1, heads, self.dsa_kv_cache_store_fp8, self.dsa_index_topk)
        return DSAFlashMLAMetadata(*plan)

    def _forward_flashmla_sparse(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        page_table_1: torch.Tensor,
        sm_scale: float,
        topk_length: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to rows of 16 bits [slots, 1, 576]. page_table_1: int32 [tokens, topk], -1 for none. Returns [tokens, heads, 512]."""
        out, _, _ = flash_mla_sparse_fwd(
            q_all,
            kv_cache,
            page_table_1.unsqueeze(1),
            sm_scale,
            v_head_dim,
            attn_sink=attn_sink,
            topk_length=_of_rows(topk_length, q_all.shape[0]),
        )
        return out

    def _forward_flashmla_kv(
        self, q_all: torch.Tensor, kv_cache: torch.Tensor, v_head_dim: int, sm_scale: float, layer: Any, metadata: Any, page_table_1: Any
    ) -> torch.Tensor:
        """Attend to slots of the pool with every token as a request. Returns [tokens, 1, heads, 512]."""
        q = q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim)
        plan = metadata.flashmla_metadata
        out, _ = flash_mla_with_kvcache(
            q,
            kv_cache.view(-1, self.physical_page_size, 1, self.kv_cache_dim),
            None,
            None,
            v_head_dim,
            plan.flashmla_metadata,
            plan.num_splits,
            softmax_scale=sm_scale,
            is_fp8_kvcache=self.dsa_kv_cache_store_fp8,
            indices=page_table_1.unsqueeze(1),
            topk_length=_of_rows(metadata.dsa_cache_seqlens_int32, q.shape[0]),
        )
        return out

    def _forward_standard_mha(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, metadata: Any
    ) -> torch.Tensor:
        """Attend to all keys of short requests, decompressed, causally. Returns [tokens, heads, value columns]."""
        out, _ = flash_attn_varlen_func(
            q.view(-1, layer.tp_q_head_num, layer.head_dim),
            k.view(-1, layer.tp_k_head_num, layer.head_dim),
            v.view(-1, layer.tp_k_head_num, layer.v_head_dim),
            metadata.cu_seqlens_q,
            metadata.cu_seqlens_k,
            metadata.max_seq_len_q,
            metadata.max_seq_len_k,
            softmax_scale=layer.scaling,
            causal=True,
        )
        return out


def _of_rows(lengths: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """Return the lengths of this many query tokens, None if there are others: indices of -1 say the same."""
    return lengths if lengths is not None and lengths.shape[0] == rows else None


@cache
def _serve_logits() -> None:
    """Have SGLang's indexer call the logits of cute_mla.indexer, whose arguments are DeepGEMM's."""
    served: dict[str, Callable[..., Any]] = {
        "resolve_fp8_mqa_logits_fn": fp8_mqa_logits,
        "resolve_fp8_paged_mqa_logits_fn": fp8_paged_mqa_logits,
        "resolve_paged_mqa_logits_metadata_fn": get_paged_mqa_logits_metadata,
    }
    for name, function in served.items():
        HookRegistry.register(f"{_UTILS}.{name}", lambda function=function: function, HookType.REPLACE)
    HookRegistry.apply_hooks()
