"""Keys to and from a cache by slot (page * page size + row) in plain torch, for devices without kernels."""

from __future__ import annotations

import torch

from ..spec.cache_rows import FP8_576
from .codec import Parts, dequantised, parts_of, quantised, to_e4m3
from .rows import CacheRows


def write_rows(rows: CacheRows, k_cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, power_of_two: bool) -> None:
    """Writes keys [tokens, d_qk], of fp8_576 divided by the cache's scale already, to their slots, int64 or int32 [tokens], distinct but
    for those outside the cache, which are skipped. Nothing waits for the device."""
    written = (slots >= 0) & (slots < rows.pages * rows.page_size)
    # Which tokens are skipped is known on the device alone: they write what a written one does, to the same place. Where there is none,
    # all write what slot 0 holds.
    source = torch.where(written, torch.arange(slots.shape[0], device=slots.device), written.int().argmax())
    places = torch.where(written.any(), slots.long()[source], 0)
    where = (places // rows.page_size, places % rows.page_size)
    for columns, values in _stored(rows, k_cache, keys, power_of_two):
        columns[where] = torch.where(written.any(), values[source], columns[where])


def _stored(rows: CacheRows, k_cache: torch.Tensor, keys: torch.Tensor, power_of_two: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of a cache, [pages, page size, ..], and what some keys put there, [tokens, ..]."""
    if not rows.format.quantised:
        return [(k_cache.squeeze(2), keys)]
    if rows.format is FP8_576:
        return [(k_cache.view(torch.uint8).squeeze(2), to_e4m3(keys))]
    parts = parts_of("k_cache", k_cache, rows.format)
    own = quantised(keys, rows.format, power_of_two)
    return [(parts.codes, own.codes), (parts.scales[..., : own.scales.shape[-1]], own.scales), (parts.wide, own.wide)]


def gather_rows(rows: CacheRows, k_cache: torch.Tensor, slots: torch.Tensor, descale_k: torch.Tensor | None) -> torch.Tensor:
    """The keys at slots, int64 [keys], each in the cache: [keys, d_qk] in the cache's dtype, or fp32 out of a quantised one."""
    where = (slots // rows.page_size, slots % rows.page_size)
    if not rows.format.quantised:
        return k_cache.squeeze(2)[where]
    if rows.format is FP8_576:
        values = k_cache.view(torch.uint8).squeeze(2)[where].view(torch.float8_e4m3fn).float()
        return values if descale_k is None else values * descale_k
    parts = parts_of("k_cache", k_cache, rows.format)
    return dequantised(Parts(*(columns[where] for columns in parts)), rows.format)
