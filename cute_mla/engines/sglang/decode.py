"""Decode over SGLang's paged pools of 16-bit and e4m3 latent keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel, get_spec

from ...api import flash_mla_with_kvcache, get_mla_metadata
from ...ops.limits import page_size_error
from ...spec.mla import D_V
from ..plan_buffers import PlanBuffers


class DecodeMetadata(NamedTuple):
    """Metadata of a batch: block_table int32 [batch, pages], lengths int32 [batch], the plan, and query tokens per request."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    plan: torch.Tensor
    num_splits: torch.Tensor
    tokens: int


class GraphBuffers(NamedTuple):
    """Buffers of the metadata that captured graphs read. plans: one plan per number of query tokens per request."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    plans: PlanBuffers


class CuteMlaDecode(AttentionBackend):
    """Decode backend; SGLang combines it with another backend for prefill (--prefill-attention-backend)."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        problem = page_size_error(model_runner.page_size)
        if problem is not None:
            raise ValueError(f"--page-size: {problem}")
        parallel, speculation = get_parallel(), get_spec()
        if parallel.attn_dcp_size > 1:
            raise ValueError(f"--dcp-size is {parallel.attn_dcp_size}; supported: 1")
        if speculation.speculative_eagle_topk not in (None, 1):
            raise ValueError(f"--speculative-eagle-topk is {speculation.speculative_eagle_topk}; supported: 1, for masks are causal")
        self.page_size = model_runner.page_size
        self.device = model_runner.device
        self.data_type = model_runner.kv_cache_dtype
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.draft_tokens = speculation.speculative_num_draft_tokens
        self._heads = model_runner.model_config.num_attention_heads // parallel.attn_tp_size
        self._pages = -(-model_runner.model_config.context_len // self.page_size)
        self._graph: GraphBuffers | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate metadata buffers for batches of up to max_bs requests."""
        table = torch.zeros((max_bs, self._pages), dtype=torch.int32, device=self.device)
        self._graph = GraphBuffers(table, torch.ones(max_bs, dtype=torch.int32, device=self.device), PlanBuffers(max_bs))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that pad a batch."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Compute the metadata of a batch that runs eagerly."""
        self.forward_metadata = self._metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Compute the metadata of a batch that is captured or replayed, in the buffers that the graph reads. Lengths stay on the device."""
        if self._graph is None:
            raise ValueError("init_cuda_graph_state has not been called; supported: once, before batches are captured")
        metadata = self._metadata(forward_batch)
        batch = metadata.lengths.shape[0]
        self.forward_metadata = DecodeMetadata(
            self._graph.block_table[:batch].copy_(metadata.block_table),
            self._graph.lengths[:batch].copy_(metadata.lengths),
            *self._graph.plans.store(metadata.tokens, (metadata.plan, metadata.num_splits)),
            metadata.tokens,
        )

    def _metadata(self, forward_batch: Any) -> DecodeMetadata:
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        if not (mode.is_decode_or_idle() or mode.is_target_verify()):
            raise NotImplementedError(
                f"forward_mode is {mode}; supported: decode, and verification with --speculative-attention-mode decode. "
                "Give --decode-attention-backend cute_mla and another --prefill-attention-backend"
            )
        tokens = self.draft_tokens if mode.is_target_verify() else 1
        lengths = forward_batch.seq_lens[:batch].to(torch.int32)
        if mode.is_target_verify():
            lengths = lengths + tokens  # SGLang adds the draft tokens to seq_lens only after verification
        # The slots of a page are consecutive: its first slot determines the page.
        slots = self.req_to_token[:, : self._pages * self.page_size : self.page_size]
        table = slots.index_select(0, forward_batch.req_pool_indices[:batch]).div(self.page_size, rounding_mode="floor").to(torch.int32)
        return DecodeMetadata(table, lengths, *get_mla_metadata(lengths, tokens * self._heads, 1, self._heads), tokens)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Write the new keys to the pool, then attend with metadata.tokens query tokens per request.

        q: [batch * tokens, heads * 576], latent columns followed by rotary columns; k: [batch * tokens, 1, 576]; v: latent columns of k.
        Returns [batch * tokens, heads * 512] of q's dtype. Keys of an e4m3 pool have scale 1.
        """
        if kwargs:
            raise NotImplementedError(f"{', '.join(kwargs)} given; supported: q and k with their rotary columns, no indices, no sinks")
        if k is not None and save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id).unflatten(0, (-1, self.page_size))
        metadata = self.forward_metadata
        batch, heads = metadata.lengths.shape[0], layer.tp_q_head_num
        out, _ = flash_mla_with_kvcache(
            q.view(batch, metadata.tokens, heads, layer.head_dim),
            cache,
            metadata.block_table,
            metadata.lengths,
            D_V,
            metadata.plan,
            metadata.num_splits,
            softmax_scale=layer.scaling,
            causal=True,
            is_fp8_kvcache=cache.dtype == torch.float8_e4m3fn,
        )
        return out.view(-1, heads * D_V)

    forward_extend = forward_decode  # SGLang verifies draft tokens by forward_extend: decode with several tokens per request
