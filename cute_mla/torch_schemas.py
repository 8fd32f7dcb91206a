"""Schemas of the ops of torch in torch_ops.py: arguments and defaults of the public functions, in torch's notation."""

from __future__ import annotations

DECODE = (
    "Tensor q, Tensor k_cache, Tensor? block_table, Tensor? cache_seqlens, int head_dim_v, Tensor tile_scheduler_metadata, "
    "Tensor num_splits, float? softmax_scale=None, bool causal=False, Tensor? descale_q=None, Tensor? descale_k=None, "
    "bool is_fp8_kvcache=False, Tensor? indices=None, Tensor? attn_sink=None, Tensor? extra_k_cache=None, "
    "Tensor? extra_indices_in_kvcache=None, Tensor? topk_length=None, Tensor? extra_topk_length=None, *, "
    "bool batch_invariant=False, float? empty_lse=None, str? kv_format=None, str? extra_kv_format=None, Tensor? cu_seqlens_q=None, "
    "SymInt? max_seqlen_q=None, Tensor? tree_mask=None, SymInt? window=None, SymInt window_sink=0"
)
PREFILL = (
    "Tensor q, Tensor kv, Tensor indices, float sm_scale, int d_v=512, Tensor? attn_sink=None, Tensor? topk_length=None, *, "
    "Tensor? kv_offsets=None, float? empty_lse=None"
)
INDEXER_PREFILL = PREFILL.replace("*, ", "*, SymInt indexer_topk, ")
LENGTHS = "Tensor cu_seqlens_qo, Tensor cu_seqlens_kv, SymInt max_seqlen_qo, SymInt max_seqlen_kv"
VARLEN_OPTIONS = (
    f"{LENGTHS}, float dropout_p=0.0, float? softmax_scale=None, bool causal=False, bool deterministic=False, bool is_varlen=True, *, "
    "float? empty_lse=None"
)
VARLEN = f"Tensor q, Tensor k, Tensor v, {VARLEN_OPTIONS}"
BACKWARD_OPTIONS = f"Tensor out, Tensor lse, {LENGTHS}, float? softmax_scale=None, bool causal=False, *, bool deterministic=True"
VARLEN_BACKWARD = f"Tensor dout, Tensor q, Tensor k, Tensor v, {BACKWARD_OPTIONS}"
PACKED = "Tensor? q, Tensor packed, int head_dim_qk"  # k and v are slices of packed, and q too if it is None
MERGE = "Tensor[] outs, Tensor[] lses, bool stacked=False, *, float? empty_lse=None"
PLAN = (
    "Tensor cache_seqlens, SymInt num_q_tokens_per_head_k, int num_heads_k, int? num_heads_q=None, bool is_fp8_kvcache=False, "
    "SymInt? topk=None, Tensor? cu_seqlens_q=None, SymInt? total_q=None, SymInt? window=None, SymInt window_sink=0"
)
WRITE = (
    "Tensor kv_c, Tensor? k_pe, Tensor(a!) k_cache, Tensor slot_mapping, *, Tensor? descale_k=None, bool power_of_two=False, "
    "str? kv_format=None"
)
INSERT = (
    "Tensor kv_c, Tensor? k_pe, Tensor(a!)? q_pe, Tensor(b!) k_cache, Tensor slot_mapping, Tensor norm_weight, Tensor? cos_sin=None, "
    "Tensor? positions=None, *, Tensor(c!)? keys=None, Tensor? descale_k=None, bool power_of_two=False, str? kv_format=None, float eps=1e-6"
)
GATHER = (
    "Tensor k_cache, Tensor block_table, Tensor cu_seqlens, SymInt rows, *, Tensor? starts=None, Tensor? descale_k=None, "
    "ScalarType? dtype=None, str? kv_format=None"
)
INDEX_KEYS = (
    "Tensor k, Tensor(a!) index_cache, Tensor slot_mapping, Tensor norm_weight, Tensor norm_bias, Tensor cos_sin, Tensor? positions=None, "
    "*, str rope, bool hadamard=False, str scale_format='fp32', float eps=1e-06"
)
INDEX_QUERIES = "Tensor q, Tensor weights, Tensor cos_sin, Tensor? positions=None, *, str rope, bool hadamard=False"
ROW_LOGITS = "Tensor q, Tensor keys, Tensor scales, Tensor weights, Tensor ks, Tensor ke, bool clean_logits=True, SymInt max_seqlen_k=0"
PAGED_LOGITS = (
    "Tensor q, Tensor cache, Tensor weights, Tensor context_lens, Tensor block_table, Tensor? metadata, SymInt max_context_len, "
    "bool clean_logits=True"
)
TOPK = "Tensor logits, Tensor lengths, SymInt topk"
PAGED_TOPK = "Tensor q, Tensor weights, Tensor index_cache, Tensor context_lens, Tensor block_table, SymInt topk, *, bool slots=False"
ROW_TOPK = "Tensor q, Tensor keys, Tensor scales, Tensor weights, Tensor ks, Tensor ke, SymInt topk, *, SymInt? max_seqlen_k=None"
SPARSE_PLAN = (
    "Tensor indices, SymInt num_heads_q, Tensor? topk_length=None, Tensor? extra_indices=None, Tensor? extra_topk_length=None, "
    "Tensor? cu_seqlens_q=None"
)
PLAN_RESULTS = "(Tensor tile_scheduler_metadata, Tensor num_splits)"
