"""Choice of pools of neighbouring tokens by an indexer, and the tokens of these (GLM-5.3-Flash)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..indexer import expand_pools, slots_of_positions
from .batch import DecodeRequests, MlaBatch, PrefillRequests
from .index_keys import PooledIndexCache
from .indexer import IndexQueries
from .path import AttentionPath
from .selection import ChosenKeys, KeyRows


class Pools(NamedTuple):
    """Pools of an indexer's cache. chosen: of a token, at most; size: tokens of a pool."""

    cache: PooledIndexCache
    chosen: int
    size: int


def spans(batch: MlaBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cu_seqlens int32 [requests + 1] of the new tokens of all requests, and int32 [requests], the tokens before them."""
    counts, contexts = [], []
    if batch.decode is not None:
        counts.append(torch.full_like(batch.decode.cache_seqlens, batch.decode.s_q))
        contexts.append((batch.decode.cache_seqlens - batch.decode.s_q).clamp(min=0))
    if batch.prefill is not None:
        counts.append(batch.prefill.cu_seqlens.diff())
        contexts.append(sum((chunk.cu_seqlens.diff() for chunk in batch.prefill.chunks), torch.zeros_like(counts[-1])))
    ends = torch.cat(counts).cumsum(0, dtype=torch.int32) if counts else batch.positions.new_zeros(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0)), torch.cat(contexts) if contexts else ends


def choose_pooled_slots(path: AttentionPath, queries: IndexQueries, pools: Pools, requests: DecodeRequests, page_size: int) -> ChosenKeys:
    """Return the slots of decode requests' chosen pools and tails. page_size: of attention's cache."""
    batch, s_q = requests.cache_seqlens.shape[0], requests.s_q
    ahead = torch.arange(1 - s_q, 1, dtype=torch.int32, device=requests.cache_seqlens.device)
    lengths = (requests.cache_seqlens.unsqueeze(1) + ahead).clamp(min=0)
    positions, counts = _choose(path, queries, pools, lengths, pools.cache.block_table[:batch])
    slots = slots_of_positions(positions, requests.block_table, page_size)
    return ChosenKeys(slots.unflatten(0, (batch, s_q)), counts.view(batch, s_q).amax(dim=1))


def choose_pooled_rows(path: AttentionPath, queries: IndexQueries, pools: Pools, requests: PrefillRequests, rows: KeyRows) -> ChosenKeys:
    """Return the rows of prefill tokens' chosen pools and tails. Each token reads the pools by itself, as a request of its own."""
    counts = requests.cu_seqlens.diff()
    request = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=requests.tokens)
    table = pools.cache.block_table[pools.cache.block_table.shape[0] - len(counts) :][request]
    positions, seen = _choose(path, queries, pools, (rows.end - rows.first).unsqueeze(1), table)
    return ChosenKeys(torch.where(positions < 0, positions, positions + rows.first.unsqueeze(1)).unsqueeze(1), seen)


def _choose(
    path: AttentionPath, queries: IndexQueries, pools: Pools, lengths: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and counts, as expand_pools. lengths: int32 [requests, tokens], tokens that each token sees."""
    by_request = queries.q.unflatten(0, lengths.shape)
    chosen = path.choose_pools(by_request, queries.weights, pools.cache.keys, lengths // pools.size, table, pools.chosen)
    return expand_pools(chosen, lengths.flatten(), pools.size)
