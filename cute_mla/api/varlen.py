"""Dense prefill and its backward pass: attention of packed sequences over keys and values of their own. Names are FlashMLA's."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from ..ops.arguments import is_integer, needs_grad, short_repr
from ..ops.tensor_spec import check_shape, spec_of
from ..spec.dense_prefill import HEAD_DIMS
from ..tracing import prefill
from ..tracing.public import public

__all__ = [
    "flash_attn_varlen_backward",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

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
@public(prefill.VARLEN, also=(needs_grad, "q, k, v"))
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
    key_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each packed sequence of a batch to its own keys: dense prefill, differentiable.

    out = softmax(softmax_scale * q k^T) v for each sequence and query head.

    q                bf16 or fp16 [total_q, h_q, d_qk], d_qk 192, 128 or, in bf16, 256; bf16 if it requires grad
    k                same dtype [total_k, h_kv, d_qk], h_kv divides h_q: neighbouring query heads share a KV head
    v                same dtype [total_k, h_kv, d_v], d_v 128, or 256 with a d_qk of 256. Addresses of q, k and v are multiples, strides
                     positive multiples of 16 bytes, and their last dimension is contiguous; k and v may be slices of one tensor, none
                     is expanded
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
    out              [total_q, h_q, d_v] in q's dtype; last dimension contiguous, address and other strides multiples of 16 bytes
    lse              fp32 [total_q, h_q], any strides
    empty_lse        lse of a row that attends to nothing, inf or -inf; its out is 0
    key_mask         int32 [total_q, words], last dimension contiguous, any other stride, words at least ceil(max_seqlen_kv / 32): query
                     token t sees key j of its sequence, counted from 0, iff bit j & 31 of key_mask[t, j >> 5] is set and, with causal,
                     j <= i + s_k - s_q as well. All heads share it. Keys of a sequence beyond 32 * words are hidden. Bits of keys that a
                     sequence does not have, bits that causal hides, and rows of tokens of no sequence may be anything. k of a key that
                     no token sees may hold anything; v of a sequence must be finite. Tiles of 128 keys of which none of 128 tokens
                     (Blackwell: 256) sees one cost next to nothing. bf16, d_qk 192 or 128, and no gradients

    Returns (out, lse), lse in natural log. Rows of query tokens that belong to no sequence are not written. The bits of a
    sequence depend neither on the sequences beside it nor on the number of SMs. out and lse share memory neither with each other nor
    with operands, nor their elements with one another.

    Gradients of out reach q, k and v through flash_attn_varlen_backward; those of tokens that belong to no sequence are 0. Then
    max_seqlen_kv bounds the keys that get a gradient. Gradients of lse, of a call with out or lse given, and of gradients (double
    backward) raise ValueError.

    With out and lse given, nothing is allocated; no workspace is needed, and no plan. No queries, no keys, no sequences and
    offsets beyond 2^31 elements are fine. Runs on the current stream, does not synchronise, and can be captured in a CUDA
    graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Keywords may have FlashAttention's names, too: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """


@_flash_attention_names
@public(prefill.BACKWARD)
def flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    deterministic: bool = True,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of flash_attn_varlen_func's q, k and v from that of its out.

    dout             bf16 [total_q, h_q, d_v]: gradient of out; addresses and strides of dout and out as those of q
    q, k, v, cu_seqlens_qo, cu_seqlens_kv, softmax_scale, causal
                     as in the forward call, in bf16
    out              [total_q, h_q, d_v], lse fp32 [total_q, h_q]: results of the forward call, of any empty_lse; strides of lse free
    max_seqlen_qo    query tokens of the longest sequence, or more; query tokens of a sequence beyond it may be left out: they then have
                     no gradient and add nothing to dk and dv
    max_seqlen_kv    keys of the longest sequence, or more; keys of a sequence beyond it may be left out
    deterministic    without effect: equal inputs always give equal bits
    dq, dk, dv       gradients in bf16, with the shapes of q, k and v. Last dimension contiguous, other strides of dk and dv free; address
                     and other strides of dq multiples of 16 bytes
    workspace        contiguous, at least workspace_size("dense_prefill_backward", ..) bytes, at an address that 16 divides

    Returns (dq, dk, dv). A query row whose lse is inf or -inf, such as one that attends to nothing, has dq 0 and adds nothing to dk and
    dv. A key that no row sees has dk and dv 0. Rows of tokens that belong to no sequence are not written, and are 0 in gradients that
    the call allocates; q, k, v, out, lse and dout may hold anything there, NaN too. With several query heads per KV head, dk and dv are
    summed over them in fp32. The bits of a sequence depend neither on the sequences beside it nor on the number of SMs.

    With dq, dk, dv and workspace given, nothing is allocated. They share memory neither with each other nor with operands. No queries, no
    keys, no sequences and offsets beyond 2^31 elements are fine. Runs on the current stream, does not synchronise, and can be captured
    in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Keywords may have FlashAttention's names, too: cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """


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
    """Call flash_attn_varlen_func with keys and values in one tensor: slices, no copies, and one gradient for both.

    kv               [total_k, h_kv, head_dim_qk + d_v]: k is kv[..., :head_dim_qk], v the rest
    head_dim_qk      192, 128 or 256

    Other arguments, results and errors are those of flash_attn_varlen_func.
    """
    head_dim_qk = _check_packed("kv", kv, ("total_k", "h_kv"), head_dim_qk, 1)
    shape = (cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv)
    options = (dropout_p, softmax_scale, causal, deterministic, is_varlen)
    return _attend_packed((q, kv), head_dim_qk, (*shape, *options), (out, lse), empty_lse)


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
    """Call flash_attn_varlen_func with queries, keys and values of the same tokens and heads in one tensor.

    They are slices, no copies, and have one gradient.

    qkv              [total, h, 2 * head_dim_qk + d_v]: q is qkv[..., :head_dim_qk], k the next head_dim_qk columns, v the rest
    cu_seqlens, max_seqlen
                     those of both queries and keys
    head_dim_qk      192, 128 or 256

    Other arguments, results and errors are those of flash_attn_varlen_func.
    """
    head_dim_qk = _check_packed("qkv", qkv, ("total", "h"), head_dim_qk, 2)
    shape = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, deterministic, is_varlen)
    return _attend_packed((None, qkv), head_dim_qk, (*shape, *options), (out, lse), empty_lse)


def _attend_packed(
    tensors: tuple[torch.Tensor | None, torch.Tensor],
    head_dim_qk: int,
    others: tuple[Any, ...],
    given: tuple[torch.Tensor | None, torch.Tensor | None],
    empty_lse: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call a packed form as one op where it has gradients, else flash_attn_varlen_func with slices.

    tensors: q, None if the packed tensor holds it, and the packed tensor. others: arguments behind the operands. given: out and lse.
    """
    out, lse = given
    if needs_grad(*tensors) and out is None and lse is None:
        return prefill.varlen_packed(*tensors, head_dim_qk, *others, empty_lse=empty_lse)
    return flash_attn_varlen_func(*prefill.split(*tensors, head_dim_qk), *others, out=out, lse=lse, empty_lse=empty_lse)


def _check_packed(name: str, packed: Any, leading: tuple[str, str], head_dim_qk: Any, before_v: int) -> int:
    """Return head_dim_qk as an int. ValueError unless the last dimension holds so many operands of head_dim_qk, then the values.

    before_v: 1 (keys) or 2 (queries, keys).
    """
    known = next((known for known in HEAD_DIMS if is_integer(head_dim_qk) and known == head_dim_qk), None)  # a symbol has no hash
    if known is None:
        raise ValueError(f"head_dim_qk is {short_repr(head_dim_qk)}; supported: {', '.join(map(str, HEAD_DIMS))}")
    columns = before_v * known + HEAD_DIMS[known]
    check_shape(name, spec_of(name, packed), (*leading, columns), f" with head_dim_qk {known}")
    return known
