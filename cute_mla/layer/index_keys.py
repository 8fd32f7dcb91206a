"""Caches of an indexer's keys, and keys out of them in rows: plain torch, on any device, without synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..spec.mla import ceil_div
from ..spec.mqa_logits import COLUMNS, ROW_BYTES
from .batch import PrefillRequests

_PAGE_SIZE = 64  # of pools that are written to be read at once


class IndexRows(NamedTuple):
    """Rows of the indexer: values float8_e4m3fn [.., 128] and their scales, fp32 [..], powers of two."""

    values: torch.Tensor
    scales: torch.Tensor


class PooledIndexCache(NamedTuple):
    """Cache of an indexer whose keys are pools of tokens, as write_pooled_index_keys takes it.

    keys: uint8 [pages, page size, 1, 132]. tail: [rows, ring, 256]. block_table: int32 [requests, pages per request], of all requests of
    the batch, those of pools: a page has the pools of page size * pool tokens, and pools behind the last page are neither written nor
    chosen. tail_rows: int64 [requests], None for row r of request r. Pools are of all new tokens, also of those whose slot is -1.
    """

    keys: torch.Tensor
    tail: torch.Tensor
    block_table: torch.Tensor
    tail_rows: torch.Tensor | None = None


def scratch_of(requests: PrefillRequests, device: torch.device, pool: int) -> PooledIndexCache:
    """Return a cache for the pools of whole sequences, which are read in the same step."""
    count, pages = requests.cu_seqlens.shape[0] - 1, max(ceil_div(requests.max_seqlen, pool * _PAGE_SIZE), 1)
    keys = torch.zeros(count * pages, _PAGE_SIZE, 1, ROW_BYTES, dtype=torch.uint8, device=device)
    table = torch.arange(count * pages, dtype=torch.int32, device=device).view(count, pages)
    return PooledIndexCache(keys, torch.zeros(count, pool, 2 * COLUMNS, device=device), table)


def gather_index_rows(index_cache: torch.Tensor, slots: torch.Tensor) -> IndexRows:
    """Return the keys at slots, int64 [keys]; values and scales of slots outside the cache are 0."""
    pages, page_size = index_cache.shape[:2]
    inside = (slots >= 0) & (slots < pages * page_size)
    if not pages * page_size:
        empty = index_cache.new_zeros(slots.shape[0], ROW_BYTES)
        return IndexRows(empty[:, :COLUMNS].view(torch.float8_e4m3fn), empty[:, COLUMNS:].contiguous().view(torch.float32).squeeze(1))
    place = torch.where(inside, slots, 0)
    where = (place // page_size, place % page_size)
    values, scales = (torch.where(inside.unsqueeze(1), part[where], 0) for part in _pages(index_cache))
    return IndexRows(values.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(1))


def _pages(index_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 views of an index cache: values [pages, page size, 128] and scales [pages, page size, 4]."""
    page_size = index_cache.shape[1]
    values, scales = index_cache.view(torch.uint8).flatten(1).split([page_size * COLUMNS, page_size * (ROW_BYTES - COLUMNS)], dim=1)
    return values.unflatten(1, (page_size, COLUMNS)), scales.unflatten(1, (page_size, ROW_BYTES - COLUMNS))
