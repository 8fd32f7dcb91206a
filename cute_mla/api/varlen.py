"""Dense prefill: attention of packed sequences over keys and values of their own, decompressed per head. Names are FlashMLA's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from .. import torch_ops
from ..ops import dense_prefill
from ..ops.arguments import check_no_grad, is_integer, short_repr
from ..ops.tensor_spec import check_shape, spec_of
from ..spec.dense_prefill import D_V, HEAD_DIMS
from .tracing import dispatch_modes, is_dynamo_compiling, is_traced

__all__ = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
# FlashAttention's names of arguments, and FlashMLA's.
_RENAMED = {
    "cu_seqlens_q": "cu_seqlens_qo",
    "cu_seqlens_k": "cu_seqlens_kv",
    "max_seqlen_q": "max_seqlen_qo",
    "max_seqlen_k": "max_seqlen_kv",
}


def _flash_attention_names(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function take FlashAttention's argument names, too. TypeError if a call gives an argument by both of its names."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> _R:
        for other, name in _RENAMED.items():
            if other in kwargs:
                if name in kwargs:
                    raise TypeError(f"{function.__name__}() got {other} and {name}, two names of one argument")
                kwargs[name] = kwargs.pop(other)
        return function(*args, **kwargs)

    return call


@_flash_attention_names
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each packed sequence of a batch to its own keys: dense prefill, forward only.

    out = softmax(softmax_scale * q k^T) v for each sequence and query head.

    q                bf16 or fp16 [total_q, h_q, d_qk], d_qk 192 or 128; last dimension contiguous, other strides free
    k                same dtype [total_k, h_kv, d_qk], h_kv divides h_q: neighbouring query heads share a KV head
    v                same dtype [total_k, h_kv, 128]. Address and strides of k and v are multiples of 16 bytes, and their last
                     dimension is contiguous; both may be slices of one tensor
    cu_seqlens_qo    int32 [batch + 1], contiguous: sequence r has the query tokens cu_seqlens_qo[r] to cu_seqlens_qo[r + 1] - 1.
                     Clipped to [0, total_q] on the device; a sequence that ends before it begins has none. Never read by the host
    cu_seqlens_kv    likewise for the keys of each sequence, which may be more or fewer than its query tokens. Keys that belong to
                     no sequence may hold anything, NaN too
    max_seqlen_qo    query tokens of the longest sequence, or more; query tokens of a sequence beyond it may be left out
    max_seqlen_kv    keys of the longest sequence; accepted because FlashMLA needs it
    dropout_p        0
    softmax_scale    positive, default d_qk ** -0.5
    causal           True: query token i of s_q sees key j of s_k iff j <= i + s_k - s_q
    deterministic, is_varlen
                     FlashMLA's flags, without effect: results are always deterministic, and sequences may always differ in length
    out              [total_q, h_q, 128] in q's dtype; last dimension contiguous, other strides free
    lse              fp32 [total_q, h_q], any strides
    empty_lse        lse of a row that attends to nothing, inf or -inf; its out is 0

    Returns (out, lse), lse in natural log. Rows of query tokens that belong to no sequence are not written. The bits of a
    sequence depend neither on the sequences beside it nor on the number of SMs. No tensor may require gradients, unless
    gradients are switched off, because there is no backward pass. out and lse share memory neither with each other nor with operands.

    With out and lse given, nothing is allocated; no workspace is needed, and no plan. No queries, no keys, no sequences and
    offsets beyond 2^31 elements are fine. Runs on the current stream, does not synchronise, and can be captured in a CUDA
    graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Keywords may have FlashAttention's names, too: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """
    if (is_dynamo_compiling() or dispatch_modes() or q.__class__ is not torch.Tensor) and is_traced(q):
        return torch_ops.flash_attn_varlen_func(
            {"out": out, "lse": lse},
            q=q,
            k=k,
            v=v,
            cu_seqlens_qo=cu_seqlens_qo,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_qo=max_seqlen_qo,
            max_seqlen_kv=max_seqlen_kv,
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            deterministic=deterministic,
            is_varlen=is_varlen,
            empty_lse=empty_lse,
        )
    return dense_prefill.run(
        q,
        k,
        v,
        cu_seqlens_qo,
        cu_seqlens_kv,
        max_seqlen_qo,
        max_seqlen_kv,
        dropout_p,
        softmax_scale,
        causal,
        deterministic,
        is_varlen,
        out=out,
        lse=lse,
        empty_lse=empty_lse,
    )


@_flash_attention_names
def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call flash_attn_varlen_func with keys and values in one tensor: slices, no copies.

    kv               [total_k, h_kv, head_dim_qk + 128]: k is kv[..., :head_dim_qk], v the rest
    head_dim_qk      192 or 128

    Other arguments, results and errors are those of flash_attn_varlen_func.
    """
    _check_packed("kv", kv, ("total_k", "h_kv"), head_dim_qk, 1)
    return flash_attn_varlen_func(
        q,
        kv[..., :head_dim_qk],
        kv[..., head_dim_qk:],
        cu_seqlens_qo,
        cu_seqlens_kv,
        max_seqlen_qo,
        max_seqlen_kv,
        dropout_p,
        softmax_scale,
        causal,
        deterministic,
        is_varlen,
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
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call flash_attn_varlen_func with queries, keys and values of the same tokens and heads in one tensor: slices, no copies.

    qkv              [total, h, 2 * head_dim_qk + 128]: q is qkv[..., :head_dim_qk], k the next head_dim_qk columns, v the rest
    cu_seqlens, max_seqlen
                     those of both queries and keys
    head_dim_qk      192 or 128

    Other arguments, results and errors are those of flash_attn_varlen_func.
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
        deterministic,
        is_varlen,
        out=out,
        lse=lse,
        empty_lse=empty_lse,
    )


def _check_packed(name: str, packed: Any, leading: tuple[str, str], head_dim_qk: Any, before_v: int) -> None:
    """Raise ValueError unless the last dimension holds 1 (keys) or 2 (queries, keys) operands of head_dim_qk, then the values."""
    if not is_integer(head_dim_qk) or head_dim_qk not in HEAD_DIMS:
        raise ValueError(f"head_dim_qk is {short_repr(head_dim_qk)}; supported: {', '.join(map(str, HEAD_DIMS))}")
    check_shape(name, spec_of(name, packed), (*leading, before_v * head_dim_qk + D_V), f" with head_dim_qk {head_dim_qk}")
    check_no_grad(**{name: packed})
