"""The public functions: torch tensors in, torch tensors out. Names and argument meanings are FlashMLA's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch

from .decode_call import decode
from .decode_op import accumulator_bytes
from .dense_decode_op import DenseOperands
from .merge_states_op import MergeOperands
from .runtime.device import device_for
from .schedule import KeyCounts, MlaSchedule
from .schedule import plan as plan_splits
from .sparse_decode_op import SparseOperands
from .sparse_prefill_op import PrefillOperands, PrefillResults, PrefillWanted
from .spec.dense_decode import MAX_KEYS, num_parts
from .spec.mla import D_V, MAX_HEADS
from .spec.split_plan import NO_LIMIT, accumulator_rows, invariant_splits
from .support import check_op, heads_problem, is_supported
from .tensors import (
    address_of,
    alignment,
    check_apart,
    check_columns,
    check_contiguous,
    check_dtype,
    check_empty_lse,
    check_flag,
    check_integer,
    check_scale,
    check_shape,
    is_integer,
    optional_spec,
    refuse_gradients,
    shown,
    spec_of,
)
from .tracing import dispatch_modes, is_dynamo_compiling, is_traced

__all__ = [
    "MlaSchedule",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "is_supported",
    "merge_states",
    "workspace_size",
]


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
) -> tuple[torch.Tensor, torch.Tensor]: ...


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[MlaSchedule, None]:
    """Plans how decode work is shared out among SMs. Two forms:

    get_mla_metadata() returns (schedule, None): an empty schedule object, planned by its first flash_mla_with_kvcache.
    Use one for all layers of a decode step. It may only be used again with the same shapes.

    get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, ...) plans at once, on the device, and returns
    (tile_scheduler_metadata int32 [num_sm_parts, 8], num_splits int32 [batch + 1]), which may be copied into buffers of
    the same shapes. num_sm_parts depends on the device, num_q_tokens_per_head_k and num_heads_k alone.

        cache_seqlens            int32 [batch], contiguous: keys of each request. Never read by the host.
        num_q_tokens_per_head_k  s_q * h_q / h_kv
        num_heads_k, num_heads_q h_kv, h_q (checked when given)
        topk                     for sparse decode: indices of a token, of both caches together. Then num_heads_k must be 1,
                                 num_heads_q given, and of cache_seqlens only the batch counts: every request is taken to have
                                 topk keys. (A schedule object plans by topk_length as well.)
        is_fp8_kvcache           whether the cache is an FP8 one; the plan is the same

    One plan serves calls with and without batch_invariant, and block tables of any width. It stays correct when lengths
    change afterwards; it is then less balanced. A plan whose first use was outside a CUDA graph is not made again by
    replaying the graph. The host never looks into the two tensors: if they hold something else than a plan for as many
    requests, a call gives wrong numbers, but it ends and keeps to its operands. (The simulated device notices that it reads what
    nothing wrote.)

    Raises ValueError on bad arguments, ArtifactError and DeviceError as flash_mla_with_kvcache.
    """
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    if cache_seqlens is None:
        if any(value is not None for value in (num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk)):
            raise ValueError("cache_seqlens is None beside other arguments; supported: get_mla_metadata() or all of the first three")
        return MlaSchedule(), None
    if num_q_tokens_per_head_k is None or num_heads_k is None:
        raise ValueError(
            "num_q_tokens_per_head_k or num_heads_k is missing beside cache_seqlens; "
            "supported: get_mla_metadata() or all of the first three"
        )
    shared = (num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk)
    if (is_dynamo_compiling() or dispatch_modes() or cache_seqlens.__class__ is not torch.Tensor) and is_traced(cache_seqlens):
        from . import torch_ops

        return torch_ops.get_mla_metadata(cache_seqlens, *shared)
    rows, columns = planned_rows(*shared)
    spec = spec_of("cache_seqlens", cache_seqlens)
    check_shape("cache_seqlens", spec, ("batch",))
    check_dtype("cache_seqlens", spec, torch.int32)
    check_contiguous("cache_seqlens", spec)
    device = device_for(spec.device)
    counts = KeyCounts(cache_seqlens, None, NO_LIMIT, 0) if topk is None else KeyCounts(None, None, topk, 0)
    return plan_splits(device, counts, spec.shape[0], num_parts(device.arch, rows, columns, device.sm_count), spec.device)


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of new query tokens over a paged latent cache: out = softmax(softmax_scale * q k^T) v.

    Dense (without indices): each request attends to its cache_seqlens keys; v = k[..., :512].

    q                bf16 or fp16 [batch, s_q, h_q, 576], h_q 1 to 128; last dimension contiguous, other strides free
    k_cache          same dtype [pages, page size, h_kv, 576], h_kv divides h_q; page size 16, 32 or a multiple of 64;
                     address and strides multiples of 16 bytes, last dimension contiguous (block-strided caches are fine).
                     Or float8_e4m3fn [pages, page size, 1, 576], likewise: the keys are descale_k * k_cache. q may then be
                     float8_e4m3fn too, the queries being descale_q * q: probabilities are rounded to e4m3 as well, the bits of
                     out differ from those of exact products by up to 1e-3 in cosine, and out is bf16, or fp16 if given
    descale_q, descale_k
                     fp32, one element each, on the device, positive; never read by the host. None: 1
    block_table      int32 [batch, pages per request], rows contiguous: the pages of each request. Entries beyond what
                     cache_seqlens needs are never read; KV beyond it may be anything, NaN too
    cache_seqlens    int32 [batch], contiguous: keys of each request, the new tokens' included. Never read by the host; the
                     device takes a negative one for 0, and one that the table has no room for as what it has room for
    causal           True: query token i sees key j iff j < cache_seqlens - (s_q - 1 - i). Means nothing for s_q 1

    Sparse (with indices): each query token attends to the slots that its indices name; causal must be False, block_table
    and cache_seqlens are not looked at and may be None.

    indices          int32 [batch, s_q, topk], last dimension contiguous: page * page size + row. Anything outside
                     [0, pages * page size) is skipped, and what no valid index names may be anything, NaN too
    q, k_cache       one of three formats (spec.cache_format), h_kv 1, any page size, pages and base 16-byte aligned:
                     q [..., 576] bf16, k_cache [pages, page size, 1, 656] of uint8, int8 or float8_e4m3fn, is_fp8_kvcache True:
                     512 e4m3, 4 fp32 scales, 64 bf16 RoPE columns a token; v = k[..., :512]
                     q [..., 512] bf16, k_cache [pages, page size, 1, 584], likewise: a page has 576 bytes a token, 448 e4m3 and
                     64 bf16 RoPE columns, then 8 bytes a token of which 7 are e8m0 scales; v = k. Pages may be padded
                     q [..., 576] bf16 or fp16, k_cache of the same dtype [pages, page size, 1, 576], is_fp8_kvcache False
    topk_length      int32 [batch], contiguous: only so many of the first indices count; None: all
    attn_sink        fp32 [h_q], contiguous: out is scaled by exp(lse) / (exp(lse) + exp(sink)), lse is not. -inf: no sink
    extra_k_cache, extra_indices_in_kvcache, extra_topk_length
                     a second cache of the same format (its page size its own), its indices [batch, s_q, extra topk], and
                     their lengths: attended to besides

    Both:

    head_dim_v       512
    tile_scheduler_metadata, num_splits
                     what get_mla_metadata returned: (schedule, None) or the two tensors
    softmax_scale    positive, default q.shape[-1] ** -0.5
    out              [batch, s_q, h_q, 512] in q's dtype (see above for e4m3); last dimension contiguous, other strides free
    lse              fp32 [batch, h_q, s_q], any strides
    workspace        contiguous, at least workspace_size(op, ...) bytes, address a multiple of 16; not to be shared by
                     calls that may run at the same time
    batch_invariant  True: the bits of a request depend neither on its batchmates nor on the number of SMs
    empty_lse        lse of a row that attends to nothing, inf or -inf; its out is 0

    out, lse and workspace share memory neither with each other nor with operands; that is looked at when a call is the first with its
    shapes and options, and not again. No tensor may require gradients, unless gradients are switched off.

    Returns (out, lse), lse in natural log. With out, lse and workspace given, nothing is allocated (a schedule object
    allocates its plan at its first use). Runs on the current stream, does not synchronise, and can be captured in a CUDA
    graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """
    if (is_dynamo_compiling() or dispatch_modes() or q.__class__ is not torch.Tensor) and is_traced(q):
        from . import torch_ops

        return torch_ops.flash_mla_with_kvcache(
            (tile_scheduler_metadata, num_splits),
            {"out": out, "lse": lse, "workspace": workspace},
            q=q,
            k_cache=k_cache,
            block_table=block_table,
            cache_seqlens=cache_seqlens,
            head_dim_v=head_dim_v,
            softmax_scale=softmax_scale,
            causal=causal,
            descale_q=descale_q,
            descale_k=descale_k,
            is_fp8_kvcache=is_fp8_kvcache,
            indices=indices,
            attn_sink=attn_sink,
            extra_k_cache=extra_k_cache,
            extra_indices_in_kvcache=extra_indices_in_kvcache,
            topk_length=topk_length,
            extra_topk_length=extra_topk_length,
            batch_invariant=batch_invariant,
            empty_lse=empty_lse,
        )
    schedule, metadata = None, tile_scheduler_metadata
    if num_splits is None and isinstance(metadata, MlaSchedule):
        schedule = metadata
        metadata, num_splits = schedule.plan or (None, None)  # type: ignore[assignment]
    if indices is None:
        key: tuple[Any, ...] = (
            DenseOperands, head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, empty_lse,
            attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
            descale_q is None, descale_k is None, schedule is None, num_splits is None, out is None, lse is None, workspace is None,
        )  # fmt: skip
        tensors: tuple[Any, ...] = (
            q, k_cache, block_table, cache_seqlens, descale_q, descale_k,
            metadata, num_splits, out, lse, workspace,
        )  # fmt: skip
    else:
        key = (
            SparseOperands, head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, empty_lse,
            descale_q, descale_k,
            extra_k_cache is None, extra_indices_in_kvcache is None, extra_topk_length is None, topk_length is None, attn_sink is None,
            schedule is None, num_splits is None, out is None, lse is None, workspace is None,
        )  # fmt: skip
        tensors = (
            q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, attn_sink,
            metadata, num_splits, out, lse, workspace,
        )  # fmt: skip
    return decode(key, tensors, schedule)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of each query token over the rows of an unpaged latent that its indices name: sparse prefill.

    out = softmax(sm_scale * q k^T) v, where k are a token's rows and v = k[:, :512].

    q                bf16 or fp16 [s_q, h_q, d_qk], d_qk 576 or 512, h_q 1 to 128; last dimension contiguous, other strides free
    kv               same dtype [s_kv, 1, d_qk]; address and strides multiples of 16 bytes, last dimension contiguous
    indices          int32 [s_q, 1, topk], last dimension contiguous, any topk: rows of kv. Anything outside [0, s_kv) is
                     skipped, and what no valid index names may be anything, NaN too
    sm_scale         positive and finite
    d_v              512
    attn_sink        fp32 [h_q], contiguous: out is scaled by exp(lse) / (exp(lse) + exp(sink)); lse and max_logits are
                     not. -inf: no sink
    topk_length      int32 [s_q], contiguous: only so many of a token's first indices count (a negative one counts as 0, one
                     above topk as topk); what is behind them is never read. None: all. Never read by the host

    A batch of requests, each with its own rows: q [batch, s_q, h_q, d_qk], indices [batch, s_q, 1, topk], topk_length
    [batch, s_q], the results with the batch in front as well, and kv one of

        [batch, s_kv, 1, d_qk], whose batch may be expanded (all requests over the same rows), or
        [rows, 1, d_qk] with kv_offsets, int32 [batch + 1], contiguous: request r has the rows kv_offsets[r] to
        kv_offsets[r + 1] - 1, and its indices count from the first of them. Offsets are clipped to [0, rows] on the device,
        and a request whose rows end before they begin has none. Never read by the host

    out              [.., s_q, h_q, 512] in q's dtype; last dimension contiguous, other strides free
    max_logits, lse  fp32 [.., s_q, h_q], any strides
    empty_lse        lse of a row that attends to nothing, inf or -inf

    Results share memory neither with each other nor with operands. No tensor may require gradients, unless gradients are switched off.

    Returns (out, max_logits, lse). max_logits is the greatest sm_scale * score of a row, in natural units; lse is the
    natural log of the sum of exp(sm_scale * score). A row that attends to nothing has out 0, max_logits -inf and lse
    empty_lse. The bits of a token depend neither on the tokens beside it nor on the number of SMs.

    With out, lse and max_logits given, nothing is allocated; no workspace is needed, and no plan. s_q, s_kv, topk or batch 0
    and offsets beyond 2^31 elements are fine. Runs on the current stream, does not synchronise, and can be captured in a
    CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """
    if (is_dynamo_compiling() or dispatch_modes() or q.__class__ is not torch.Tensor) and is_traced(q):
        from . import torch_ops

        return torch_ops.flash_mla_sparse_fwd(
            {"out": out, "max_logits": max_logits, "lse": lse},
            q=q,
            kv=kv,
            indices=indices,
            sm_scale=sm_scale,
            d_v=d_v,
            attn_sink=attn_sink,
            topk_length=topk_length,
            kv_offsets=kv_offsets,
            empty_lse=empty_lse,
        )
    check_columns("d_v", d_v)
    check_scale("sm_scale", sm_scale)
    check_empty_lse(empty_lse)
    wanted = PrefillWanted(
        out=optional_spec("out", out),
        max_logits=optional_spec("max_logits", max_logits),
        lse=optional_spec("lse", lse),
        address_alignment=alignment(address_of("q", q), 0 if out is None else out.data_ptr()),
    )
    device = device_for(q.device)
    operands = PrefillOperands(q, kv, indices, topk_length, attn_sink, kv_offsets)
    refuse_gradients(q=q, kv=kv, attn_sink=attn_sink, out=out, max_logits=max_logits, lse=lse)
    plan = operands.plan(wanted, device)
    check_apart({"out": out, "max_logits": max_logits, "lse": lse}, operands._asdict())
    results = PrefillResults(
        out=q.new_empty(plan.out_shape) if out is None else out,
        max_logits=q.new_empty(plan.row_shape, dtype=torch.float32) if max_logits is None else max_logits,
        lse=q.new_empty(plan.row_shape, dtype=torch.float32) if lse is None else lse,
    )
    if not plan.is_empty:
        device.undefined(*results)
        operands.launch(device, plan, results, sm_scale, empty_lse)
    return results.out, results.max_logits, results.lse


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention of the same queries over disjoint sets of keys, such as chunks of a long context.

    out = sum_s w_s outs[s] / sum_s w_s and lse = ln sum_s exp(lses[s]), with w_s = exp(lses[s]).

    outs             states: 1 to 8 tensors, or any number stacked in one whose first dimension counts them; each bf16 or fp16
                     [tokens, heads, 512 or 128], with or without a batch in front, all with the same strides; last dimension
                     contiguous, other strides free
    lses             as many, likewise: fp32 [tokens, heads], natural log, any strides (decode gives [batch, heads, tokens]:
                     transpose it). An infinite one, of either sign, weighs nothing, and its row of outs may be anything, NaN too
    out, lse         for the results, shaped as a state; each may be one of the states, and shares memory with nothing else
    empty_lse        lse of a row that is empty in all states, inf or -inf; its out is 0

    Returns (out, lse). With both given, nothing is allocated. Sums are in fp32, over the states in their order. Runs on the
    current stream, does not synchronise, and can be captured in a CUDA graph. CPU tensors run on the simulated device inside
    cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """
    if is_traced(outs[0] if isinstance(outs, list | tuple) and outs else outs):
        from . import torch_ops

        return torch_ops.merge_states(outs, lses, {"out": out, "lse": lse}, empty_lse)
    check_empty_lse(empty_lse)
    operands = MergeOperands.of(outs, lses)
    plan = operands.plan(out, lse)
    first = operands.outs[0]
    refuse_gradients(out=out, lse=lse)
    for i, (state, state_lse) in enumerate(zip(operands.outs, operands.lses, strict=True)):
        refuse_gradients(**{f"outs[{i}]": state, f"lses[{i}]": state_lse})
    device = device_for(first.device)
    if out is None:
        out = first.new_empty(plan.out_shape)
        device.undefined(out)
    if lse is None:
        lse = first.new_empty(plan.lse_shape, dtype=torch.float32)
        device.undefined(lse)
    if not plan.is_empty:
        operands.launch(device, plan, out, lse, empty_lse)
    return out, lse


def workspace_size(
    op: str,
    *,
    batch: int,
    s_q: int,
    h_q: int,
    h_kv: int = 1,
    batch_invariant: bool = False,
    max_cache_seqlen: int | None = None,
    topk: int | None = None,
    device: torch.device | str | int = "cuda",
) -> int:
    """The bytes of workspace that a call needs: a function of its shapes and the device, never of lengths.

    op: "dense_decode" or "sparse_decode"; "dense_prefill" and "sparse_prefill" need none. batch, s_q, h_q, h_kv: as in the call.
    batch_invariant: as in the call; then max_cache_seqlen, block_table.shape[1] * page size, is needed too in dense decode.
    topk: in sparse decode, indices of a token in both caches together, indices.shape[2] + extra_indices_in_kvcache.shape[2];
    needed with batch_invariant.
    device: where the call runs; "cpu" inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError and DeviceError if the device cannot be used.
    """
    check_op(op)
    check_flag("batch_invariant", batch_invariant)
    batch, s_q = check_integer("batch", batch, 0), check_integer("s_q", s_q, 0)
    problem_of_heads = heads_problem(h_q, h_kv, op)
    if problem_of_heads is not None:
        raise ValueError(problem_of_heads)
    most_keys = _most_keys(op, batch_invariant, max_cache_seqlen, topk)
    where = device_for(_torch_device(device))
    if batch == 0 or s_q == 0 or op in ("dense_prefill", "sparse_prefill"):
        return 0
    rows, columns = (h_q, s_q) if op == "sparse_decode" else (s_q * (h_q // h_kv), h_kv)
    parts = num_parts(where.arch, rows, columns, where.sm_count)
    max_splits = invariant_splits(most_keys) if batch_invariant else 0
    return sum(accumulator_bytes(accumulator_rows(batch, parts, max_splits), s_q, h_q))


def planned_rows(
    num_q_tokens_per_head_k: int, num_heads_k: int, num_heads_q: int | None = None, is_fp8_kvcache: bool = False, topk: int | None = None
) -> tuple[int, int]:
    """Query rows that share keys, and how often there are such, of a plan for these arguments of get_mla_metadata. ValueError on what is
    not supported."""
    _check_heads(num_q_tokens_per_head_k, num_heads_k, num_heads_q)
    if topk is None:
        return num_q_tokens_per_head_k, num_heads_k
    heads = _sparse_heads(num_heads_k, num_heads_q, topk)
    return heads, num_q_tokens_per_head_k // heads


def _check_heads(num_q_tokens_per_head_k: Any, num_heads_k: Any, num_heads_q: Any) -> None:
    check_integer("num_q_tokens_per_head_k", num_q_tokens_per_head_k, 1)
    problem = heads_problem(num_heads_k if num_heads_q is None else num_heads_q, num_heads_k)
    if problem is not None:
        raise ValueError(f"num_heads_k is {shown(num_heads_k)}, num_heads_q {shown(num_heads_q)}: {problem}")
    if num_heads_q is not None and num_q_tokens_per_head_k % (num_heads_q // num_heads_k):
        raise ValueError(
            f"num_q_tokens_per_head_k is {num_q_tokens_per_head_k} with {num_heads_q} query heads and {num_heads_k} KV heads; "
            "supported: s_q * num_heads_q / num_heads_k"
        )


def _sparse_heads(num_heads_k: int, num_heads_q: int | None, topk: Any) -> int:
    """The query heads of sparse decode. ValueError on what it does not support."""
    if num_heads_q is None:
        raise ValueError(f"num_heads_q is None with topk {shown(topk)}; supported with topk: 1 to {MAX_HEADS}")
    problem = heads_problem(num_heads_q, num_heads_k, "sparse_decode")
    if problem is not None:
        raise ValueError(f"num_heads_k is {num_heads_k}, num_heads_q {num_heads_q}: {problem}")
    check_integer("topk", topk, 0, MAX_KEYS)
    return num_heads_q


def _torch_device(device: Any) -> torch.device:
    """ValueError unless torch has such a device."""
    try:
        return torch.device("cuda", device) if is_integer(device) else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ValueError(f"device is {shown(device)}; supported: a CUDA device, and cpu inside `with cute_mla.simulate(arch):`") from None


def _most_keys(op: str, batch_invariant: bool, max_cache_seqlen: int | None, topk: int | None) -> int:
    """The bound on a request's keys, 0 where none is needed. ValueError unless it is given where it is needed, and rightly."""
    dense = op == "dense_decode"
    if op in ("dense_decode", "dense_prefill") and topk is not None:
        raise ValueError(f"topk is {shown(topk)}; supported with {op}: None")
    if not dense and max_cache_seqlen is not None:
        raise ValueError(f"max_cache_seqlen is {shown(max_cache_seqlen)}; supported with {op}: None")
    if dense and batch_invariant != (max_cache_seqlen is not None):
        raise ValueError(
            f"batch_invariant is {batch_invariant} and max_cache_seqlen {shown(max_cache_seqlen)}; supported: "
            "max_cache_seqlen (block_table.shape[1] * page size) with batch_invariant=True, and neither"
        )
    if op == "sparse_decode" and batch_invariant and topk is None:
        raise ValueError("batch_invariant is True and topk None; supported: topk (of both caches together) with batch_invariant=True")
    name, most = ("max_cache_seqlen", max_cache_seqlen) if dense else ("topk", topk)
    return 0 if most is None else check_integer(name, most, 0)
