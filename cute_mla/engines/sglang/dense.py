"""Decode over SGLang's paged pools of 16-bit and e4m3 latent keys, and dense prefill."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout

from ...api import flash_attn_varlen_func, flash_mla_with_kvcache, get_mla_metadata
from ...ops.limits import page_size_error, value_columns
from ...spec.mla import LATENT_DIMS
from ..plan_buffers import PlanBuffers

_WORD = 32  # tokens that an int32 of a tree mask tells of


class DenseMetadata(NamedTuple):
    """Metadata of a batch: block_table int32 [batch, pages], lengths int32 [batch], the plan, and the most query tokens per request.

    cu_seqlens_q: int32 [batch + 1] where requests have different numbers of query tokens. tree_mask: int32 [batch, tokens, words] where
    draft tokens form a tree.
    """

    block_table: torch.Tensor
    lengths: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    tree_mask: torch.Tensor | None
    plan: torch.Tensor
    num_splits: torch.Tensor
    tokens: int


class GraphBuffers(NamedTuple):
    """Buffers of the metadata that captured graphs read. plans: one plan per number of query tokens per request."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    cu_seqlens_q: torch.Tensor
    tree_mask: torch.Tensor
    plans: PlanBuffers


class CuteMla(AttentionBackend):
    """Backend of decode, verification of drafts and prefill; SGLang may combine it with another one for either."""

    needs_cpu_seq_lens: bool = False
    supports_ragged_verify_graph: bool = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        problem = page_size_error(model_runner.page_size)
        if problem is not None:
            raise ValueError(f"--page-size: {problem}")
        parallel, speculation = get_parallel(), get_spec()
        if parallel.attn_dcp_size > 1:
            raise ValueError(f"--dcp-size is {parallel.attn_dcp_size}; supported: 1")
        if speculation.speculative_algorithm == "NGRAM":
            raise ValueError(
                "--speculative-algorithm is NGRAM, whose drafts form trees without masks of draft tokens alone; supported: others"
            )
        self.page_size = model_runner.page_size
        self.device = model_runner.device
        self.data_type = model_runner.kv_cache_dtype
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.draft_tokens = speculation.speculative_num_draft_tokens
        self._invariant = get_exec().deterministic.enable_deterministic_inference
        self._verify_mask = None
        if speculation.speculative_eagle_topk not in (None, 1):
            self._verify_mask = self._make_verify_mask(0)
        self._heads = model_runner.model_config.num_attention_heads // parallel.attn_tp_size
        self._pages = -(-model_runner.model_config.context_len // self.page_size)
        self._graph: GraphBuffers | None = None

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate metadata buffers for batches of up to max_bs requests."""
        drafts = self.draft_tokens or 0
        shapes = ((max_bs, self._pages), (max_bs,), (max_bs + 1,), (max_bs, drafts, -(-drafts // _WORD)))
        table, lengths, offsets, tree_mask = (torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in shapes)
        self._graph = GraphBuffers(table, lengths.fill_(1), offsets, tree_mask, PlanBuffers(max(max_bs, max_num_tokens)))
        if self._verify_mask is not None:
            self._verify_mask = self._make_verify_mask(max_bs)

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The mask of draft tokens alone that SGLang writes for trees; None for chains. Larger batches get one of their own."""
        return self._verify_mask

    def _make_verify_mask(self, max_bs: int) -> VerifyMask:
        buffer = torch.zeros(max_bs * self.draft_tokens**2, dtype=torch.bool, device=self.device)
        return VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=max_bs, is_read=True)

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
        plan, num_splits = self._graph.plans.store(metadata.tokens, (metadata.plan, metadata.num_splits))
        self.forward_metadata = DenseMetadata(
            kept(self._graph.block_table, metadata.block_table),
            kept(self._graph.lengths, metadata.lengths),
            None if metadata.cu_seqlens_q is None else kept(self._graph.cu_seqlens_q, metadata.cu_seqlens_q),
            None if metadata.tree_mask is None else kept(self._graph.tree_mask, metadata.tree_mask),
            plan,
            num_splits,
            metadata.tokens,
        )

    def _metadata(self, forward_batch: Any) -> DenseMetadata:
        mode, batch = forward_batch.forward_mode, forward_batch.batch_size
        prefill = mode.is_extend_without_speculative()
        if not (mode.is_decode_or_idle() or mode.is_target_verify() or prefill):
            raise NotImplementedError(f"forward_mode is {mode}; supported: prefill, decode and verification, of target models")
        tokens = self.draft_tokens if mode.is_target_verify() else 1
        layout = resolve_ragged_verify_layout(forward_batch) if mode.is_target_verify() else None
        lengths = forward_batch.seq_lens[:batch].to(torch.int32)
        offsets, tree_mask, ragged = None, None, {}
        if layout is not None:
            if layout.bs != batch:
                layout = layout.padded_to_bucket(padded_bs=batch, cap=tokens)
            offsets, lengths = layout.qo_indptr_device.to(torch.int32), lengths + layout.verify_lens
            ragged = {"cu_seqlens_q": offsets, "total_q": forward_batch.positions.shape[0]}
        elif mode.is_target_verify():
            lengths = lengths + tokens  # SGLang adds the draft tokens to seq_lens only after verification
            if self._verify_mask is not None:
                tree_mask = packed(forward_batch.spec_info.custom_mask[: batch * tokens**2].view(batch, tokens, tokens))
        elif prefill:
            counts, tokens = forward_batch.extend_seq_lens, max(*forward_batch.extend_seq_lens_cpu, 1)
            offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
            ragged = {"cu_seqlens_q": offsets, "total_q": forward_batch.positions.shape[0]}
        # The slots of a page are consecutive: its first slot determines the page.
        slots = self.req_to_token[:, : self._pages * self.page_size : self.page_size]
        table = slots.index_select(0, forward_batch.req_pool_indices[:batch]).div(self.page_size, rounding_mode="floor").to(torch.int32)
        plan = get_mla_metadata(lengths, tokens * self._heads, 1, self._heads, **ragged)
        return DenseMetadata(table, lengths, offsets, tree_mask, *plan, tokens)

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
        """Write the new keys to the pool, then attend with as many query tokens per request as the metadata says.

        q: [all tokens, heads * columns], latent columns followed by rotary columns; k: [all tokens, 1, columns]; v: latent columns of k.
        Returns [all tokens, heads * latent columns] of q's dtype, 0 for tokens of no request. Keys of an e4m3 pool have scale 1.

        Raises ValueError for columns that dense decode does not support.
        """
        if kwargs:
            raise NotImplementedError(f"{', '.join(kwargs)} given; supported: q and k with their rotary columns, no indices, no sinks")
        if k is not None and save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id).unflatten(0, (-1, self.page_size))
        metadata = self.forward_metadata
        heads, d_v, ragged = layer.tp_q_head_num, value_columns(layer.head_dim), metadata.cu_seqlens_q is not None
        tokens = (-1,) if ragged else (metadata.lengths.shape[0], metadata.tokens)
        out, _ = flash_mla_with_kvcache(
            q.view(*tokens, heads, layer.head_dim),
            cache,
            metadata.block_table,
            metadata.lengths,
            d_v,
            metadata.plan,
            metadata.num_splits,
            softmax_scale=layer.scaling,
            causal=True,
            is_fp8_kvcache=cache.dtype == torch.float8_e4m3fn,
            out=q.new_zeros((q.shape[0], heads, d_v)) if ragged else None,
            batch_invariant=self._invariant,
            tree_mask=metadata.tree_mask,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.tokens if ragged else None,
        )
        return out.view(-1, heads * d_v)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Attend with several tokens per request: as forward_decode over latent keys, or to the decompressed keys and values of prefill.

        Of the latter, returns out [all tokens, heads * value columns]. If SGLang merges parts of the keys, returns (out [all tokens, heads,
        value columns], lse fp32 [all tokens, heads]).
        """
        if k is None or v is None or layer.head_dim in LATENT_DIMS:
            return self.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        out, lse = self._prefill(q, k, v, layer, forward_batch)
        return (out, lse) if forward_batch.mha_return_lse else out.flatten(1)

    def _prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the keys of the new tokens, causally, or to those of a chunk of the cached prefixes.

        The latent keys of new tokens are in the pool already. q: [all tokens, heads * columns]; k, v: alike, of the keys. Returns out [all
        tokens, heads, value columns], 0 for tokens of no request, and lse fp32 [all tokens, heads] in natural log, -inf for a token without
        keys, 0 for tokens of no request among the new ones.
        """
        heads, keys, metadata = layer.tp_q_head_num, layer.tp_k_head_num, self.forward_metadata
        prefix = bool(forward_batch.attn_attend_prefix_cache)
        queries: Any = metadata.cu_seqlens_q
        starts, longest = queries, metadata.tokens
        if prefix:
            chunk = forward_batch.prefix_chunk_idx
            starts, longest = forward_batch.prefix_chunk_cu_seq_lens[chunk], forward_batch.prefix_chunk_max_seq_lens[chunk]
        # SGLang's merge gives NaN for a token with -inf in both parts, which tokens of no request would have.
        lse = q.new_full((q.shape[0], heads), -math.inf if prefix else 0.0, dtype=torch.float32)
        out, _ = flash_attn_varlen_func(
            q.view(-1, heads, layer.head_dim),
            k.view(-1, keys, layer.head_dim),
            v.view(-1, keys, layer.v_head_dim),
            queries,
            starts.to(torch.int32),
            metadata.tokens,
            longest,
            softmax_scale=layer.scaling,
            causal=not prefix,
            out=q.new_zeros((q.shape[0], heads, layer.v_head_dim)),
            lse=lse,
            empty_lse=-math.inf,
        )
        return out, lse


def kept(buffer: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the beginning of a buffer and return the copy."""
    return buffer[: given.shape[0]].copy_(given)


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of tokens, bool [batch, tokens, tokens], as int32 [batch, tokens, ceil(tokens / 32)], a bit a token."""
    words = -(-mask.shape[2] // _WORD)
    bits = torch.nn.functional.pad(mask, (0, words * _WORD - mask.shape[2])).unflatten(2, (words, _WORD))
    weights = torch.ones((), dtype=torch.int64, device=mask.device) << torch.arange(_WORD, device=mask.device)
    return (bits * weights).sum(3).to(torch.int32)
