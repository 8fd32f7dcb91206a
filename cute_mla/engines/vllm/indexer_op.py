"""vLLM's SparseAttnIndexer with a place for another choice of keys. Registered when vLLM loads its plugins, before it makes layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

NAME = "SparseAttnIndexer"  # vLLM looks up the name of its class


class CuteMlaIndexer(SparseAttnIndexer):
    """The indexer op of a layer of Hy4 or of DeepSeek's older classes: vLLM's own, until a layer of CUTE_MLA_SPARSE sets choose.

    choose takes the arguments of vLLM's sparse_attn_indexer.
    """

    choose: Callable[..., torch.Tensor] | None = None

    def forward_cuda(self, hidden_states: torch.Tensor, q_quant: Any, k: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
        """Write keys to the index cache unless they are there, and choose those that each token attends to."""
        if self.choose is None:
            chosen: torch.Tensor = super().forward_cuda(hidden_states, q_quant, k, weights)
            return chosen
        return self.choose(
            hidden_states,
            self.k_cache.prefix,
            self.k_cache.kv_cache,
            q_quant,
            None,
            k,
            weights,
            self.quant_block_size,
            self.scale_fmt,
            self.topk_tokens,
            self.head_dim,
            self.max_model_len,
            self.max_total_seq_len,
            self.topk_indices_buffer,
            self.skip_k_cache_insert,
            use_pcp=False,
            pcp_shard_decode_requests=False,
            dense_mha_metadata_layer_name=self.dense_mha_metadata_layer_name,
        )
