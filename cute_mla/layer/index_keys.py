"""Keys of the indexer out of its cache, in rows: plain torch, on any device, without synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..spec.mqa_logits import COLUMNS, ROW_BYTES


class IndexRows(NamedTuple):
    """Rows of the indexer: values float8_e4m3fn [.., 128] and their scales, fp32 [..], powers of two."""

    values: torch.Tensor
    scales: torch.Tensor


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
