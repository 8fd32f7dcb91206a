"""FlashMLA's functions: plans, decode over a paged cache, sparse prefill and its gradients. Names and argument meanings are FlashMLA's."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch

from ..ops import split_plan
from ..ops.arguments import check_flag, needs_grad
from ..ops.key_lists import CHUNK_TOKENS, DEFAULT_WORKSPACE
from ..ops.split_plan import MlaSchedule
from ..spec.mla import D_V
from ..tracing import decode, prefill
from ..tracing.public import public

__all__ = [
    "MlaSchedule",
    "flash_mla_sparse_bwd",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "plan_sparse_backward",
]

_plan = public(decode.METADATA, tensor="cache_seqlens", name="get_mla_metadata")(split_plan.run)


@overload
def get_mla_metadata() -> tuple[MlaSchedule, None]: ...


@overload
def get_mla_metadata(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    total_q: int | None = None,
    window: int | None = None,
    window_sink: int = 0,
    is_fp8_q: bool = False,
    head_dim_v: int = D_V,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    total_q: int | None = None,
    window: int | None = None,
    window_sink: int = 0,
    is_fp8_q: bool = False,
    head_dim_v: int = D_V,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[MlaSchedule, None]:
    """Plan how decode work is divided among SMs, now or at the first use of a schedule object.

    get_mla_metadata() returns (schedule, None): an empty schedule object, which its first flash_mla_with_kvcache plans.
    Use one schedule for all layers of a decode step. Later calls must have the same shapes.

    get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, ...) plans at once, on the device, and returns
    (tile_scheduler_metadata int32 [num_sm_parts, 8], num_splits int32 [batch + 1]). Both may be copied into buffers of
    the same shapes. num_sm_parts depends on the device, num_q_tokens_per_head_k, num_heads_k, is_fp8_q and head_dim_v alone.

        cache_seqlens            int32 [batch], contiguous: keys of each request. Never read by the host.
        num_q_tokens_per_head_k  s_q * h_q / h_kv
        num_heads_k, num_heads_q h_kv, h_q (checked when given)
        topk                     for sparse decode: indices of a token, of both caches together. num_heads_k must be 1 and
                                 num_heads_q given. Every request counts as having topk keys, and only the length of cache_seqlens
                                 matters. (A schedule object plans by topk_length as well.)
        is_fp8_kvcache           whether the cache is an FP8 one; the plan is the same
        is_fp8_q                 whether q is e4m3, over an e4m3 cache: on Blackwell the kernels for few heads want twice the parts. A plan
                                 for other calls serves as well, by the kernels for many heads. (A schedule object sees q.)
        cu_seqlens_q, total_q    for requests with different numbers of query tokens: cu_seqlens_q of the call, int32 [batch + 1], and
                                 q.shape[0]. num_q_tokens_per_head_k is then max_seqlen_q * h_q / h_kv, and num_heads_q must be given
        window, window_sink      those of the calls; num_heads_q must be given with a window. A plan for other windows is less balanced
        head_dim_v               that of the calls, in dense decode: with 1,024 columns a plan has half as many parts

    With cu_seqlens_q, a plan cuts work units: as many query tokens of one request as have at most 128 rows per KV head (in sparse decode
    each token). num_splits is int32 [units + 1]; in dense decode the rows of tile_scheduler_metadata behind the first num_sm_parts are a
    table of the units (spec.split_plan). Their number depends on batch, total_q, max_seqlen_q and heads alone. Such a plan belongs to the
    contents of cu_seqlens_q, which must not change between plan and call. It is balanced for causal calls.

    One plan serves calls with and without batch_invariant, and block tables of any width. A plan stays correct when lengths
    change afterwards, but is then less balanced. Replaying a CUDA graph does not make a plan again whose first use was outside
    the graph. The host never reads the two tensors. If they do not hold a plan for this number of requests, the results of a call
    are wrong, but the call ends and accesses no other memory. (The simulated device reports reads of uninitialized plans.)

    Raises ValueError on bad arguments, and ArtifactError and DeviceError like flash_mla_with_kvcache.
    """
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    check_flag("is_fp8_q", is_fp8_q)
    if cache_seqlens is None:
        others = (num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk, cu_seqlens_q, total_q, window)
        if is_fp8_q or any(value is not None for value in others):
            raise ValueError("cache_seqlens is None beside other arguments; supported: get_mla_metadata() or all of the first three")
        return MlaSchedule(), None
    if num_q_tokens_per_head_k is None or num_heads_k is None:
        raise ValueError(
            "num_q_tokens_per_head_k or num_heads_k is missing beside cache_seqlens; "
            "supported: get_mla_metadata() or all of the first three"
        )
    ragged = (cu_seqlens_q, total_q)
    queries = (num_q_tokens_per_head_k, num_heads_k, num_heads_q)
    return _plan(cache_seqlens, *queries, is_fp8_kvcache, topk, *ragged, window, window_sink, is_fp8_q, head_dim_v)


@public(decode.WITH_KVCACHE)
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | MlaSchedule,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
    empty_lse: float = math.inf,
    kv_format: str | None = None,
    extra_kv_format: str | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    tree_mask: torch.Tensor | None = None,
    window: int | None = None,
    window_sink: int = 0,
    few_heads: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend new query tokens to a paged latent cache: out = softmax(softmax_scale * q k^T) v.

    Dense (without indices): each request attends to its cache_seqlens keys; v = k[..., :head_dim_v]. Keys have 512
    latent and 64 rotary columns (d_qk 576), 512 latent ones alone (512), 256 latent and 64 rotary ones (320), or 1,024 latent and 64
    rotary ones (1,088; not on RTX boards and DGX Spark).

    q                bf16 or fp16 [batch, s_q, h_q, d_qk], h_q 1 to 128; last dimension contiguous; bf16 where dense decode has a d_qk of
                     512, 320 or 1088, or an e4m3 cache. Address and other strides of q and out are multiples of 4 bytes on Hopper, of 16
                     bytes on Blackwell; .contiguous() or .clone() makes such a copy
    k_cache          same dtype [pages, page size, h_kv, d_qk], h_kv divides h_q; page size 16, 32 or a multiple of 64;
                     address a multiple and strides positive multiples of 16 bytes, last dimension contiguous (block-strided is fine).
                     Or, with d_qk 576, float8_e4m3fn [pages, page size, 1, 576], likewise: the keys are descale_k * k_cache. q may then be
                     float8_e4m3fn too, the queries being descale_q * q: probabilities are rounded to e4m3 as well, the bits of
                     out differ from those of exact products by up to 1e-3 in cosine, and out is bf16
    descale_q, descale_k
                     fp32, one element each, on the device, positive; never read by the host. None: 1
    block_table      int32 [batch, pages per request], rows contiguous: the pages of each request. Entries beyond what
                     cache_seqlens needs are never read; KV beyond cache_seqlens may be anything, NaN too. A used entry outside
                     [0, pages) is a page of zeros; the simulated device reports it
    cache_seqlens    int32 [batch], contiguous: keys of each request, the new tokens' included. Never read by the host; the
                     device clips each length to 0 .. pages per request * page size. Over a cache without pages each length counts as 0
    causal           True: query token i sees key j iff j < cache_seqlens - (s_q - 1 - i). No effect for s_q 1
    tree_mask        int32 [batch, s_q, ceil(s_q / 32)], or [total_q, ceil(max_seqlen_q / 32)] with cu_seqlens_q, last dimension contiguous:
                     which new tokens, a request's last keys, each new token sees. Token i sees new token j iff bit j % 32 of word
                     j // 32 is set, and all keys before the new tokens. Bits of no token count for nothing. causal then has no effect
    window           query token i, whose own key is cache_seqlens - s_q + i, sees of the keys up to that one only the last `window`, its
                     own included: those from cache_seqlens - s_q + i - window + 1 on. It is window_size[0] + 1 of FlashAttention, and
                     sliding_window of a model. causal decides on later keys as ever. 1 to 2^30, None: all. Not with tree_mask; with
                     cu_seqlens_q in causal calls, and the max_seqlen_q keys before all windows of a request must be finite
    window_sink      the first keys, which every token sees in spite of its window; 0 without a window. Tiles of 64 keys of which no
                     token sees a key are skipped: their block_table entries are not read. KV that no token sees may be anything

    Sparse (with indices): each query token attends to the slots that its indices name. causal must be False. block_table
    and cache_seqlens are ignored and may be None.

    indices          int32 [batch, s_q, topk], last dimension contiguous: page * page size + row. An index outside
                     [0, pages * page size) is skipped. Slots that no valid index names may hold anything, NaN too
    q, k_cache       one of these formats (spec.cache_format), h_kv 1, any page size, pages and base 16-byte aligned:
                     q [..., 576] bf16, k_cache [pages, page size, 1, 656] of uint8, int8 or float8_e4m3fn, is_fp8_kvcache True:
                     512 e4m3, 4 fp32 scales, 64 bf16 RoPE columns a token; v = k[..., :512]
                     q [..., 512] bf16, k_cache [pages, page size, 1, 584], likewise: a page has 576 bytes a token, 448 e4m3 and
                     64 bf16 RoPE columns, then 8 bytes a token of which 7 are e8m0 scales; v = k. Pages may be padded
                     q [..., 512] bf16, k_cache [pages, page size, 1, 528], likewise, and named by kv_format: 512 e4m3 and 16 e8m0
                     scales ("v41", behind each token; "v41_paged", behind all rows of a page) or 4 fp32 scales ("nope_528"); v = k
                     q [..., 576] bf16, k_cache of the same dtype [pages, page size, 1, 576], is_fp8_kvcache False
    topk_length      int32 [batch], contiguous: number of leading indices that count; None: all
    extra_k_cache, extra_indices_in_kvcache, extra_topk_length
                     a second cache of the same format, with a page size of its own; its indices [batch, s_q, extra topk];
                     and their lengths. Attended to together with the first cache. Beside "v41" or "v41_paged" it may have either of
                     these orders, or 288 bytes a token ("v41_fp4"): 512 e2m1 and 32 e4m3 scales

    Both:

    head_dim_v       the latent columns: 512, or in dense decode 256 with d_qk 320 and 1024 with d_qk 1088
    tile_scheduler_metadata, num_splits
                     the result of get_mla_metadata: (schedule, None) or the two tensors
    softmax_scale    positive, default q.shape[-1] ** -0.5
    attn_sink        fp32 [h_q], contiguous: out is scaled by exp(lse) / (exp(lse) + exp(sink)), lse is not. -inf: no sink
    out              [batch, s_q, h_q, head_dim_v] in q's dtype (see above for e4m3); last dimension contiguous, address and strides as of q
    lse              fp32 [batch, h_q, s_q], any strides
    workspace        contiguous, at least workspace_size(op, ...) bytes, address a multiple of 16; not to be shared by
                     calls that may run at the same time
    batch_invariant  True: the bits of a request depend neither on its batchmates nor on the number of SMs
    empty_lse        lse of a row that attends to nothing, inf or -inf; its out is 0
    kv_format, extra_kv_format
                     names of the formats of k_cache and extra_k_cache (spec.cache_format), which must fit dtype and bytes a token;
                     None: these two decide, but for 528 bytes, which three formats have
    cu_seqlens_q, max_seqlen_q
                     requests with different numbers of query tokens, 0 included, whose tokens are packed one request behind the other:
                     q [total_q, h_q, d_qk], out [total_q, h_q, head_dim_v], lse fp32 [total_q, h_q]; indices [total_q, topk], topk_length
                     int32 [total_q], and likewise of the second cache; block_table and cache_seqlens have a row per request. Request r
                     has the tokens cu_seqlens_q[r] to cu_seqlens_q[r + 1] - 1: int32 [batch + 1], contiguous, 0 first, ascending, never
                     read by the host. Tokens from cu_seqlens_q[batch] on are neither read nor written. max_seqlen_q bounds the tokens
                     of a request; with fewer rows than 128 per KV head it should be small, since tokens that requests lack cost as much
                     as others. The device clips cu_seqlens_q to total_q. Dense decode takes no more than max_seqlen_q tokens of a
                     request; sparse decode, where every token has indices of its own, takes all
    few_heads        False: the kernels for many heads. True: those for few heads where there are any (on Hopper, sparse decode over
                     FP8 caches with up to 16 heads, and dense decode over e4m3 with bf16 queries, up to 16 rows and no
                     batch_invariant; on Blackwell, dense decode without batch_invariant, of e4m3 over e4m3 with up to 64 rows and a plan
                     made with is_fp8_q, and of bf16 over bf16 keys of 576 columns with up to 16 rows, a schedule object, no
                     tree_mask and no window), which are predicted to be faster; bits differ

    out, lse and workspace share memory neither with each other nor with operands, nor their elements with one another; only the first
    call with its shapes and options checks that, and that a storage was not shrunk. No tensor may require gradients, unless gradients are
    switched off.

    Returns (out, lse), lse in natural log. With out, lse and workspace given, nothing is allocated (a schedule object
    allocates its plan at its first use). Runs on the current stream, does not synchronise, and can be captured in a CUDA
    graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """


@overload
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: Literal[0] = 0,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse_indexer: None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


@overload
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse_indexer: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, ...]: ...


@public(prefill.SPARSE_FWD, also=(needs_grad, "q, kv, attn_sink"))
def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse_indexer: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, ...]:
    """Attend each query token to the rows of an unpaged latent that its indices name: sparse prefill.

    out = softmax(sm_scale * q k^T) v, where k are a token's rows and v = k[:, :512].

    q                bf16 [s_q, h_q, d_qk], d_qk 576 or 512, h_q 1 to 128; last dimension contiguous, address and other strides multiples
                     of 4 bytes on Hopper, of 16 bytes on Blackwell
    kv               same dtype [s_kv, 1, d_qk]; address and strides multiples of 16 bytes, last dimension contiguous
    indices          int32 [s_q, 1, topk], last dimension contiguous, any topk: rows of kv. An index outside [0, s_kv) is
                     skipped. Rows that no valid index names may hold anything, NaN too
    sm_scale         positive and finite
    d_v              512
    attn_sink        fp32 [h_q], contiguous: out is scaled by exp(lse) / (exp(lse) + exp(sink)); lse and max_logits are
                     not. -inf: no sink
    topk_length      int32 [s_q], contiguous: number of a token's leading indices that count, clipped to 0 .. topk on the
                     device; later indices are never read. None: all. Never read by the host
    indexer_topk     0 to topk. Not 0: return lse_indexer too, the lse of the indexer's entries, a token's first indexer_topk indices

    A batch of requests, each with its own rows: q [batch, s_q, h_q, d_qk], indices [batch, s_q, 1, topk], topk_length
    [batch, s_q], the results with the batch in front as well, and kv one of

        [batch, s_kv, 1, d_qk], whose batch may be expanded (all requests over the same rows), or
        [rows, 1, d_qk] with kv_offsets, int32 [batch + 1], contiguous: request r has the rows kv_offsets[r] to
        kv_offsets[r + 1] - 1, and its indices count from the first of them. Offsets are clipped to [0, rows] on the device,
        and a request whose rows end before they begin has none. Never read by the host

    out              [.., s_q, h_q, 512] in q's dtype; last dimension contiguous, address and strides as of q
    max_logits, lse, lse_indexer
                     fp32 [.., s_q, h_q], any strides; lse_indexer only with indexer_topk
    empty_lse        lse and lse_indexer of a row that attends to nothing, inf or -inf

    Results share memory neither with each other nor with operands, nor their elements with one another.

    Gradients of out and lse reach q, kv and attn_sink through flash_mla_sparse_bwd. Gradients of max_logits, of a call with results
    given or with indexer_topk, and of gradients (double backward) raise ValueError.

    Returns (out, max_logits, lse), with indexer_topk (out, max_logits, lse, lse_indexer). max_logits is the greatest sm_scale * score
    of a row, in natural units; lse is the natural log of the sum of exp(sm_scale * score), and lse_indexer the same over the first
    indexer_topk indices, of which invalid ones and those behind topk_length are skipped. It has the bits of lse of a call whose
    topk_length ends there. A row that attends to nothing has out 0, max_logits -inf and lse empty_lse; so has lse_indexer where no index
    counts. The bits of a token depend neither on the tokens beside it nor on the number of SMs.

    With all results given, nothing is allocated; no workspace is needed, and no plan. s_q, s_kv, topk or batch 0
    and offsets beyond 2^31 elements are fine. Runs on the current stream, does not synchronise, and can be captured in a
    CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """


@public(prefill.SPARSE_BWD)
def flash_mla_sparse_bwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    key_plan: tuple[torch.Tensor, torch.Tensor] | None = None,
    dkv_accumulate: bool = False,
    max_workspace: int = DEFAULT_WORKSPACE,
    dq: torch.Tensor | None = None,
    dkv: torch.Tensor | None = None,
    d_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of flash_mla_sparse_fwd's q, kv and attn_sink from that of its out.

    q, kv, indices, sm_scale, d_v, attn_sink, topk_length, kv_offsets
                     as in the forward call, with or without a batch
    out, lse         results of the forward call, of any empty_lse, or of sparse decode over the same rows. lse is the natural logarithm
                     and does not include the sink
    dout             bf16 [.., s_q, h_q, 512]: gradient of out, finite in rows whose lse is infinite
    dlse             fp32 [.., s_q, h_q]: gradient of lse. None: 0
    key_plan         what plan_sparse_backward returned for these indices, topk_length, kv_offsets and rows of kv; its chunks are those of
                     the call then, and max_workspace has no effect. Only its sizes are checked. No bit depends on it. None: made anew
    dkv_accumulate   add the gradient of kv to dkv, which is fp32
    max_workspace    bytes that the call may allocate for what lies between its kernels. It works in chunks of tokens that fit, of one
                     token at least; chunks never change a bit of dq or dkv. 128 heads and 2,048 indices take 3.4 MB a token
    dq               bf16, of q's shape; last dimension contiguous, address and other strides multiples of 16 bytes
    dkv              bf16 or fp32, of kv's shape, contiguous
    d_sink           fp32 [h_q]

    Returns (dq, dkv, d_sink); d_sink is 0 without attn_sink. A row whose lse is inf or -inf, and a head whose sink is inf, has dq 0 and
    adds nothing to dkv and d_sink. An index that occurs twice counts twice; one that names no row adds nothing, and nothing is read for it.
    A row of kv that no index names has dkv 0, and may hold anything, NaN too. Where requests share rows by kv_offsets, dkv has the sum.

    There are no atomic additions of floats: a row of dkv is summed in fp32 over the tokens that have chosen it, one after the other, from
    rows that are rounded to bf16. So the bits of dq and dkv depend neither on other tokens and requests nor on the number of SMs. d_sink is
    a sum in fp32 over all tokens of the call: neighbours, then neighbouring sums, and so on. Its bits depend on the tokens and their order
    alone, not on chunks, SMs or the device's kind of addition; those of a part of the batch are not a part of those of the batch.

    Operands of q, out and dout whose rows do not begin at multiples of 16 bytes are copied. Allocates, beside results that are not
    given, up to max_workspace bytes. Runs on the current stream, does not synchronise, and can be captured in a CUDA graph. CPU
    tensors run on the simulated device inside cute_mla.simulate("sm90").

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """


@public(prefill.SPARSE_PLAN, tensor="indices")
def plan_sparse_backward(
    indices: torch.Tensor,
    s_kv: int,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the slots that name each key, for the backward passes of sparse attention and of its indexer.

    indices          int32 [s_q, 1, topk] or [batch, s_q, 1, topk], as in flash_mla_sparse_fwd
    s_kv             rows of kv; with a batch and no kv_offsets, of each request
    topk_length, kv_offsets
                     as in flash_mla_sparse_fwd
    chunk_tokens     query tokens of a chunk at most: a backward pass holds what lies between its kernels of one chunk at a time

    Returns (row_starts, entries) for key_plan of flash_mla_sparse_bwd and indexer_backward: int32 [chunks, keys + 1] and int32
    [tokens, topk]. Layers that share indices share a plan, which costs 4 bytes a slot, and 4 a key and chunk. Entries of a chunk are
    (token in the chunk) * topk + slot, ascending for each key; those of key s are from row_starts[c, s] on, up to row_starts[c, s + 1].
    What lies behind a chunk's last list is not written. The lists are a function of the indices alone.

    Runs on the current stream, does not synchronise, and can be captured in a CUDA graph. CPU tensors run on the simulated device inside
    cute_mla.simulate(). Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or
    device refuse, SimulationError if the simulated device finds fault with a kernel.
    """
