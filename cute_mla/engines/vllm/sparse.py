"""Backend CUTE_MLA_SPARSE: decode and prefill by the indices of DeepSeek's indexer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.config.vllm import get_current_vllm_config_or_none
from vllm.distributed import get_dcp_group
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view, triton_filter_and_convert_dcp_index
from vllm.v1.kv_cache_interface import AttentionSpec

from ...api import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from ...spec.mla import D_QK, D_V, LATENT_DIMS
from ..plan_buffers import Plan, PlanBuffers
from . import SPARSE
from .capability import PACKED_CACHE, block_sizes, has_kernels_for, head_sizes, supported_on_any, unsupported_reason
from .indexer import serve_indexer
from .layers import CacheWriteMixin, check_options, concatenate_queries, reserve_queries

_OP = "sparse_decode"
_PREFILL = "sparse_prefill"  # also decodes over 16-bit caches of 512 columns


class CuteMlaSparse(AttentionBackend):
    """Backend for the configurations of sparse decode that is_supported accepts."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", PACKED_CACHE]

    @staticmethod
    def get_name() -> str:
        """Return the name that vLLM registers."""
        return SPARSE

    @staticmethod
    def get_impl_cls() -> type[CuteMlaSparseImpl]:
        """Return the class of a layer's attention."""
        return CuteMlaSparseImpl

    @staticmethod
    def get_builder_cls() -> type[CuteMlaSparseMetadataBuilder]:
        """Return the class of the metadata builder."""
        return CuteMlaSparseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the supported keys per page."""
        return block_sizes(_OP)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Align the distance of blocks to whole rows, since vLLM's slots count rows."""
        return align_blocks_to_rows(spec)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the supported columns of queries and keys."""
        return head_sizes(_PREFILL)

    @classmethod
    def is_mla(cls) -> bool:
        """Return True: keys are latent."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Return True: indices select the keys."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Return True if devices of this compute capability run the kernels of prefill, and so those of decode."""
        return has_kernels_for(_PREFILL, capability)

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True if the op has sinks on any architecture."""
        return supported_on_any(_OP, attn_sink=True)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True if the op is batch invariant on any architecture."""
        return supported_on_any(_OP, batch_invariant=True)

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
        reason = _rotary_reason(head_size)
        if reason is not None:
            return reason
        packed = kv_cache_dtype == PACKED_CACHE
        columns = {"head_dim": D_QK if packed else head_size, "head_dim_v": D_V}
        op = _OP if packed or head_size == D_QK else _PREFILL
        return unsupported_reason(op, device_capability, dtype, kv_cache_dtype, **columns, h_kv=1, topk_length=True)


def _rotary_reason(head_size: int) -> str | None:
    """Return why keys of this many columns are not supported with the rotary columns of the current model, None if they are."""
    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None or head_size not in LATENT_DIMS:
        return None
    rotary = LATENT_DIMS[head_size].rotary
    given = getattr(config.model_config.hf_text_config, "qk_rope_head_dim", rotary)
    return None if given == rotary else f"qk_rope_head_dim is {given} with a head size of {head_size}; supported: {rotary}"


def _checked_sinks(sinks: torch.Tensor | None, heads: int) -> torch.Tensor | None:
    """Return the sinks of a layer. Raises ValueError for other dtypes and shapes than those of kernels."""
    if sinks is not None and (sinks.dtype, tuple(sinks.shape)) != (torch.float32, (heads,)):
        raise ValueError(f"sinks are {sinks.dtype} {list(sinks.shape)}; supported: torch.float32 [{heads}]")
    return sinks


@dataclass(kw_only=True)
class CuteMlaSparseMetadata(SparseMLACommonMetadata):
    """Metadata of a batch. plans: tile_scheduler_metadata and num_splits, keyed by the query tokens of a call."""

    plans: dict[int, Plan] = field(default_factory=dict)


class CuteMlaSparseMetadataBuilder(SparseMLACommonMetadataBuilder[CuteMlaSparseMetadata]):
    """Metadata builder. It plans once a step for all layers; each query token is a request with topk keys."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    metadata_cls = CuteMlaSparseMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Indices determine the keys of a token: requests may differ in their numbers of tokens, and keys may lie on several ranks, by any
        # interleave.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=True)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._decode_heads = layer.num_heads * self.dcp_world_size
        self._plans = PlanBuffers(vllm_config.scheduler_config.max_num_batched_tokens)
        self._topk = kv_cache_spec.topk_buffer_width or self.topk_tokens  # GLM-5.3-Flash appends keys to those that the indexer chooses

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Return the most query tokens of a decode request in a CUDA graph, whose other requests may have fewer."""
        return max_decode_query_len(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CuteMlaSparseMetadata:
        """Return the metadata of a batch, with one plan for its decode tokens and one for all of its tokens.

        The second plan serves layers for which vLLM decides that prefill uses indices, too. HiSparse may gather keys for prefill, whose
        tokens are then computed apart, by a third plan.
        """
        metadata: CuteMlaSparseMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        counts = [metadata.num_actual_tokens, metadata.num_decode_tokens]
        if self.vllm_config.attention_config.hisparse_config is not None:
            counts.append(metadata.num_actual_tokens - metadata.num_decode_tokens)
        ids = metadata.req_id_per_token
        metadata.plans = {tokens: self._plan(i, tokens, ids) for i, tokens in enumerate(dict.fromkeys(counts)) if tokens}
        return metadata

    def _plan(self, buffer: int, tokens: int, int32s: torch.Tensor) -> Plan:
        """Plan this many tokens in one of the persistent buffers. The plan depends on the length of int32s only."""
        plan = get_mla_metadata(int32s[:tokens], self._decode_heads, 1, self._decode_heads, True, self._topk)
        return self._plans.store(buffer, plan)


class CuteMlaSparseImpl(CacheWriteMixin, SparseMLACommonImpl[CuteMlaSparseMetadata]):
    """Attention of a layer. vLLM converts the indexer's token ids to slots, only those of this rank if ranks share the keys.

    vLLM also compacts the slots to the front of each row, in an order that differs from run to run, and decides per batch whether prefill
    uses indices. With batch invariance the adapter converts without compaction, and one kernel computes all tokens.

    sinks: fp32 [heads], in the layer's options; they share in the softmax of every token. Where ranks share the keys, the first one folds
    the sinks of all heads in, by out and lse.

    Keys of 512 columns have no rotary ones. Packed caches hold zeros in their place, and so do queries then, as in vLLM's own backends.
    """

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **options: Any) -> None:
        check_options(head_size, options)
        self.sinks = self._folded = _checked_sinks(options.pop("sinks", None), num_heads)
        super().__init__(num_heads, head_size, scale, num_kv_heads, **options)
        self._columns = D_QK if self.kv_cache_dtype == PACKED_CACHE else head_size
        if isinstance(self.index_group, HiSparseMLAIndexGroup) and envs.VLLM_BATCH_INVARIANT:
            raise NotImplementedError("hisparse_config is given with VLLM_BATCH_INVARIANT; supported: one of the two")
        # vLLM would gather packed keys into rows without room for the rotary columns that the model does not have, and without sinks.
        self.supports_dense_mha_prefill = not envs.VLLM_BATCH_INVARIANT and self._columns == head_size and self.sinks is None
        config = get_current_vllm_config()
        serve_indexer(options.get("indexer"), config)
        reserve_queries(config.scheduler_config.max_num_batched_tokens, num_heads, self._columns)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Gather the sinks of the heads that attend to this rank's keys; of the first rank alone, since merging would count them again."""
        super().process_weights_after_loading(act_dtype)
        if self.sinks is not None and self.dcp_world_size > 1:
            gathered = get_dcp_group().all_gather(self.sinks.data, dim=0)
            self._folded = gathered if self.dcp_rank == 0 else None

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CuteMlaSparseMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with the decode tokens, or with all tokens, to the keys that the indexer selected.

        q: as in dense decode. Returns out [tokens, heads, 512] and, if vLLM merges ranks, lse fp32 [tokens, heads] in natural log, -inf for
        a row without keys.
        """
        q = concatenate_queries(q, self._columns)
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
        """Attend to slots, rows of the cache's flat view.

        topk_indices: int32 [tokens, topk]. valid_counts: int32 [tokens], number of leading slots that count; None: all. Over a 16-bit
        cache, batches with prefill and keys of 512 columns run sparse prefill, all others sparse decode.
        """
        rows, _ = flat_kv_row_view(kv_cache, kv_cache.shape[1])  # HiSparse's hot buffer has blocks of its own size
        if self.kv_cache_dtype != PACKED_CACHE:
            rows = rows[:, : self._columns]  # dots3-note pads rows to those of other layers
        out = q.new_empty((*q.shape[:2], D_V))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        if self.kv_cache_dtype == PACKED_CACHE or (is_decode and self._columns == D_QK):
            self._decode(q, rows, topk_indices, valid_counts, (out, lse))
        else:
            flash_mla_sparse_fwd(
                q,
                rows.unsqueeze(1),
                topk_indices.unsqueeze(1),
                self.scale,
                D_V,
                attn_sink=self._folded,
                topk_length=valid_counts,
                out=out,
                lse=lse,
                empty_lse=-math.inf,
            )
        if not self.need_to_return_lse_for_decode:
            return out, None
        return out, lse if self._folded is None else torch.logaddexp(lse, self._folded)

    def _decode(
        self,
        q: torch.Tensor,
        rows: torch.Tensor,
        slots: torch.Tensor,
        counts: torch.Tensor | None,
        results: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Run sparse decode with each token as a request, over the cache as pages of one row."""
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
            attn_sink=self._folded,
            topk_length=counts,
            out=out.unsqueeze(1),
            lse=lse.unsqueeze(2),
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            empty_lse=-math.inf,
        )
