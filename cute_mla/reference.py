"""Reference implementations in plain fp32 torch: slow, and simple enough to check by reading."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .spec.mla import D_QK, D_V, LATENT_DIMS

_EXACT_SCORES = 1 << 24  # of one sequence: 128 MB in fp64


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor, empty_lse: float = math.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v over the visible keys.

    q: [heads, rows, d]; k: [heads, keys, d]; v: [heads, keys, d_v]; visible: bool [rows, keys].
    Returns out fp32 [heads, rows, d_v] and lse fp32 [heads, rows], natural log; a row that sees nothing has out 0 and
    lse empty_lse.
    """
    return attention_by(masked_scores(q, k, scale, visible), v, visible, empty_lse)


def attention_by(
    scores: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, empty_lse: float = math.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `attention`, given the results of masked_scores."""
    lse = scores.logsumexp(dim=-1)
    empty = ~visible.any(dim=-1)
    weights = (scores - lse.masked_fill(empty, 0.0).unsqueeze(-1)).exp()
    return weights @ v.float(), lse.masked_fill(empty, empty_lse)


def masked_scores(q: torch.Tensor, k: torch.Tensor, scale: float, visible: torch.Tensor) -> torch.Tensor:
    """Return fp32 [heads, rows, keys]: scale * q k^T where a row sees the key, else -inf. Operands as in `attention`."""
    return ((q.float() @ k.float().transpose(-1, -2)) * scale).masked_fill(~visible, -math.inf)


def visible_keys(s_q: int, length: int, causal: bool, device: torch.device) -> torch.Tensor:
    """Return bool [s_q, length]: the keys that each query token sees. Causal is aligned bottom right: the last token sees all keys."""
    if not causal:
        return torch.ones(s_q, length, dtype=torch.bool, device=device)
    token = torch.arange(s_q, device=device).unsqueeze(1)
    return torch.arange(length, device=device) < length - (s_q - 1 - token)


def gather_pages(k_cache: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first `length` keys of a request: [length, h_kv, d_qk].

    k_cache: [pages, page size, h_kv, d_qk]. pages: the request's row of the block table; an entry outside the cache is a page of zeros.
    Entries and keys beyond `length` are not read.
    """
    used = pages[: -(-length // k_cache.shape[1])].long()
    inside = (used >= 0) & (used < len(k_cache))
    keys = k_cache.new_zeros(len(used), *k_cache.shape[1:])
    keys[inside] = k_cache[used[inside]]
    return keys.flatten(0, 1)[:length]


def scaled(values: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return values times a scalar, in fp32; without a scalar, the values themselves."""
    return values if scale is None else values.float() * scale


def dense_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float = D_QK**-0.5,
    causal: bool = False,
    empty_lse: float = math.inf,
    descales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_mla_with_kvcache over a dense cache, with its operands. descales: descale_q and descale_k.

    Returns out fp32 [batch, s_q, h_q, d_v] and lse fp32 [batch, h_q, s_q]; d_v by the columns of q (LATENT_DIMS).
    """
    batch, s_q, h_q, d_qk = q.shape
    d_v = LATENT_DIMS[d_qk].latent
    h_kv = k_cache.shape[2]
    group = h_q // h_kv  # query heads of one KV head: rows over the same keys, which are not repeated
    out = torch.zeros(batch, s_q, h_q, d_v, device=q.device)
    lse = torch.full((batch, h_q, s_q), empty_lse, device=q.device)
    for request, length in enumerate(cache_seqlens.tolist()):
        k = scaled(gather_pages(k_cache, block_table[request], length), descales[1]).transpose(0, 1)  # [h_kv, length, d_qk]
        rows = scaled(q[request], descales[0]).unflatten(1, (h_kv, group)).transpose(0, 1).flatten(1, 2)  # [h_kv, s_q * group, d_qk]
        visible = visible_keys(s_q, length, causal and s_q > 1, q.device).repeat_interleave(group, dim=0)
        row_out, row_lse = attention(rows, k, k[..., :d_v], softmax_scale, visible, empty_lse)
        out[request] = row_out.unflatten(1, (s_q, group)).transpose(0, 1).flatten(1, 2)
        lse[request] = row_lse.unflatten(1, (s_q, group)).transpose(1, 2).flatten(0, 1)
    return out, lse


class IndexedCache(NamedTuple):
    """A cache, and the indices of the slots that each query token attends to.

    slots: float [slots, d_qk], dequantised. indices: int32 [batch, s_q, topk]; an index outside the slots is skipped.
    length: int32 [batch], the number of a request's indices that count (more than topk: all; negative: none); None: all.
    """

    slots: torch.Tensor
    indices: torch.Tensor
    length: torch.Tensor | None = None

    def keys(self, request: int, token: int) -> torch.Tensor:
        """Return fp32 [n, d_qk]: the keys of one query token, once per index that names them. No other slot is read."""
        length = None if self.length is None else self.length[request]
        return named_rows(self.slots, self.indices[request, token], length)


def named_rows(rows: torch.Tensor, indices: torch.Tensor, length: torch.Tensor | None) -> torch.Tensor:
    """Return fp32 [n, d]: the rows that the first `length` indices name (None: all indices), once per index. No other row is read."""
    if length is not None:
        indices = indices[: max(int(length), 0)]
    return rows[indices[(indices >= 0) & (indices < len(rows))].long()].float()


def attend_to_all(
    q: torch.Tensor, keys: torch.Tensor, scale: float, attn_sink: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend one query token [h_q, d_qk] to keys [n, d_qk], n >= 1. Return fp32 out [h_q, 512], max_logits [h_q] and lse [h_q]."""
    visible = torch.ones(len(q), len(keys), dtype=torch.bool, device=q.device)
    scores = masked_scores(q[None], keys[None], scale, visible)
    (out,), (lse,) = attention_by(scores, keys[None, :, :D_V], visible)
    if attn_sink is not None:
        out = out * (lse - attn_sink).sigmoid().unsqueeze(-1)
    return out, scores[0].amax(dim=-1), lse


def sparse_decode(
    q: torch.Tensor,
    caches: Sequence[IndexedCache],
    softmax_scale: float | None = None,
    attn_sink: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_mla_with_kvcache with indices: each query token over the keys that it names in one cache, or in two.

    q: [batch, s_q, h_q, d_qk]; softmax_scale: default d_qk ** -0.5; attn_sink: fp32 [h_q], natural log: the logit of one
    more key without a value, so that out is scaled by exp(lse) / (exp(lse) + exp(sink)); lse does not include the sink.
    Returns out fp32 [batch, s_q, h_q, 512] and lse fp32 [batch, h_q, s_q].
    """
    batch, s_q, h_q, d_qk = q.shape
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(batch, s_q, h_q, D_V, device=q.device)
    lse = torch.full((batch, h_q, s_q), empty_lse, device=q.device)
    for request in range(batch):
        for token in range(s_q):
            keys = torch.cat([cache.keys(request, token) for cache in caches])
            if len(keys):
                out[request, token], _, lse[request, :, token] = attend_to_all(q[request, token], keys, scale, attn_sink)
    return out, lse


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    kv_offsets: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute flash_mla_sparse_fwd, with its operands: each query token over the rows of its request that it names.

    Returns fp32 out [.., s_q, h_q, 512], max_logits [.., s_q, h_q] and lse [.., s_q, h_q], with the batch in front if q has one.
    """
    out = torch.zeros(*q.shape[:-1], D_V, device=q.device)
    max_logits = torch.full(q.shape[:-1], -math.inf, device=q.device)
    lse = torch.full(q.shape[:-1], empty_lse, device=q.device)
    for token in itertools.product(*map(range, q.shape[:-2])):
        rows = rows_of_request(kv, kv_offsets, token[:-1]).squeeze(1)
        keys = named_rows(rows, indices[token].squeeze(0), None if topk_length is None else topk_length[token])
        if len(keys):
            out[token], max_logits[token], lse[token] = attend_to_all(q[token], keys, sm_scale, attn_sink)
    return out, max_logits, lse


def rows_of_request(kv: torch.Tensor, kv_offsets: torch.Tensor | None, request: tuple[int, ...]) -> torch.Tensor:
    """Return [n, 1, d_qk]: the rows that the indices of a request count in. request: its number, or () without a batch."""
    if kv_offsets is None:
        return kv[request]
    return kv[sequence_rows(kv_offsets, request[0], len(kv))]


def dense_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_attn_varlen_func, with its operands.

    Returns fp32 out [total_q, h_q, d_v] and lse [total_q, h_q], NaN in rows that belong to no sequence.
    """
    h_q, h_kv = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.full((len(q), h_q, v.shape[-1]), math.nan, device=q.device)
    lse = torch.full((len(q), h_q), math.nan, device=q.device)
    for sequence in range(len(cu_seqlens_q) - 1):
        rows, keys = sequence_rows(cu_seqlens_q, sequence, len(q)), sequence_rows(cu_seqlens_k, sequence, len(k))
        own_k, own_v = (tensor[keys].transpose(0, 1).repeat_interleave(h_q // h_kv, dim=0) for tensor in (k, v))
        own_q = q[rows].transpose(0, 1)
        visible = visible_keys(own_q.shape[1], own_k.shape[1], causal, q.device)
        row_out, row_lse = attention(own_q, own_k, own_v, scale, visible, empty_lse)
        out[rows], lse[rows] = row_out.transpose(0, 1), row_lse.transpose(0, 1)
    return out, lse


def dense_prefill_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute flash_attn_varlen_backward, with its operands, by torch's autograd. cu_seqlens: of queries, and of keys.

    Query rows whose lse is infinite have no gradient and add nothing to those of keys and values.
    Returns fp32 dq [total_q, h_q, d_qk], dk [total_k, h_kv, d_qk] and dv [total_k, h_kv, d_v], NaN in rows that belong to no sequence.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dq, dk, dv = (torch.full(tensor.shape, math.nan, device=q.device) for tensor in (q, k, v))
    for sequence in range(len(cu_seqlens[0]) - 1):
        rows, keys = sequence_rows(cu_seqlens[0], sequence, len(q)), sequence_rows(cu_seqlens[1], sequence, len(k))
        own = (q[rows], k[keys], v[keys])
        visible = visible_keys(len(own[0]), len(own[1]), causal, q.device)
        live = ~lse[rows].isinf()
        dq[rows], dk[keys], dv[keys] = attention_gradients(dout[rows], own, scale, visible, live)
    return dq, dk, dv


def attention_gradients(
    dout: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    visible: torch.Tensor,
    live: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of one sequence's q [rows, h_q, d], k [keys, h_kv, d] and v [keys, h_kv, d_v], given that of its out.

    visible: bool [rows, keys]. live: bool [rows, h_q], the rows that take part and see a key. Computes in fp64 up to 2^24 scores, in fp32
    beyond.
    """
    h_q, h_kv = operands[0].shape[1], operands[1].shape[1]
    exact = torch.float64 if visible.numel() * h_q <= _EXACT_SCORES else torch.float32
    leaves = [tensor.detach().to(exact).requires_grad_() for tensor in operands]
    with torch.enable_grad():
        q = leaves[0].transpose(0, 1)
        k, v = (leaf.transpose(0, 1).repeat_interleave(h_q // h_kv, dim=0) for leaf in leaves[1:])
        # Rows that see no key keep all scores, since the softmax of none has no gradient. Their dout is 0.
        hidden = ~visible & visible.any(dim=-1, keepdim=True)
        weights = ((q @ k.transpose(1, 2)) * scale).masked_fill(hidden, -math.inf).softmax(dim=-1)
        out = (weights @ v).transpose(0, 1)
    live = live & visible.any(dim=-1, keepdim=True)
    given = torch.where(live.unsqueeze(-1), dout.to(exact), 0.0)
    return tuple(gradient.float() for gradient in torch.autograd.grad(out, leaves, given))


def sequence_rows(cu_seqlens: torch.Tensor, sequence: int, total: int) -> slice:
    """Return the packed tokens of a sequence as a slice, with its ends clipped to 0 .. total."""
    first, end = cu_seqlens[sequence : sequence + 2].clamp(0, total).tolist()
    return slice(first, end)


def merge_states(outs: torch.Tensor, lses: torch.Tensor, empty_lse: float = math.inf) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union.

    outs: [states, .., d]; lses: [states, ..], natural log. A state with an infinite lse has weight 0, whatever its out.
    Returns out fp32 [.., d] and lse fp32 [..].
    """
    lses = lses.float().masked_fill(lses.isinf(), -math.inf)
    lse = lses.logsumexp(dim=0)
    empty = lse == -math.inf
    weights = (lses - lse.masked_fill(empty, 0.0)).exp().unsqueeze(-1)
    out = torch.where(weights == 0, 0.0, outs.float() * weights).sum(dim=0)
    return out, lse.masked_fill(empty, empty_lse)
