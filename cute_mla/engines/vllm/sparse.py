"""CUTE_MLA_SPARSE: decode and prefill by the indices of DeepSeek's indexer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionLayer, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view, triton_filter_and_convert_dcp_index
from vllm.v1.kv_cache_interface import AttentionSpec

from ...api import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from ...spec.mla import D_V
from ..plans import Plan, PlanPlaces
from . import SPARSE
from .capability import DTYPES, PACKED_CACHE, WIDE_CACHES, block_sizes, has_kernels_for, head_sizes, reason_against, somewhere
from .layers import WritesCache, refuse_options, reserve_queries, whole_queries

_OP = "sparse_decode"


class CuteMlaSparse(AttentionBackend):
    """What vLLM may select it for: what is_supported says of sparse decode."""

    supported_dtypes: ClassVar[list[torch.dtype]] = DTYPES
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *WIDE_CACHES, PACKED_CACHE]

    @staticmethod
    def get_name() -> str:
        return SPARSE

    @staticmethod
    def get_impl_cls() -> type[CuteMlaSparseImpl]:
        return CuteMlaSparseImpl

    @staticmethod
    def get_builder_cls() -> type[CuteMlaSparseMetadataBuilder]:
        return CuteMlaSparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return block_sizes(_OP)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Blocks lie a whole number of rows apart: vLLM's slots count rows."""
        return align_blocks_to_rows(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [size for size in head_sizes(_OP) if somewhere(_OP, head_dim=size, fp8_kvcache=False)]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return has_kernels_for(capability)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return somewhere(_OP, batch_invariant=True)

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
        return reason_against(_OP, device_capability, dtype, kv_cache_dtype, head_dim=head_size, head_dim_v=D_V, h_kv=1, topk_length=True)


@dataclass(kw_only=True)
class CuteMlaSparseMetadata(SparseMLACommonMetadata):
    """plans: tile_scheduler_metadata and num_splits, by the number of query tokens that a call may have."""

    plans: dict[int, Plan] = field(default_factory=dict)


class CuteMlaSparseMetadataBuilder(SparseMLACommonMetadataBuilder[CuteMlaSparseMetadata]):
    """Plans once a step, for all layers: each query token is a request of its own, with as many keys as there may be indices."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = CuteMlaSparseMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = vllm_config.parallel_config
        # Which keys a token sees is in its indices: tokens of one request need not be equally many, nor lie on one rank.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=parallel.cp_kv_cache_interleave_size == 1
        )
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._decode_heads = layer.num_heads * self.dcp_world_size
        self._plans = PlanPlaces(vllm_config.scheduler_config.max_num_batched_tokens)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CuteMlaSparseMetadata:
        """Metadata of a batch, with a plan for its decode tokens and one for all of its tokens: vLLM decides layer by layer whether
        prefill goes by indices too."""
        metadata: CuteMlaSparseMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        counts = dict.fromkeys((metadata.num_actual_tokens, metadata.num_decode_tokens))
        metadata.plans = {tokens: self._plan(i, tokens, metadata.req_id_per_token) for i, tokens in enumerate(counts) if tokens}
        return metadata

    def _plan(self, place: int, tokens: int, int32s: torch.Tensor) -> Plan:
        """The plan of so many tokens, in one of two places that stay. Only the length of int32s counts."""
        made = get_mla_metadata(int32s[:tokens], self._decode_heads, 1, self._decode_heads, True, self.topk_tokens)
        return self._plans.keep(place, made)


class CuteMlaSparseImpl(WritesCache, SparseMLACommonImpl[CuteMlaSparseMetadata]):
    """A layer. vLLM makes slots of the indexer's token ids, those of this rank alone where ranks share the keys.

    It also moves the slots to the front of each row, in an order that differs from run to run, and lets a batch decide whether prefill
    goes by indices. Where it asks for batch invariance, neither is done, and one kernel computes all tokens.
    """

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **options: Any) -> None:
        refuse_options(options)
        super().__init__(num_heads, head_size, scale, num_kv_heads, **options)
        if isinstance(self.index_group, HiSparseMLAIndexGroup):
            raise NotImplementedError("hisparse_config is given; supported: caches on the device")
        self.supports_dense_mha_prefill = not envs.VLLM_BATCH_INVARIANT
        reserve_queries(get_current_vllm_config().scheduler_config.max_num_batched_tokens, num_heads)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CuteMlaSparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention of the decode tokens, or of all tokens, over the keys that the indexer chose.

        q: as of dense decode. Returns out [tokens, heads, 512] and, where vLLM merges ranks, lse fp32 [tokens, heads]: natural log, -inf
        for a row without keys.
        """
        q = whole_queries(q)
        self._plans = attn_metadata.plans
        if not envs.VLLM_BATCH_INVARIANT:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        tokens, block_size = q.shape[0], attn_metadata.block_size
        chosen = self.topk_indices_buffer[:tokens]
        slots = triton_filter_and_convert_dcp_index(
            attn_metadata.req_id_per_token[:tokens],
            attn_metadata.block_table,
            chosen,
            dcp_size=self.dcp_world_size,
            dcp_rank=self.dcp_rank,
            cp_kv_cache_interleave_size=attn_metadata.cp_kv_cache_interleave_size,
            BLOCK_SIZE=block_size,
            BLOCK_STRIDE_ROWS=flat_kv_row_view(kv_c_and_k_pe_cache, block_size)[1],
            NUM_TOPK_TOKENS=chosen.shape[1],
            compact_valid_to_front=False,
        )
        return self._forward_mqa_kernel(q, kv_c_and_k_pe_cache, slots, None, layer=layer, block_size=block_size, is_decode=False)

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor | None,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention over slots, int32 [tokens, topk], which are rows of the cache's flat view. valid_counts: int32 [tokens], how many of
        a token's first ones count; None: all. Of a wide cache, batches with prefill go to sparse prefill, others to sparse decode."""
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        out = q.new_empty((*q.shape[:2], D_V))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        if is_decode or self.kv_cache_dtype == PACKED_CACHE:
            self._decode(q, rows, topk_indices, valid_counts, (out, lse))
        else:
            flash_mla_sparse_fwd(
                q,
                rows.unsqueeze(1),
                topk_indices.unsqueeze(1),
                self.scale,
                D_V,
                topk_length=valid_counts,
                out=out,
                lse=lse,
                empty_lse=-math.inf,
            )
        return out, lse if self.need_to_return_lse_for_decode else None

    def _decode(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None,
        results: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Each token as a request of its own, over the cache as pages of one row."""
        out, lse = results
        metadata, num_splits = self._plans[q.shape[0]]
        flash_mla_with_kvcache(
            q.unsqueeze(1),
            rows[:, None, None],
            None,
            None,
            D_V,
            metadata,
            num_splits,
            softmax_scale=self.scale,
            is_fp8_kvcache=self.kv_cache_dtype == PACKED_CACHE,
            indices=slots.unsqueeze(1),
            topk_length=counts,
            out=out.unsqueeze(1),
            lse=lse.unsqueeze(2),
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            empty_lse=-math.inf,
        )
