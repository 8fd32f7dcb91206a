"""Cache writes and gathers in plain torch, for devices without kernels. A slot is page * page size + row."""

from __future__ import annotations

import torch

from ..spec.cache_rows import FP8_576
from .cache_codec import Parts, dequantised, parts_of, quantised, to_e4m3
from .paged_cache import CacheRows


def write_rows(rows: CacheRows, k_cache: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor, power_of_two: bool) -> None:
    """Write keys [tokens, d_qk] to their slots, int64 or int32 [tokens].

    Slots outside the cache are skipped; the others are distinct. Keys of fp8_576 are divided by the cache's scale already. Nothing waits
    for the device.
    """
    written = (slots >= 0) & (slots < rows.pages * rows.page_size)
    # Only the device knows which tokens are skipped. A skipped token repeats a written one: same key, same slot. Where every token is
    # skipped, all of them write back what slot 0 holds.
    source = torch.where(written, torch.arange(slots.shape[0], device=slots.device), written.int().argmax())
    places = torch.where(written.any(), slots.long()[source], 0)
    where = (places // rows.page_size, places % rows.page_size)
    for columns, values in _stored(rows, k_cache, keys, power_of_two):
        columns[where] = torch.where(written.any(), values[source], columns[where])


def _stored(rows: CacheRows, k_cache: torch.Tensor, keys: torch.Tensor, power_of_two: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return views of a cache, [pages, page size, ..], each with the values that the keys store there, [tokens, ..]."""
    if not rows.format.quantised:
        return [(k_cache.squeeze(2), keys)]
    if rows.format is FP8_576:
        return [(k_cache.view(torch.uint8).squeeze(2), to_e4m3(keys))]
    parts = parts_of("k_cache", k_cache, rows.format)
    own = quantised(keys, rows.format, power_of_two)
    return [(parts.codes, own.codes), (parts.scales[..., : own.scales.shape[-1]], own.scales), (parts.wide, own.wide)]


def gather_rows(rows: CacheRows, k_cache: torch.Tensor, slots: torch.Tensor, descale_k: torch.Tensor | None) -> torch.Tensor:
    """Return the keys at slots, int64 [keys], all inside the cache: [keys, d_qk] in the cache's dtype, or fp32 if it is quantised."""
    where = (slots // rows.page_size, slots % rows.page_size)
    if not rows.format.quantised:
        return k_cache.squeeze(2)[where]
    if rows.format is FP8_576:
        values = k_cache.view(torch.uint8).squeeze(2)[where].view(torch.float8_e4m3fn).float()
        return values if descale_k is None else values * descale_k
    parts = parts_of("k_cache", k_cache, rows.format)
    return dequantised(Parts(*(columns[where] for columns in parts)), rows.format)


def gather_requests(
    rows: CacheRows,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    starts: torch.Tensor | None,
    descale_k: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Gather the keys of all requests into out, as cache_gather.run does on devices with kernels."""
    table = block_table
    if table.shape[1] == 0:
        table = table.new_full((table.shape[0], 1), -1)  # requests without pages: one entry that names no page
    row = torch.arange(out.shape[0], device=out.device)
    request = torch.searchsorted(cu_seqlens[1:].long(), row, right=True)  # the number of requests that end at or before a row
    exists = request < table.shape[0]
    request = request.clamp(max=table.shape[0] - 1)
    position = row - cu_seqlens[request]
    inside = position >= 0
    if starts is not None:
        inside &= starts[request] >= 0
        position = position + starts[request]
    column = position // rows.page_size
    inside &= column < table.shape[1]
    page = table[request, column.clamp(0, table.shape[1] - 1)].long()
    inside &= (page >= 0) & (page < rows.pages)
    slots = torch.where(inside, page * rows.page_size + position % rows.page_size, 0)
    keys = torch.where(inside[:, None], gather_rows(rows, k_cache, slots, descale_k), 0.0)
    out.copy_(torch.where(exists[:, None], keys.to(out.dtype), out))
