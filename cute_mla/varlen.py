"""Attention of packed sequences over keys and values of their own, decompressed per head. Names are FlashMLA's."""

from __future__ import annotations

import math
from typing import Any

import torch

from .dense_prefill_op import VarlenOperands, VarlenResults, VarlenWanted
from .runtime.device import device_for
from .spec.dense_prefill import D_V, HEAD_DIMS
from .tensors import (
    address_of,
    alignment,
    check_apart,
    check_empty_lse,
    check_flag,
    check_integer,
    check_scale,
    check_shape,
    is_integer,
    is_number,
    optional_spec,
    refuse_gradients,
    shown,
    spec_of,
)
from .tracing import dispatch_modes, is_dynamo_compiling, is_traced

__all__ = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each of a batch of packed sequences over its own keys: dense prefill, forward only.

    out = softmax(softmax_scale * q k^T) v for each sequence and query head.

    q                bf16 or fp16 [total_q, h_q, d_qk], d_qk 192 or 128; last dimension contiguous, other strides free
    k                same dtype [total_k, h_kv, d_qk], h_kv divides h_q: neighbouring query heads share a KV head
    v                same dtype [total_k, h_kv, 128]. Of k and v, address and strides are multiples of 16 bytes, the last
                     dimension contiguous; both may be slices of one tensor
    cu_seqlens_q     int32 [batch + 1], contiguous: sequence r has the query tokens cu_seqlens_q[r] to cu_seqlens_q[r + 1] - 1.
                     Clipped to [0, total_q] on the device; a sequence that ends before it begins has none. Never read by the host
    cu_seqlens_k     likewise, the keys of each sequence, which may be more or fewer than its query tokens. What belongs to no
                     sequence may be anything, NaN too
    max_seqlen_q     query tokens of the longest sequence, or more; those that a sequence has beyond it may be left out
    max_seqlen_k     keys of the longest sequence; taken as other libraries take it, and not needed
    dropout_p        0
    softmax_scale    positive, default d_qk ** -0.5
    causal           True: query token i of s_q sees key j of s_k iff j <= i + s_k - s_q
    out              [total_q, h_q, 128] in q's dtype; last dimension contiguous, other strides free
    lse              fp32 [total_q, h_q], any strides
    empty_lse        lse of a row that attends to nothing, inf or -inf; its out is 0

    Returns (out, lse), lse in natural log. Rows of query tokens that belong to no sequence are not written. The bits of a
    sequence depend neither on the sequences beside it nor on the number of SMs. No tensor may require gradients, unless
    gradients are switched off: the result would not have any. out and lse share memory neither with each other nor with operands.

    With out and lse given, nothing is allocated; no workspace is needed, and no plan. No queries, no keys, no sequences and
    offsets beyond 2^31 elements are fine. Runs on the current stream, does not synchronise, and can be captured in a CUDA
    graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """
    if (is_dynamo_compiling() or dispatch_modes() or q.__class__ is not torch.Tensor) and is_traced(q):
        from . import torch_ops

        return torch_ops.flash_attn_varlen_func(
            {"out": out, "lse": lse},
            q=q,
            k=k,
            v=v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            empty_lse=empty_lse,
        )
    if not is_number(dropout_p) or dropout_p != 0:
        raise ValueError(f"dropout_p is {shown(dropout_p)}; supported: 0, for only the forward pass is there")
    if softmax_scale is not None:
        check_scale("softmax_scale", softmax_scale)
    check_empty_lse(empty_lse)
    check_flag("causal", causal)
    check_integer("max_seqlen_k", max_seqlen_k, 0)
    refuse_gradients(q=q, k=k, v=v, out=out, lse=lse)
    wanted = VarlenWanted(
        causal=bool(causal),
        max_seqlen_q=check_integer("max_seqlen_q", max_seqlen_q, 0),
        out=optional_spec("out", out),
        lse=optional_spec("lse", lse),
        address_alignment=alignment(address_of("q", q), 0 if out is None else out.data_ptr()),
    )
    device = device_for(q.device)
    operands = VarlenOperands(q, k, v, cu_seqlens_q, cu_seqlens_k)
    plan = operands.plan(wanted, device)
    check_apart({"out": out, "lse": lse}, operands._asdict())
    if out is None:
        out = q.new_empty(plan.out_shape)
        device.undefined(out)
    if lse is None:
        lse = q.new_empty(plan.lse_shape, dtype=torch.float32)
        device.undefined(lse)
    if not plan.is_empty:
        operands.launch(device, plan, VarlenResults(out, lse), softmax_scale, empty_lse)
    return out, lse


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_varlen_func with keys and values in one tensor, of which it takes slices and no copies.

    kv               [total_k, h_kv, head_dim_qk + 128]: k is kv[..., :head_dim_qk], v the rest
    head_dim_qk      192 or 128

    Everything else, and what is returned and raised, is as there.
    """
    _check_packed("kv", kv, ("total_k", "h_kv"), head_dim_qk, 1)
    return flash_attn_varlen_func(
        q,
        kv[..., :head_dim_qk],
        kv[..., head_dim_qk:],
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        out=out,
        lse=lse,
        empty_lse=empty_lse,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_attn_varlen_func with queries, keys and values of the same tokens and heads in one tensor: slices, no copies.

    qkv              [total, h, 2 * head_dim_qk + 128]: q is qkv[..., :head_dim_qk], k the next head_dim_qk columns, v the rest
    cu_seqlens, max_seqlen
                     of queries and keys
    head_dim_qk      192 or 128

    Everything else, and what is returned and raised, is as there.
    """
    _check_packed("qkv", qkv, ("total", "h"), head_dim_qk, 2)
    return flash_attn_varlen_func(
        qkv[..., :head_dim_qk],
        qkv[..., head_dim_qk : 2 * head_dim_qk],
        qkv[..., 2 * head_dim_qk :],
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        out=out,
        lse=lse,
        empty_lse=empty_lse,
    )


def _check_packed(name: str, packed: Any, leading: tuple[str, str], head_dim_qk: Any, before_v: int) -> None:
    """ValueError unless the last dimension has room for the values, behind 1 (keys) or 2 (queries and keys) operands."""
    if not is_integer(head_dim_qk) or head_dim_qk not in HEAD_DIMS:
        raise ValueError(f"head_dim_qk is {shown(head_dim_qk)}; supported: {', '.join(map(str, HEAD_DIMS))}")
    check_shape(name, spec_of(name, packed), (*leading, before_v * head_dim_qk + D_V), f" with head_dim_qk {head_dim_qk}")
    refuse_gradients(**{name: packed})
