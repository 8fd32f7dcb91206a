"""The public functions: torch tensors in, torch tensors out. Names and argument meanings are FlashMLA's."""

from __future__ import annotations

import math
from typing import Any, overload

import torch

from . import dense_decode_op as dense
from .runtime.device import device_for
from .schedule import GivenPlan, MlaSchedule
from .schedule import plan as plan_splits
from .spec.dense_decode import num_parts
from .spec.mla import D_QK, D_V
from .spec.split_plan import accumulator_rows, invariant_splits
from .support import OPS, PLANNED_OPS, heads_problem, is_supported
from .tensors import TMA_ALIGNMENT, WORKSPACE_ALIGNMENT, check_address, check_contiguous, check_dtype, check_shape, spec_of

__all__ = ["MlaSchedule", "flash_mla_with_kvcache", "get_mla_metadata", "is_supported", "workspace_size"]

_DENSE_ONLY = "not supported by this version, which decodes dense bf16 and fp16 caches; supported: None or False"


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
        is_fp8_kvcache, topk     must be False, None

    One plan serves calls with and without batch_invariant, and block tables of any width. It stays correct when lengths
    change afterwards; it is then less balanced. A plan whose first use was outside a CUDA graph is not made again by
    replaying the graph. The host never looks into the two tensors: if they hold something else than a plan for as many
    requests, a call gives wrong numbers, but it ends and keeps to its operands.

    Raises ValueError on bad arguments, ArtifactError and DeviceError as flash_mla_with_kvcache.
    """
    if cache_seqlens is None:
        if num_q_tokens_per_head_k is not None or num_heads_k is not None:
            raise ValueError("cache_seqlens is None beside other arguments; supported: get_mla_metadata() or all of the first three")
        return MlaSchedule(), None
    if num_q_tokens_per_head_k is None or num_heads_k is None:
        raise ValueError(
            "num_q_tokens_per_head_k or num_heads_k is missing beside cache_seqlens; "
            "supported: get_mla_metadata() or all of the first three"
        )
    _reject(is_fp8_kvcache=is_fp8_kvcache, topk=topk)
    _check_heads(num_q_tokens_per_head_k, num_heads_k, num_heads_q)
    spec = spec_of("cache_seqlens", cache_seqlens)
    check_shape("cache_seqlens", spec, ("batch",))
    check_dtype("cache_seqlens", spec, torch.int32)
    check_contiguous("cache_seqlens", spec)
    device = device_for(spec.device)
    parts = num_parts(device.arch, num_q_tokens_per_head_k, num_heads_k, device.sm_count)
    return plan_splits(device, cache_seqlens, parts)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
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
    """Attention of new query tokens over a paged latent cache: out = softmax(softmax_scale * q k^T) v, v = k[..., :512].

    q                bf16 or fp16 [batch, s_q, h_q, 576], h_q 1 to 128; last dimension contiguous, other strides free
    k_cache          same dtype [pages, page size, h_kv, 576], h_kv divides h_q; page size 16, 32 or a multiple of 64;
                     address and strides multiples of 16 bytes, last dimension contiguous (block-strided caches are fine)
    block_table      int32 [batch, pages per request], rows contiguous: the pages of each request. Entries beyond what
                     cache_seqlens needs are never read; KV beyond it may be anything, NaN too
    cache_seqlens    int32 [batch], contiguous: keys of each request, the new tokens' included. Never read by the host; the
                     device takes a negative one for 0, and one that the table has no room for as what it has room for
    head_dim_v       512
    tile_scheduler_metadata, num_splits
                     what get_mla_metadata returned: (schedule, None) or the two tensors
    softmax_scale    positive, default 576 ** -0.5
    causal           True: query token i sees key j iff j < cache_seqlens - (s_q - 1 - i). Means nothing for s_q 1
    descale_q ... extra_topk_length
                     FlashMLA's arguments of FP8 and sparse decode: must be absent in this version
    out              [batch, s_q, h_q, 512] in q's dtype; last dimension contiguous, other strides free
    lse              fp32 [batch, h_q, s_q], any strides
    workspace        contiguous, at least workspace_size("dense_decode", ...) bytes, address a multiple of 16; not to be
                     shared by calls that may run at the same time
    batch_invariant  True: the bits of a request depend neither on its batchmates nor on the number of SMs
    empty_lse        lse of a row that attends to nothing, inf or -inf; its out is 0

    Returns (out, lse), lse in natural log. With out, lse and workspace given, nothing is allocated (a schedule object
    allocates its plan at its first use). Runs on the current stream, does not synchronise, and can be captured in a CUDA
    graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """
    _reject(
        descale_q=descale_q,
        descale_k=descale_k,
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    _check_scalars(head_dim_v, softmax_scale, empty_lse)
    schedule = _read_schedule(tile_scheduler_metadata, num_splits)
    call = dense.DenseDecodeCall(
        q=spec_of("q", q),
        k_cache=spec_of("k_cache", k_cache),
        block_table=spec_of("block_table", block_table),
        cache_seqlens=spec_of("cache_seqlens", cache_seqlens),
        given_plan=schedule.specs,
        out=None if out is None else spec_of("out", out),
        lse=None if lse is None else spec_of("lse", lse),
        causal=bool(causal),
        batch_invariant=bool(batch_invariant),
        address_alignment=dense.alignment(q.data_ptr(), 0 if out is None else out.data_ptr()),
    )
    device = device_for(call.q.device)
    plan = dense.plan_call(call, device.arch, device.sm_count)
    check_address("k_cache", k_cache.data_ptr(), TMA_ALIGNMENT)
    workspace = _workspace(workspace, plan.workspace_bytes, call.q.device)
    if out is None:
        out = q.new_empty(plan.out_shape)
    if lse is None:
        lse = q.new_empty(plan.lse_shape, dtype=torch.float32)
    if plan.is_empty:
        return out, lse
    metadata, num_splits = schedule.prepare(device, plan.schedule_key, cache_seqlens)
    tensors = dense.DenseDecodeTensors(q, k_cache, block_table, cache_seqlens, metadata, num_splits, out, lse, workspace)
    device.undefined(out, lse, *(() if workspace is None else (workspace,)))
    dense.launch(device, plan, tensors, D_QK**-0.5 if softmax_scale is None else softmax_scale, empty_lse)
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
    device: torch.device | str | int = "cuda",
) -> int:
    """The bytes of workspace that a call needs: a function of its shapes and the device, never of lengths.

    op: "dense_decode". batch, s_q, h_q, h_kv: as in the call.
    batch_invariant: as in the call; then max_cache_seqlen, block_table.shape[1] * page size, is needed too.
    device: where the call runs; "cpu" inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError and DeviceError if the device cannot be used.
    """
    if op not in OPS:
        known = f" ({', '.join(PLANNED_OPS)} are not in this version)"
        raise ValueError(f"op is {op!r}; supported: {', '.join(OPS)}{known}")
    for name, value in (("batch", batch), ("s_q", s_q)):
        if value < 0:
            raise ValueError(f"{name} is {value}; supported: 0 or more")
    problem_of_heads = heads_problem(h_q, h_kv)
    if problem_of_heads is not None:
        raise ValueError(problem_of_heads)
    max_splits = _max_splits(batch_invariant, max_cache_seqlen)
    where = device_for(torch.device(device))
    if batch == 0 or s_q == 0:
        return 0
    parts = num_parts(where.arch, s_q * (h_q // h_kv), h_kv, where.sm_count)
    return sum(dense.accumulator_bytes(accumulator_rows(batch, parts, max_splits), s_q, h_q))


def _reject(**given: Any) -> None:
    """ValueError if any argument of what this version does not have is more than absent."""
    for name, value in given.items():
        if value is not None and value is not False:
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{name} is {shown}: {_DENSE_ONLY}")


def _check_scalars(head_dim_v: int, softmax_scale: float | None, empty_lse: float) -> None:
    if head_dim_v != D_V:
        raise ValueError(f"head_dim_v is {head_dim_v!r}; supported: {D_V}")
    if softmax_scale is not None and not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}; supported: a positive finite number, or None for {D_QK} ** -0.5")
    if empty_lse not in (math.inf, -math.inf):
        raise ValueError(f"empty_lse is {empty_lse}; supported: inf and -inf")


def _check_heads(num_q_tokens_per_head_k: int, num_heads_k: int, num_heads_q: int | None) -> None:
    if num_q_tokens_per_head_k < 1:
        raise ValueError(f"num_q_tokens_per_head_k is {num_q_tokens_per_head_k}; supported: 1 or more")
    problem = heads_problem(num_heads_k if num_heads_q is None else num_heads_q, num_heads_k)
    if problem is not None:
        raise ValueError(f"num_heads_k is {num_heads_k}, num_heads_q {num_heads_q}: {problem}")
    if num_heads_q is not None and num_q_tokens_per_head_k % (num_heads_q // num_heads_k):
        raise ValueError(
            f"num_q_tokens_per_head_k is {num_q_tokens_per_head_k} with {num_heads_q} query heads and {num_heads_k} KV heads; "
            "supported: s_q * num_heads_q / num_heads_k"
        )


def _max_splits(batch_invariant: bool, max_cache_seqlen: int | None) -> int:
    """max_splits of spec.dense_decode. ValueError unless the bound on lengths is given where it is needed, and only there."""
    if batch_invariant != (max_cache_seqlen is not None):
        raise ValueError(
            f"batch_invariant is {batch_invariant} and max_cache_seqlen {max_cache_seqlen}; supported: "
            "max_cache_seqlen (block_table.shape[1] * page size) with batch_invariant=True, and neither"
        )
    if max_cache_seqlen is not None and max_cache_seqlen < 0:
        raise ValueError(f"max_cache_seqlen is {max_cache_seqlen}; supported: 0 or more")
    return invariant_splits(max_cache_seqlen) if max_cache_seqlen is not None else 0


def _read_schedule(metadata: torch.Tensor | MlaSchedule, num_splits: torch.Tensor | None) -> MlaSchedule | GivenPlan:
    if isinstance(metadata, MlaSchedule):
        if num_splits is not None:
            raise ValueError("num_splits is given beside a schedule object; supported: None, as get_mla_metadata() returns")
        return metadata
    if not isinstance(metadata, torch.Tensor) or not isinstance(num_splits, torch.Tensor):
        raise ValueError(
            f"tile_scheduler_metadata is {type(metadata).__name__}, num_splits {type(num_splits).__name__}; "
            "supported: what get_mla_metadata returns, either a schedule object and None or two tensors"
        )
    return GivenPlan(metadata, num_splits)


def _workspace(workspace: torch.Tensor | None, nbytes: int, device: torch.device) -> torch.Tensor | None:
    """The caller's workspace if it will do, else a new one; None if none is needed."""
    if workspace is None:
        return torch.empty(nbytes, dtype=torch.uint8, device=device) if nbytes else None
    spec = spec_of("workspace", workspace)
    if spec.device != device:
        raise ValueError(f"workspace is on {spec.device}; supported: the device of q, {device}")
    check_contiguous("workspace", spec)
    if workspace.nbytes < nbytes:
        raise ValueError(f'workspace has {workspace.nbytes} bytes; supported: at least {nbytes}, see workspace_size("dense_decode", ...)')
    check_address("workspace", workspace.data_ptr(), WORKSPACE_ALIGNMENT)
    return workspace if nbytes else None
