"""Indexers of vLLM's layers over cute_mla.indexer, in the place of DeepGEMM and vLLM's own top-k.

serve_indexer() is called for each layer that uses CUTE_MLA_SPARSE. Layers that own an op SparseAttnIndexer (Hy4) get theirs changed, see
indexer_op.py. Those of DeepSeek-V3.2 and GLM-5 call a function. It and what it relies on are replaced in vLLM's modules, in the process:

    vllm.models.deepseek_v32.attention         sparse_attn_indexer            scores keys and chooses them
    vllm.models.deepseek_v32.common.kernels    mqa_logits_use_mx_scales       False: index caches hold fp32 scales on Blackwell, too
    vllm.v1.attention.backends.mla.indexer     get_paged_mqa_logits_metadata  nothing is planned on the host or compiled at run time
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import vllm.model_executor.layers.sparse_attn_indexer as vllm_indexer
import vllm.models.deepseek_v32.attention as vllm_attention
import vllm.models.deepseek_v32.common.kernels as vllm_kernels
import vllm.v1.attention.backends.mla.indexer as vllm_metadata
from vllm import _custom_ops
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CompilationMode, CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.worker.workspace import current_workspace_manager

from ...indexer import get_paged_mqa_logits_metadata, indexer_topk, indexer_topk_prefill
from .indexer_op import CuteMlaIndexer

_SCALE_BYTES = 4  # of a key in an index cache


class IndexerCall(NamedTuple):
    """Arguments of vLLM's sparse_attn_indexer, in its order."""

    hidden_states: torch.Tensor
    k_cache_prefix: Any
    kv_cache: torch.Tensor
    q_quant: torch.Tensor
    q_scale: torch.Tensor | None
    k: torch.Tensor | None
    weights: torch.Tensor
    quant_block_size: int
    scale_fmt: str | None
    topk_tokens: int
    head_dim: int
    max_model_len: int
    total_seq_lens: int
    topk_indices_buffer: torch.Tensor
    skip_k_cache_insert: bool
    use_pcp: bool
    pcp_shard_decode_requests: bool
    dense_mha_metadata_layer_name: Any
    use_fp4_cache: bool = False
    dcp_rank: int = 0
    dcp_world_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    skip_topk_buffer_clear: bool = False
    candidate_blocks: torch.Tensor | None = None
    candidate_block_size: int = 0
    candidate_write: bool = False
    topk_backend: str = "auto"


def serve_indexer(indexer: Any, config: Any) -> bool:
    """Serve the indexer of a layer by cute_mla.indexer, and return whether that is supported.

    It is not of other models' indexers, such as GLM-5.3-Flash's over pooled keys, nor where ranks share the keys: vLLM merges the ranks'
    choices by kernels of its own over DeepGEMM's logits. An op is served where vLLM does not compile the model, which would trace into it.
    """
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return False
    op = getattr(indexer, "indexer_op", None)
    if isinstance(indexer, vllm_attention.DeepseekV32Indexer):
        vllm_attention.sparse_attn_indexer = sparse_attn_indexer
        vllm_kernels.mqa_logits_use_mx_scales = _uses_mx_scales
    elif isinstance(op, CuteMlaIndexer) and _has_plain_keys(op) and config.compilation_config.mode == CompilationMode.NONE:
        op.choose = sparse_attn_indexer
    else:
        return False
    vllm_metadata.get_paged_mqa_logits_metadata = _planned
    return True


def _has_plain_keys(op: CuteMlaIndexer) -> bool:
    """Return whether an op chooses among keys of single tokens, which it writes itself, in FP8 with fp32 scales."""
    return not op.skip_k_cache_insert and not op.use_fp4_cache and op.compress_ratio == 1 and op.candidate_blocks is None


def _uses_mx_scales() -> bool:
    return False


def _planned(context_lens: torch.Tensor, block_size: int, num_sms: int, indices: torch.Tensor | None = None) -> torch.Tensor:
    """Return what fills vLLM's buffer of the schedule. Nothing reads it. indices: requests of rows, for DeepGEMM alone."""
    return get_paged_mqa_logits_metadata(context_lens, block_size, num_sms)


@eager_break_during_capture
def sparse_attn_indexer(*arguments: Any, **options: Any) -> torch.Tensor:
    """Write the keys that each token attends to into vLLM's buffer, by their positions in its request, ascending, -1 behind the last.

    The arguments are those of vLLM's function, IndexerCall. New index keys are written to the cache unless they are there. In a run without
    metadata, vLLM's function reserves its workspace, which is larger than what is needed here. Returns the buffer, int32 [tokens, at least
    topk].
    """
    call = IndexerCall(*arguments, **options)
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        reserved: torch.Tensor = vllm_indexer.sparse_attn_indexer(*arguments, **options)
        return reserved
    metadata = context.attn_metadata[_resolve_layer_name(call.k_cache_prefix)]
    if call.k is not None and not call.skip_k_cache_insert:
        slots = metadata.slot_mapping  # of fewer keys than there are if rows pad a graph
        _custom_ops.indexer_k_quant_and_cache(call.k[: slots.shape[0]], call.kv_cache, slots, call.quant_block_size, call.scale_fmt)
    if _dense_prefill_alone(call, context):
        return call.topk_indices_buffer
    if not call.skip_topk_buffer_clear:
        call.topk_indices_buffer[: call.hidden_states.shape[0]] = -1
    if metadata.num_prefills:
        _choose_for_prefill(call, metadata)
    if metadata.num_decode_tokens:
        _choose_for_decode(call, metadata)
    return call.topk_indices_buffer


def _dense_prefill_alone(call: IndexerCall, context: Any) -> bool:
    """Return whether vLLM attends to all keys in this batch, so that no choice is read."""
    layer = _resolve_layer_name(call.dense_mha_metadata_layer_name)
    if not layer or context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
        return False
    attention = context.attn_metadata.get(layer)
    dense = getattr(getattr(attention, "prefill", None), "use_dense_mha", False)
    return dense and attention.num_decode_tokens == 0 and not torch.cuda.is_current_stream_capturing()


def _choose_for_prefill(call: IndexerCall, metadata: Any) -> None:
    """Choose keys for the tokens of prefill, by vLLM's chunks: each gathers the index keys of its requests in a row."""
    columns = call.head_dim
    rows, row_scales = current_workspace_manager().get_simultaneous(
        ((call.total_seq_lens, columns), torch.float8_e4m3fn), ((call.total_seq_lens, _SCALE_BYTES), torch.uint8)
    )
    shard = vllm_indexer.PrefillRowShard.from_metadata(metadata.prefill, metadata.num_decode_tokens)
    for chunk in metadata.prefill.chunks:
        keys, scales = rows[: chunk.total_seq_lens], row_scales[: chunk.total_seq_lens]
        if not chunk.skip_kv_gather:
            _custom_ops.cp_gather_indexer_k_quant_cache(call.kv_cache, keys, scales, chunk.block_table, chunk.cu_seq_lens)
        window = (chunk.token_start, chunk.token_end, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
        if shard is not None:
            window = shard.narrow(chunk)
            if window is None:
                continue
        start, end, first, last = window
        indexer_topk_prefill(
            call.q_quant[start:end],
            (keys, scales.view(torch.float32).squeeze(1)),
            call.weights[start:end],
            first,
            last,
            call.topk_tokens,
            max_seqlen_k=chunk.max_seqlen_k,
            out=call.topk_indices_buffer[start:end, : call.topk_tokens],
        )
    if shard is not None:
        shard.exchange_topk(call.topk_indices_buffer, call.topk_tokens)


def _choose_for_decode(call: IndexerCall, metadata: Any) -> None:
    """Choose keys for the tokens of decode requests, which have as many tokens each, or are a request a token where they do not."""
    decode, tokens = metadata.decode, metadata.num_decode_tokens
    lengths, table = decode.seq_lens, decode.block_table
    if decode.requires_padding or tokens % decode.decode_lens.shape[0]:
        lengths, table = _row_by_row(metadata)
    requests = table.shape[0]
    indexer_topk(
        call.q_quant[:tokens].unflatten(0, (requests, tokens // requests)),
        call.weights[:tokens],
        call.kv_cache.unsqueeze(2),
        lengths[:requests].view(requests, -1),
        table,
        call.topk_tokens,
        out=call.topk_indices_buffer[:tokens, : call.topk_tokens],
    )


def _row_by_row(metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return lengths int32 [tokens, 1] and block tables of decode requests with different numbers of tokens, a row a token.

    The host reads no lengths. Tokens behind the last request have length 0.
    """
    tokens, requests = metadata.num_decode_tokens, metadata.num_decodes
    counts = metadata.decode.per_req_decode_lens
    ends = counts.cumsum(0)
    row = torch.arange(tokens, device=ends.device)
    owner = torch.searchsorted(ends, row, right=True)
    real, owner = owner < requests, owner.clamp(max=requests - 1)
    seen = metadata.seq_lens[owner] - ends[owner] + row + 1
    return torch.where(real, seen, 0).to(torch.int32).unsqueeze(1), metadata.block_table[owner]
