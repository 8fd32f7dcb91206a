"""Logits and top-k of the indexer of sparse attention."""

from __future__ import annotations

import math

import torch


def topk_indices(logits: torch.Tensor, lengths: torch.Tensor, topk: int) -> torch.Tensor:
    """Positions of the topk greatest of logits[r, : lengths[r]], ascending, -1 behind the last: int32 [rows, topk].

    logits: fp32 [rows, n]. lengths: int32 [rows], clipped to 0 .. n. A stable sort orders by value, NaN last, then by position.
    """
    out = torch.full((len(logits), topk), -1, dtype=torch.int32, device=logits.device)
    for row, length in enumerate(lengths.clamp(0, logits.shape[1]).tolist()):
        values = logits[row, :length].double()
        order = torch.where(values.isnan(), math.inf, -values)  # -inf becomes inf too: NaN must follow it
        first = torch.argsort(order, stable=True)
        first = torch.cat([first[~values[first].isnan()], first[values[first].isnan()]])[:topk]
        out[row, : len(first)] = first.sort().values.int()
    return out


def mqa_logits(
    q: torch.Tensor, keys: torch.Tensor, scales: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor, unseen: float = -math.inf
) -> torch.Tensor:
    """Compute logits fp32 [tokens, keys]: scale * sum_h weight_h * relu(<q_h, key>), summed in fp64; `unseen` where a token sees no key.

    q: [tokens, heads, columns]; keys: [keys, columns]; scales: [keys]; weights: [tokens, heads]; seen: bool [tokens, keys].
    """
    dots = q.double() @ keys.double().T  # [tokens, heads, keys]
    sums = (weights.double().unsqueeze(1) @ dots.relu()).squeeze(1)
    return (scales.double() * sums).float().masked_fill(~seen, unseen)


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Compute indexer.fp8_mqa_logits, with its operands. Logits that the call does not write are NaN."""
    keys, scales = kv
    place = torch.arange(len(keys), device=q.device)
    first, end = (bound.long().clamp(0, len(keys)).unsqueeze(1) for bound in (ks, ke))
    logits = mqa_logits(q, keys, scales, weights, (place >= first) & (place < end), -math.inf if clean_logits else math.nan)
    if not max_seqlen_k:
        return logits
    key = first + torch.arange(max_seqlen_k, device=q.device)
    unseen = logits.new_full((len(logits), max_seqlen_k), math.nan)
    return torch.where(key < end, torch.cat([logits, unseen], 1).gather(1, key.clamp(max=len(keys))), unseen)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = True,
) -> torch.Tensor:
    """Compute indexer.fp8_paged_mqa_logits, with its operands. Logits that the call does not write are NaN."""
    batch, tokens = q.shape[:2]
    logits = torch.full((batch * tokens, max_context_len), -math.inf if clean_logits else math.nan, device=q.device)
    most = min(max_context_len, block_table.shape[1] * cache.shape[1])
    ends = paged_ends(context_lens, tokens, most)
    for request, end in enumerate(ends):
        keys, scales = indexed_keys(cache, block_table[request], int(end.max()) if tokens else 0)
        rows = slice(request * tokens, (request + 1) * tokens)
        seen = torch.arange(len(keys), device=q.device) < end.unsqueeze(1)
        logits[rows, : len(keys)] = mqa_logits(q[request], keys, scales, weights[rows], seen, -math.inf if clean_logits else math.nan)
    return logits


def paged_ends(context_lens: torch.Tensor, tokens: int, most: int) -> torch.Tensor:
    """Return int64 [batch, tokens]: how many keys each query token of a request sees, by its length [batch], or [batch, tokens]."""
    lengths = context_lens.long().clamp(0, most)
    if lengths.dim() == 2:
        return lengths
    behind = tokens - 1 - torch.arange(tokens, device=lengths.device)
    return (lengths.unsqueeze(1) - behind).clamp(min=0)


def indexed_keys(cache: torch.Tensor, pages: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `length` keys of a request in an index cache: e4m3 [length, columns], and their scales, fp32 [length].

    cache: uint8 [pages, page size, 1, columns + 4], a page the values of its keys, then their scales. pages: as in gather_pages; a page
    outside the cache has scales of 0.
    """
    page_size, columns = cache.shape[1], cache.shape[3] - 4
    used = pages[: -(-length // page_size)].long()
    inside = (used >= 0) & (used < len(cache))
    content = cache.new_zeros(len(used), page_size * (columns + 4))
    content[inside] = cache[used[inside]].flatten(1)
    values = content[:, : page_size * columns].reshape(-1, columns).view(torch.float8_e4m3fn)
    scales = content[:, page_size * columns :].contiguous().view(torch.float32).flatten()
    return values[:length], scales[:length]


def indexer_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    slots: bool = False,
) -> torch.Tensor:
    """Compute indexer.indexer_topk, with its operands."""
    tokens, page_size = q.shape[1], index_cache.shape[1]
    most = block_table.shape[1] * page_size
    logits = fp8_paged_mqa_logits(q, index_cache, weights, context_lens, block_table, most)
    positions = topk_indices(logits, paged_ends(context_lens, tokens, most).flatten(), topk)
    if not slots or not most:
        return positions
    key = positions.clamp(min=0).long()
    page = block_table.repeat_interleave(tokens, 0).gather(1, key // page_size)
    is_key = (positions >= 0) & (page >= 0) & (page < len(index_cache))
    return torch.where(is_key, page.long() * page_size + key % page_size, -1).int()


def indexer_topk_prefill(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    max_seqlen_k: int | None = None,
) -> torch.Tensor:
    """Compute indexer.indexer_topk_prefill, with its operands."""
    keys = len(kv[0])
    columns = keys if max_seqlen_k is None else min(max_seqlen_k, keys)
    counts = ke.long().clamp(0, keys) - ks.long().clamp(0, keys)
    logits = fp8_mqa_logits(q, kv, weights, ks, ke, False, columns) if columns else torch.empty(len(q), 0, device=q.device)
    return topk_indices(logits, counts, topk)
