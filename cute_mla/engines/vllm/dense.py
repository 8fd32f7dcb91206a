"""Backend CUTE_MLA: dense decode over bf16, fp16 and e4m3 caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionLayer, MultipleOf, max_decode_query_len

from ...api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ...spec.mla import D_V
from ..plan_buffers import Plan, PlanBuffers
from . import DENSE
from .capability import DTYPES, E4M3_CACHES, WIDE_CACHES, block_sizes, has_kernels_for, head_sizes, supported_on_any, unsupported_reason
from .layers import CacheWriteMixin, check_options, concatenate_queries, max_decode_tokens, reserve_queries

_OP = "dense_decode"


class CuteMla(MLACommonBackend):
    """Backend for the configurations of dense decode that is_supported accepts."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *WIDE_CACHES, *E4M3_CACHES]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM registers."""
        return DENSE

    @staticmethod
    def get_impl_cls() -> type[CuteMlaImpl]:
        """Return the class of a layer's attention."""
        return CuteMlaImpl

    @staticmethod
    def get_builder_cls() -> type[CuteMlaMetadataBuilder]:
        """Return the class of the metadata builder."""
        return CuteMlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the supported keys per page."""
        return block_sizes(_OP)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the supported columns of queries and keys."""
        return [size for size in head_sizes(_OP) if supported_on_any(_OP, head_dim=size, fp8_kvcache=True)]

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Return True if devices of this compute capability run the kernels."""
        return has_kernels_for(capability)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True if the op is batch invariant on any architecture."""
        return supported_on_any(_OP, batch_invariant=True)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: decode takes equally many tokens of each request, counted on the host."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Return why this combination is not supported, or None if it is supported."""
        return unsupported_reason(_OP, device_capability, dtype, kv_cache_dtype, head_dim=head_size, head_dim_v=D_V, h_kv=1, causal=True)


@dataclass
class CuteMlaDecodeMetadata(MLACommonDecodeMetadata):
    """Metadata of the decode requests. plan: their tile_scheduler_metadata and num_splits. dtype: dtype of the model and of out."""

    plan: Plan
    dtype: torch.dtype


class CuteMlaMetadata(MLACommonMetadata[CuteMlaDecodeMetadata]):
    """Metadata of a batch."""


class CuteMlaMetadataBuilder(MLACommonMetadataBuilder[CuteMlaMetadata]):
    """Metadata builder. It plans once a step for all layers, in the buffers that CUDA graphs read."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, CuteMlaMetadata)
        self._decode_heads = self.num_heads * self.dcp_world_size  # the heads of all ranks attend to this rank's keys
        # Keyed by query tokens per request: nothing else that varies affects the number of parts of a plan.
        self._plans = PlanBuffers(vllm_config.scheduler_config.max_num_seqs)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> CuteMlaDecodeMetadata:
        return CuteMlaDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            plan=self._plan(seq_lens_device, tokens_per_request(num_decode_tokens, seq_lens_device.shape[0])),
            dtype=self.model_config.dtype,
        )

    def _plan(self, lengths: torch.Tensor, tokens: int) -> Plan:
        """Plan requests with these lengths and this many query tokens each. Lengths stay on the device."""
        return self._plans.store(tokens, get_mla_metadata(lengths, max(tokens, 1) * self._decode_heads, 1, self._decode_heads))


class CuteMlaImpl(CacheWriteMixin, MLACommonImpl[CuteMlaMetadata]):
    """Attention of a layer. Queries are e4m3, if the cache is e4m3, or have the dtype of the model."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = False

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **options: Any) -> None:
        check_options(options)
        super().__init__(num_heads, head_size, scale, num_kv_heads, **options)
        reserve_queries(max_decode_tokens(), num_heads)

    def reserve_workspace(self) -> None:
        """Allocate the largest workspace of decode that does not depend on lengths, for vLLM's memory profiler."""
        config = get_current_vllm_config()
        heads, requests = self.num_heads * self.dcp_world_size, config.scheduler_config.max_num_seqs
        device = next(self.kv_b_proj.parameters()).device
        sizes = [
            workspace_size(_OP, batch=requests, s_q=tokens, h_q=heads, device=device)
            for tokens in range(1, max_decode_query_len(config) + 1)
        ]
        torch.empty(max(sizes), dtype=torch.uint8, device=device)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CuteMlaMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode all tokens of the decode requests, equally many per request.

        q: [tokens, heads, 576], or (latent [tokens, heads, 512], rotary [tokens, heads, 64]). Cache: [blocks, block size, 576]; vLLM passes
        an FP8 cache as e4m3. Returns out [tokens, heads, 512] and, if vLLM merges ranks, lse fp32 [tokens, heads] in natural log, -inf for
        a row without keys, as vLLM's merge expects. A padding request has length 0 and out 0.
        """
        decode, q = attn_metadata.decode, concatenate_queries(q)
        metadata, num_splits = decode.plan
        tokens, heads, _ = q.shape
        shape = (attn_metadata.num_decodes, tokens_per_request(tokens, attn_metadata.num_decodes))
        out = q.new_empty((tokens, heads, D_V), dtype=decode.dtype)
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
        quantised = kv_c_and_k_pe_cache.dtype == torch.float8_e4m3fn
        flash_mla_with_kvcache(
            q.unflatten(0, shape),
            kv_c_and_k_pe_cache.unsqueeze(2),
            decode.block_table,
            decode.seq_lens,
            D_V,
            metadata,
            num_splits,
            softmax_scale=self.scale,
            causal=True,
            descale_q=layer._q_scale if q.dtype == torch.float8_e4m3fn else None,
            descale_k=layer._k_scale if quantised else None,
            is_fp8_kvcache=quantised,
            out=out.unflatten(0, shape),
            lse=lse.unflatten(0, shape).transpose(1, 2),
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            empty_lse=-math.inf,
        )
        return out, lse if self.need_to_return_lse_for_decode else None


def tokens_per_request(tokens: int, requests: int) -> int:
    """Return the query tokens per request. Raise ValueError unless all requests have equally many."""
    each, more = divmod(tokens, requests)
    if more:
        raise ValueError(f"{tokens} query tokens of {requests} requests; supported: equally many of each request")
    return each
