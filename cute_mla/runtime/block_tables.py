"""Block tables of simulated launches: used entries that name no page of the cache are findings.

Kernels read such a page as zeros, so no result shows the mistake. A kernel takes part by the names of its parameters: block_table,
page_size, pages, and either cache_seqlens with max_keys, reach and sink_keys, or cu_seqlens with starts and rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..manifest import KernelEntry
from ..simulator import Finding

KIND = "block_table"


def findings_of(kernel: KernelEntry, args: Sequence[Any]) -> list[Finding]:
    """Return a finding if an entry that a request uses lies outside [0, pages). args: of a launch, in the order of the parameters.

    A table without a shape, such as the address in a recorded launch, is not looked at.
    """
    named = dict(zip((param.name for param in kernel.params), args, strict=True))
    table, pages = named.get("block_table"), named.get("pages")
    if not isinstance(table, torch.Tensor) or pages is None:
        return []
    outside = _used(named) & ((table < 0) | (table >= pages))
    count = int(outside.sum())
    if not count:
        return []
    request, entry = outside.nonzero()[0].tolist()
    message = (
        f"block_table[{request}, {entry}] is {int(table[request, entry])} and request {request} uses it; supported: 0 to {pages - 1}; "
        f"the page reads as zeros (used entries outside the cache: {count})"
    )
    return [Finding(KIND, message)]


def _used(named: Mapping[str, Any]) -> torch.Tensor:
    """Return bool [batch, pages per request]: the entries whose pages hold a key that the launch uses."""
    page = named["page_size"]
    first = torch.arange(named["block_table"].shape[1]) * page  # key of each entry
    if "cache_seqlens" in named:
        end = named["cache_seqlens"].long().clamp(0, named["max_keys"])[:, None]
        return (first < end) & ((first < named["sink_keys"]) | (first + page > end - named["reach"]))
    if "end_keys" in named:
        return first < named["end_keys"].long().clamp(0, named["keys"]).view(len(named["block_table"]), -1).amax(1, keepdim=True)
    begin, end = _gathered(named)
    return (begin < end) & (first < end) & (first + page > begin)


def _gathered(named: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the first key and behind the last key of every request, int64 [batch, 1]: of a gather.

    A request with a negative start has no key.
    """
    rows = named["cu_seqlens"].long()
    begin = torch.zeros_like(rows[:-1]) if named["starts"] is None else named["starts"].long()
    first, end = rows[:-1].clamp(min=0), rows[1:].clamp(max=named["rows"])
    keys = torch.where(begin >= 0, end - first, 0)
    begin = begin + first - rows[:-1]
    return begin[:, None], (begin + keys)[:, None]
