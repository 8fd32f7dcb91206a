"""CUTE_MLA: dense decode over bf16, fp16 and e4m3 caches."""

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
from ..plans import Plan, PlanPlaces
from . import DENSE
from .capability import DTYPES, E4M3_CACHES, WIDE_CACHES, block_sizes, has_kernels_for, head_sizes, reason_against, somewhere
from .layers import WritesCache, most_decode_tokens, refuse_options, reserve_queries, whole_queries

_OP = "dense_decode"


class CuteMla(MLACommonBackend):
    """What vLLM may select it for: what is_supported says of dense decode."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *WIDE_CACHES, *E4M3_CACHES]

    @staticmethod
    def get_name() -> str:
        return DENSE

    @staticmethod
    def get_impl_cls() -> type[CuteMlaImpl]:
        return CuteMlaImpl

    @staticmethod
    def get_builder_cls() -> type[CuteMlaMetadataBuilder]:
        return CuteMlaMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return block_sizes(_OP)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return head_sizes(_OP)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return has_kernels_for(capability)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return somewhere(_OP, batch_invariant=True)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False: decode takes equally many tokens of each request, counted on the host."""
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
        return reason_against(_OP, device_capability, dtype, kv_cache_dtype, head_dim=head_size, head_dim_v=D_V, h_kv=1, causal=True)


@dataclass
class CuteMlaDecodeMetadata(MLACommonDecodeMetadata):
    """plan: tile_scheduler_metadata and num_splits of these requests. dtype: of the model, which out has."""

    plan: Plan
    dtype: torch.dtype


class CuteMlaMetadata(MLACommonMetadata[CuteMlaDecodeMetadata]):
    """Of a batch."""


class CuteMlaMetadataBuilder(MLACommonMetadataBuilder[CuteMlaMetadata]):
    """Plans once a step, for all layers. A plan lies where the one before lay, so that CUDA graphs find it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, CuteMlaMetadata)
        self._decode_heads = self.num_heads * self.dcp_world_size  # those of all ranks attend to this rank's keys
        # By query tokens of a request: how many parts a plan has depends on them, and on nothing else that changes.
        self._plans = PlanPlaces(vllm_config.scheduler_config.max_num_seqs)

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
            plan=self._plan(seq_lens_device, tokens_of_each(num_decode_tokens, seq_lens_device.shape[0])),
            dtype=self.model_config.dtype,
        )

    def _plan(self, lengths: torch.Tensor, tokens: int) -> Plan:
        """The plan of requests with these lengths and so many query tokens each. Lengths stay on the device."""
        return self._plans.keep(tokens, get_mla_metadata(lengths, max(tokens, 1) * self._decode_heads, 1, self._decode_heads))


class CuteMlaImpl(WritesCache, MLACommonImpl[CuteMlaMetadata]):
    """A layer. Queries may be e4m3 where the cache is, or the model's type."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = False

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **options: Any) -> None:
        refuse_options(options)
        super().__init__(num_heads, head_size, scale, num_kv_heads, **options)
        reserve_queries(most_decode_tokens(), num_heads)

    def reserve_workspace(self) -> None:
        """Shows the memory profiler what decode's partial results take at most, where their number does not depend on lengths."""
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
        """Decode of all tokens of the decode requests, equally many each.

        q: [tokens, heads, 576], or (latent [tokens, heads, 512], rotary [tokens, heads, 64]). Cache: [blocks, block size, 576], which
        vLLM has made e4m3 if it is FP8. Returns out [tokens, heads, 512] and, where vLLM merges ranks, lse fp32 [tokens, heads]: natural
        log, -inf for a row without keys, which is how its merge tells one. A padded request has length 0 and out 0.
        """
        decode, q = attn_metadata.decode, whole_queries(q)
        metadata, num_splits = decode.plan
        tokens, heads, _ = q.shape
        shape = (attn_metadata.num_decodes, tokens_of_each(tokens, attn_metadata.num_decodes))
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


def tokens_of_each(tokens: int, requests: int) -> int:
    """Query tokens of a request. ValueError unless all have equally many."""
    each, more = divmod(tokens, requests)
    if more:
        raise ValueError(f"{tokens} query tokens of {requests} requests; supported: equally many of each request")
    return each
