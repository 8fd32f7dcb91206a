"""Cache writes and gathers in plain torch, for devices without kernels. A slot is page * page size + row."""

from __future__ import annotations

import torch

from .cache_codec import stored, stored_keys
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
    for columns, values in stored("k_cache", k_cache, rows.format, keys, power_of_two):
        columns[where] = torch.where(written.any(), values[source], columns[where])


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
    found = stored_keys("k_cache", k_cache, rows.format, (slots // rows.page_size, slots % rows.page_size), descale_k)
    keys = torch.where(inside[:, None], found, 0.0)
    out.copy_(torch.where(exists[:, None], keys.to(out.dtype), out))
