"""Decode of requests that begin with the same keys, such as a system prompt: those keys are attended to once, by all queries together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..ops.arguments import check_flag, check_integer, short_repr
from ..ops.limits import MAX_QUERY_TOKENS, page_size_error, value_columns
from ..ops.paged_cache import check_requests
from ..ops.split_plan import MlaSchedule
from ..ops.tensor_spec import check_shape, record_repr, spec_of
from ..spec.dense_decode import MAX_KEYS
from .flashmla import flash_mla_with_kvcache
from .states import merge_states

__all__ = ["SharedPrefix", "decode_shared_prefix", "split_shared_prefix"]


@dataclass(frozen=True)
class SharedPrefix:
    """Both parts of a decode step's keys, for all layers; made by split_shared_prefix.

    prefix_table: int32 [1, pages], the pages of the prefix. prefix_length: int32 [1], its keys, 0 if every request is apart. block_table:
    int32 [batch, pages per request], the pages behind the prefix, all pages of a request that is apart. cache_seqlens: int32 [batch], the
    keys there. apart: bool [batch], requests that do not attend to the prefix, as they are shorter. causal: of the new tokens. s_q: most of
    them in a causal step.
    """

    prefix_table: torch.Tensor
    prefix_length: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    apart: torch.Tensor
    causal: bool = False
    s_q: int = 8
    prefix_schedule: MlaSchedule = field(default_factory=MlaSchedule)
    schedule: MlaSchedule = field(default_factory=MlaSchedule)

    __repr__ = record_repr


def split_shared_prefix(
    block_table: torch.Tensor, cache_seqlens: torch.Tensor, prefix_keys: int, page_size: int, causal: bool = False, s_q: int = 8
) -> SharedPrefix:
    """Split the keys of a decode step into the prefix that requests share and what follows it.

    block_table: int32 [batch, pages per request], whose first prefix_keys / page_size columns are the same in the rows of all requests with
    as many keys or more. cache_seqlens: int32 [batch], keys of each request, prefix and new tokens included. prefix_keys: a multiple of
    page_size, at most the keys of a row of the block table. causal: as in flash_mla_with_kvcache. s_q: the most query tokens of a request
    in a causal step.

    A request with fewer keys than the prefix, none included, attends to the keys of its own row alone. So does one of a causal step with
    fewer than s_q - 1 keys behind the prefix, as the first of s_q query tokens does not see all of the prefix.

    Makes small tensors on the device, without synchronisation. Raises ValueError on bad arguments.
    """
    check_requests(cache_seqlens, block_table)
    error = page_size_error(page_size)
    if error is not None:
        raise ValueError(error)
    causal = check_flag("causal", causal)
    prefix_keys = check_integer("prefix_keys", prefix_keys, 0, MAX_KEYS)
    s_q = check_integer("s_q", s_q, 1, MAX_QUERY_TOKENS)
    pages, rest = divmod(prefix_keys, page_size)
    if rest or pages > block_table.shape[1]:
        raise ValueError(
            f"prefix_keys is {prefix_keys} with pages of {page_size} and {block_table.shape[1]} pages per request; "
            f"supported: multiples of {page_size} up to {block_table.shape[1] * page_size}"
        )
    lengths = cache_seqlens.clamp(0, min(block_table.shape[1] * page_size, MAX_KEYS))
    behind = lengths - prefix_keys
    apart = behind < (s_q - 1 if causal else 0)
    longest = lengths.argmax(0, keepdim=True) if lengths.shape[0] else lengths.long()
    return SharedPrefix(
        prefix_table=block_table.index_select(0, longest)[:, :pages],
        prefix_length=(~apart).any(0, keepdim=True).int() * prefix_keys,
        block_table=block_table.where(apart.unsqueeze(1), block_table.roll(-pages, 1)),
        cache_seqlens=lengths.where(apart, behind),
        apart=apart,
        causal=causal,
        s_q=s_q,
    )


def decode_shared_prefix(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    step: SharedPrefix,
    *,
    softmax_scale: float | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    batch_invariant: bool = False,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense decode over the keys of a step that split_shared_prefix has split.

    q: [batch, s_q, h_q, d_qk]; strides that do not allow a view of all tokens as one request cost a copy. step: of as many requests. The
    other arguments are as in flash_mla_with_kvcache.

    The queries of all requests attend to the prefix as one request of batch * s_q tokens, then each to its request's own keys, and the two
    states are merged by their lse; that of the prefix has no weight for a request apart. So the keys of the prefix are read once for as
    many query rows as fill the tiles. With few heads per request this saves most of the work on the prefix; with 128 heads only bytes, as
    their rows fill tiles anyway.

    Returns out [batch, s_q, h_q, d_v] and lse fp32 [batch, h_q, s_q] over all keys. out is rounded to 16 bits in both states and in the
    result. Raises the errors of flash_mla_with_kvcache.
    """
    if not isinstance(step, SharedPrefix):
        raise ValueError(f"step is {short_repr(step)}; supported: a SharedPrefix")
    spec = spec_of("q", q)
    check_shape("q", spec, (step.cache_seqlens.shape[0], "s_q", "h_q", "d_qk"), " with this step")
    batch, s_q, h_q, d_qk = spec.shape
    if step.causal and s_q > step.s_q:
        raise ValueError(
            f"q has {s_q} query tokens with a causal step; supported with this step: 0 to {step.s_q}, the s_q of split_shared_prefix"
        )
    rows, d_v = batch * s_q, value_columns(d_qk)
    own = (q, k_cache, step.block_table, step.cache_seqlens, d_v, step.schedule, None, softmax_scale, step.causal, descale_q, descale_k)
    if not rows:
        return flash_mla_with_kvcache(*own, batch_invariant=batch_invariant)
    outs = q.new_empty((2, batch, s_q, h_q, d_v), dtype=torch.bfloat16 if spec.dtype.itemsize == 1 else spec.dtype)
    lses = q.new_empty((2, batch, s_q, h_q), dtype=torch.float32)
    flash_mla_with_kvcache(*own, out=outs[1], lse=lses[1].transpose(1, 2), batch_invariant=batch_invariant)
    shared = (step.prefix_table, step.prefix_length, d_v, step.prefix_schedule, None, softmax_scale, False, descale_q, descale_k)
    flash_mla_with_kvcache(
        q.reshape(1, rows, h_q, d_qk), k_cache, *shared, batch_invariant=batch_invariant,
        out=outs[0].view(1, rows, h_q, d_v), lse=lses[0].view(1, rows, h_q).transpose(1, 2),
    )  # fmt: skip
    lses[0].masked_fill_(step.apart[:, None, None], math.inf)
    lse = q.new_empty((batch, h_q, s_q), dtype=torch.float32)
    out, _ = merge_states(outs, lses, out=torch.empty_like(outs[0]), lse=lse.transpose(1, 2), empty_lse=empty_lse)
    return out, lse
