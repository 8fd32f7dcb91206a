"""Backend CUTE_MLA: dense decode over bf16, fp16 and e4m3 caches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport, AttentionLayer, CommonAttentionMetadata, MultipleOf, max_decode_query_len
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from ...api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ...ops.limits import value_columns
from ...spec.dense_decode import unit_tokens
from ..plan_buffers import Plan, PlanBuffers
from . import DENSE
from .capability import DTYPES, E4M3_CACHES, WIDE_CACHES, block_sizes, has_kernels_for, head_sizes, supported_on_any, unsupported_reason
from .layers import (
    CacheWriteMixin,
    check_options,
    concatenate_queries,
    decodes_all,
    max_decode_tokens,
    reserve_queries,
)

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
        return head_sizes(_OP)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Return True if devices of this compute capability run the kernels."""
        return has_kernels_for(_OP, capability)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True if the op is batch invariant on any architecture."""
        return supported_on_any(_OP, batch_invariant=True)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True: all drafts of a block may see each other."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return True: the device says how many query tokens a decode request has."""
        return True

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
        columns = {"head_dim": head_size, "head_dim_v": value_columns(head_size)}
        return unsupported_reason(_OP, device_capability, dtype, kv_cache_dtype, **columns, h_kv=1, causal=True)


@dataclass
class CuteMlaDecodeMetadata(MLACommonDecodeMetadata):
    """Metadata of the decode requests.

    The kernels' requests are vLLM's, or single tokens where ranks share the keys of requests with drafts. tables: int32 [requests, pages]
    and lengths: int32 [requests], of this rank's keys. query_start_loc: int32 [requests + 1] on the device, their query tokens.
    max_query_len: the most of a request, by any batch that replays the same CUDA graph. plan: tile_scheduler_metadata and num_splits.
    dtype: dtype of the model and of out.
    """

    tables: torch.Tensor
    lengths: torch.Tensor
    query_start_loc: torch.Tensor
    max_query_len: int
    plan: Plan
    dtype: torch.dtype


class TokenRows:
    """Buffers of query tokens as requests of their own, which CUDA graphs read at fixed addresses."""

    def __init__(self, tokens: int, pages: int, device: torch.device) -> None:
        self._tables = torch.zeros((tokens, pages), dtype=torch.int32, device=device)
        self._lengths = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)

    def store(self, tables: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy block tables and lengths of tokens to the buffers, and return the copies and offsets [tokens + 1]."""
        tokens = lengths.shape[0]
        return self._tables[:tokens].copy_(tables), self._lengths[:tokens].copy_(lengths), self._starts[: tokens + 1]


class CuteMlaMetadata(MLACommonMetadata[CuteMlaDecodeMetadata]):
    """Metadata of a batch."""


class CuteMlaMetadataBuilder(MLACommonMetadataBuilder[CuteMlaMetadata]):
    """Metadata builder. It plans once a step for all layers, in the buffers that CUDA graphs read.

    Graphs replay decode batches whose requests have any numbers of query tokens up to a bound. Where vLLM is to replay graphs for batches
    with prefill, too, the builder has it decode all tokens.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True
    supports_non_causal_multi_token_dcp: ClassVar[bool] = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, CuteMlaMetadata, supports_dcp_with_varlen=True)
        self._decode_heads = self.num_heads * self.dcp_world_size  # the heads of all ranks attend to this rank's keys
        self._fp8_q = vllm_config.cache_config.cache_dtype in E4M3_CACHES  # vLLM quantises queries where the cache is e4m3
        self._decodes_all = decodes_all(vllm_config)
        if self._decodes_all:
            self.reorder_batch_threshold = vllm_config.scheduler_config.max_num_batched_tokens
        # Keyed by the tokens of a unit: nothing else that varies affects the number of parts of a plan. A unit has a query token or more.
        self._plans = PlanBuffers(max_decode_tokens(vllm_config))
        self._block: int | None = None  # tokens of each request of a batch without causality
        self._rows: TokenRows | None = None  # made by the first batch that needs it, which knows the width of block tables

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the batches that CUDA graphs may hold: any, if vLLM is to capture batches with prefill."""
        return AttentionCGSupport.ALWAYS if decodes_all(vllm_config) else cls._cudagraph_support

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Return the most query tokens of a decode request in a CUDA graph, whose other requests may have fewer."""
        return max_decode_query_len(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False) -> CuteMlaMetadata:
        """Return the metadata of a batch, or of a block of drafts that all see each other."""
        self._block = common_attn_metadata.max_query_len if common_attn_metadata.causal is False else None
        metadata: CuteMlaMetadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        return metadata

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
        # A graph of any batch is replayed with any lengths: its tokens are the bound. In a batch of padding alone, vLLM's is 0.
        # Of drafts that see each other, vLLM's is cut to the target's.
        longest = max(num_decode_tokens if self._decodes_all else self._block or max_query_len, 1)
        requests = (block_table_tensor, seq_lens_device, query_start_loc_device)
        if dcp_tot_seq_lens_device is not None and longest > 1 and self._block is None:
            requests = self._token_rows(block_table_tensor, dcp_tot_seq_lens_device, query_start_loc_device, num_decode_tokens)
            longest = 1
        tables, lengths, starts = requests
        return CuteMlaDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            tables=tables,
            lengths=lengths,
            query_start_loc=starts,
            max_query_len=longest,
            plan=self._plan(lengths, starts, num_decode_tokens, longest),
            dtype=self.model_config.dtype,
        )

    def _token_rows(
        self, tables: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return block tables, lengths and offsets of query tokens as requests of their own, by the lengths of all ranks' keys.

        Which of this rank's keys a token sees depends on its position, not on how many of them its successors see.
        """
        if self._rows is None:
            scheduler = self.vllm_config.scheduler_config
            most = min(scheduler.max_num_seqs * self.reorder_batch_threshold, scheduler.max_num_batched_tokens)
            self._rows = TokenRows(max(most, tokens), tables.shape[1], tables.device)
        row = torch.arange(tokens, device=starts.device)
        owner = torch.searchsorted(starts[1:], row, right=True).clamp(max=len(lengths) - 1)
        seen = torch.where(row < starts[-1], lengths[owner] - starts[owner + 1] + row + 1, 0)
        own = get_dcp_local_seq_lens(seen, self.dcp_world_size, get_dcp_group().rank_in_group, self.cp_kv_cache_interleave_size)
        return self._rows.store(tables[owner], own)

    def _plan(self, lengths: torch.Tensor, query_start_loc: torch.Tensor, tokens: int, max_query_len: int) -> Plan:
        """Plan requests with room for this many query tokens, at most max_query_len each. Lengths stay on the device."""
        plan = get_mla_metadata(
            lengths,
            max_query_len * self._decode_heads,
            1,
            self._decode_heads,
            cu_seqlens_q=query_start_loc,
            total_q=tokens,
            is_fp8_q=self._fp8_q,
        )
        return self._plans.store(unit_tokens(max_query_len, self._decode_heads), plan)


class CuteMlaImpl(CacheWriteMixin, MLACommonImpl[CuteMlaMetadata]):
    """Attention of a layer. Queries are e4m3, if the cache is e4m3, or have the dtype of the model."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **options: Any) -> None:
        check_options(head_size, options)
        super().__init__(num_heads, head_size, scale, num_kv_heads, **options)
        reserve_queries(max_decode_tokens(get_current_vllm_config()), num_heads, head_size)

    def reserve_workspace(self) -> None:
        """Allocate the largest workspace of decode that does not depend on lengths, for vLLM's memory profiler."""
        config = get_current_vllm_config()
        heads, requests = self.num_heads * self.dcp_world_size, config.scheduler_config.max_num_seqs
        device, room = next(self.kv_b_proj.parameters()).device, max_decode_tokens(config)
        longest = [room] if decodes_all(config) else range(1, max_decode_query_len(config) + 1)
        sizes = [
            workspace_size(
                _OP,
                batch=requests,
                s_q=tokens,
                h_q=heads,
                head_dim_v=self.kv_lora_rank,
                total_q=min(requests * tokens, room),
                is_fp8_q=self.kv_cache_dtype in E4M3_CACHES,
                device=device,
            )
            for tokens in longest
        ]
        torch.empty(max(sizes), dtype=torch.uint8, device=device)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: CuteMlaMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode all tokens of the decode requests, any number of each.

        q: [tokens, heads, columns], or (latent [tokens, heads, latent columns], rotary [tokens, heads, rotary columns]). Cache: [blocks,
        block size, columns]; vLLM passes an FP8 cache as e4m3. Returns out [tokens, heads, latent columns] and, if vLLM merges ranks, lse
        fp32 [tokens, heads] in natural log, -inf for a row without keys, as vLLM's merge expects. Tokens that pad the batch have out 0,
        lest what vLLM quantises by all rows is NaN.
        """
        decode, q = attn_metadata.decode, concatenate_queries(q, self.head_size)
        metadata, num_splits = decode.plan
        tokens, heads, _ = q.shape
        out = q.new_zeros((tokens, heads, self.kv_lora_rank), dtype=decode.dtype)
        lse = q.new_empty((tokens, heads), dtype=torch.float32)
        if self.need_to_return_lse_for_decode:
            lse.fill_(-math.inf)  # of the tokens that pad the batch
        quantised = kv_c_and_k_pe_cache.dtype == torch.float8_e4m3fn
        flash_mla_with_kvcache(
            q,
            kv_c_and_k_pe_cache.unsqueeze(2),
            decode.tables,
            decode.lengths,
            self.kv_lora_rank,
            metadata,
            num_splits,
            softmax_scale=self.scale,
            causal=attn_metadata.causal,
            descale_q=layer._q_scale if q.dtype == torch.float8_e4m3fn else None,
            descale_k=layer._k_scale if quantised else None,
            is_fp8_kvcache=quantised,
            out=out,
            lse=lse,
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            empty_lse=-math.inf,
            cu_seqlens_q=decode.query_start_loc,
            max_seqlen_q=decode.max_query_len,
        )
        return out, lse if self.need_to_return_lse_for_decode else None
