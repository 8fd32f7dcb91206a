"""Attention over a latent, dense and sparse, for any device and dtype: no limits, and no speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..spec.mla import D_QK, D_V, DENSE_DIMS

_BLOCK_SCORES = 1 << 22  # computed at a time: 32 MB in fp64


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, visible: torch.Tensor, empty_lse: float = math.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q k^T) v over the visible keys.

    q: [heads, rows, d]; k: [heads, keys, d]; v: [heads, keys, d_v]; visible: bool [rows, keys].
    Returns out fp32 [heads, rows, d_v] and lse fp32 [heads, rows], natural log; a row that sees nothing has out 0 and
    lse empty_lse.
    """
    out = v.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.float32)
    lse = v.new_empty(q.shape[:-1], dtype=torch.float32)
    for heads, rows in blocks(len(q), q.shape[1], k.shape[1]):
        scores = masked_scores(q[heads, rows], k[heads], scale, visible[rows])
        out[heads, rows], lse[heads, rows] = attention_by(scores, v[heads], visible[rows], empty_lse)
    return out, lse


def blocks(heads: int, rows: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of heads and of rows that cover all, with at most _BLOCK_SCORES scores each, or those of one row."""
    most_heads = max(_BLOCK_SCORES // max(rows * keys, 1), 1)
    most_rows = max(_BLOCK_SCORES // max(keys, 1), 1)
    for head in range(0, heads, most_heads):
        for row in range(0, rows, most_rows):
            yield slice(head, head + most_heads), slice(row, row + most_rows)


def attention_by(
    scores: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, empty_lse: float = math.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of `attention` in fp64, given the results of masked_scores."""
    lse = scores.logsumexp(dim=-1)
    empty = ~visible.any(dim=-1)
    weights = (scores - lse.masked_fill(empty, 0.0).unsqueeze(-1)).exp()
    return weights @ v.double(), lse.masked_fill(empty, empty_lse)


def masked_scores(q: torch.Tensor, k: torch.Tensor, scale: float, visible: torch.Tensor) -> torch.Tensor:
    """Return fp64 [heads, rows, keys]: scale * q k^T where a row sees the key, else -inf. Operands as in `attention`."""
    return ((q.double() @ k.double().transpose(-1, -2)) * scale).masked_fill(~visible, -math.inf)


def visible_keys(s_q: int, length: int, causal: bool, device: torch.device) -> torch.Tensor:
    """Return bool [s_q, length]: the keys that each query token sees. Causal is aligned bottom right: the last token sees all keys."""
    if not causal:
        return torch.ones(s_q, length, dtype=torch.bool, device=device)
    token = torch.arange(s_q, device=device).unsqueeze(1)
    return torch.arange(length, device=device) < length - (s_q - 1 - token)


def tree_keys(tree_mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return bool [s_q, length]: the keys that each query token of a request sees by its tree mask, int32 [s_q, words]."""
    s_q = len(tree_mask)
    token = torch.arange(length, device=tree_mask.device) - (length - s_q)  # of each key, among the new ones; negative before them
    new = token.clamp(min=0)
    bits = (tree_mask[:, new // 32] >> (new % 32)) & 1 if s_q else tree_mask.new_empty((0, length))
    return (bits != 0) | (token < 0)


def mask_keys(key_mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return bool [rows, length]: the keys of a sequence that each of its query tokens sees by its mask, int32 [rows, words].

    Keys beyond the words are hidden.
    """
    key = torch.arange(length, device=key_mask.device)
    there = key < 32 * key_mask.shape[1]
    words = key_mask[:, torch.where(there, key // 32, 0)] if key_mask.shape[1] else key_mask.new_zeros((len(key_mask), length))
    return (((words >> (key % 32)) & 1) != 0) & there


def window_keys(s_q: int, length: int, window: int | None, window_sink: int, device: torch.device) -> torch.Tensor:
    """Return bool [s_q, length]: the last `window` keys up to each query token's own, all behind that, and the first window_sink ones."""
    key = torch.arange(length, device=device)
    own = length - s_q + torch.arange(s_q, device=device).unsqueeze(1)
    first = own - length if window is None else own - window + 1
    return (key >= first) | (key < window_sink)


def scale_by_sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor) -> torch.Tensor:
    """Return out fp32 [batch, s_q, h_q, d_v] with the sinks [h_q] in the denominator.

    lse: fp32 [batch, h_q, s_q]; infinite for rows of zeros.
    """
    share = (lse.double() - attn_sink.unsqueeze(-1)).sigmoid().masked_fill(lse.isinf(), 0.0)
    return (out * share.transpose(1, 2).unsqueeze(-1)).float()


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
    """Return values times a scalar, in fp64; without a scalar, the values themselves."""
    return values if scale is None else values.double() * scale


class SeenKeys(NamedTuple):
    """Arguments that decide which keys a query token sees. window: window and window_sink."""

    causal: bool = False
    tree_mask: torch.Tensor | None = None
    window: tuple[int | None, int] = (None, 0)

    def mask(self, request: int, s_q: int, length: int, device: torch.device) -> torch.Tensor:
        """Return bool [s_q, length] of a request with `length` keys: whether a query token sees a key."""
        visible = visible_keys(s_q, length, self.causal and s_q > 1, device)
        if self.tree_mask is not None:
            visible = tree_keys(self.tree_mask[request], length)
        return visible & window_keys(s_q, length, *self.window, device)


def dense_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float = D_QK**-0.5,
    causal: bool | SeenKeys = False,
    empty_lse: float = math.inf,
    descales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_mla_with_kvcache over a dense cache, with its operands. For sinks: scale_by_sink.

    causal: the argument, or all that decide on keys. descales: descale_q and descale_k.
    Returns out fp32 [batch, s_q, h_q, d_v] and lse fp32 [batch, h_q, s_q]; d_v by the columns of q (DENSE_DIMS).
    """
    seen = causal if isinstance(causal, SeenKeys) else SeenKeys(causal)
    batch, s_q, h_q, d_qk = q.shape
    d_v = DENSE_DIMS[d_qk].latent
    h_kv = k_cache.shape[2]
    group = h_q // h_kv  # query heads of one KV head: rows over the same keys, which are not repeated
    out = torch.zeros(batch, s_q, h_q, d_v, device=q.device)
    lse = torch.full((batch, h_q, s_q), empty_lse, device=q.device)
    for request, length in enumerate(cache_seqlens.tolist()):
        k = scaled(gather_pages(k_cache, block_table[request], length), descales[1]).transpose(0, 1)  # [h_kv, length, d_qk]
        rows = scaled(q[request], descales[0]).unflatten(1, (h_kv, group)).transpose(0, 1).flatten(1, 2)  # [h_kv, s_q * group, d_qk]
        visible = seen.mask(request, s_q, length, q.device)
        k = k.double().masked_fill(~visible.any(dim=0).unsqueeze(-1), 0.0)  # 0 times NaN is NaN
        row_out, row_lse = attention(rows, k, k[..., :d_v], softmax_scale, visible.repeat_interleave(group, dim=0), empty_lse)
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
    return out.float(), scores[0].amax(dim=-1).float(), lse.float()


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

    lse_indexer is the lse over the first indexer_topk indices. Returns fp32 out [.., s_q, h_q, 512], max_logits [.., s_q, h_q] and lse [..,
    s_q, h_q], with the batch in front if q has one.
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


def sparse_prefill_backward(
    dout: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lse: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    kv_offsets: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of flash_mla_sparse_fwd by torch's autograd. operands: q, kv and indices.

    dlse: gradient of lse, fp32 of its shape; None: zeros. A row whose lse is infinite, and a head whose sink is +inf, has no gradient and
    adds nothing to the others. Returns fp32 dq and dkv, of the shapes of q and kv, and d_sink [h_q].
    """
    q, kv, indices = operands
    dq, dkv = torch.zeros(q.shape, device=q.device), torch.zeros(kv.shape, dtype=torch.float64, device=q.device)
    sinks = torch.full(q.shape[-2:-1], -math.inf, device=q.device) if attn_sink is None else attn_sink
    d_sink = torch.zeros(sinks.shape, dtype=torch.float64, device=q.device)
    for token in itertools.product(*map(range, q.shape[:-2])):
        rows, of_request = (rows_of_request(tensor, kv_offsets, token[:-1]).squeeze(1) for tensor in (kv, dkv))
        length = None if topk_length is None else topk_length[token]
        named = named_rows(torch.arange(len(rows), device=q.device), indices[token].squeeze(0), length).long()
        live = ~lse[token].isinf() & (sinks != math.inf)
        if not len(named) or not live.any():
            continue
        leaves = [tensor.detach().double().requires_grad_() for tensor in (q[token][live], rows[named], sinks[live])]
        with torch.enable_grad():
            scores = leaves[0] @ leaves[1].T * sm_scale
            own = scores.logsumexp(dim=-1)
            out = (scores - torch.logaddexp(own, leaves[2])[:, None]).exp() @ leaves[1][:, :D_V]
            loss = (out * dout[token][live].double()).sum()
            if dlse is not None:
                loss = loss + (own * dlse[token][live].double()).sum()
        of_q, of_keys, of_sink = torch.autograd.grad(loss, leaves)
        dq[token][live] = of_q.float()
        of_request.index_add_(0, named, of_keys)
        d_sink[live] += of_sink
    return dq, dkv.float(), d_sink.float()


def lse_indexer(indexer_topk: int, q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, *operands: Any) -> torch.Tensor:
    """Return lse_indexer of flash_mla_sparse_fwd, fp32 [.., s_q, h_q]. operands: those of sparse_prefill from sm_scale on."""
    return sparse_prefill(q, kv, indices[..., :indexer_topk], *operands)[2]


def rows_of_request(kv: torch.Tensor, kv_offsets: torch.Tensor | None, request: tuple[int, ...]) -> torch.Tensor:
    """Return [n, 1, d_qk]: the rows that the indices of a request count in. request: its number, or () without a batch."""
    if kv_offsets is None:
        return kv[request]
    return kv[sequence_rows(kv_offsets, request[0], len(kv))]


def sequence_rows(cu_seqlens: torch.Tensor, sequence: int, total: int) -> slice:
    """Return the packed tokens of a sequence as a slice, with its ends clipped to 0 .. total."""
    first, end = cu_seqlens[sequence : sequence + 2].clamp(0, total).tolist()
    return slice(first, end)
