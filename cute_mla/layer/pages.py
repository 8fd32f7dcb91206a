"""Pages of the keys that prefill requests of a layer with a window attend to."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..spec.mla import ceil_div
from .batch import PrefillRequests

_PAGE_SIZE = 64


class Pages(NamedTuple):
    """Keys [pages, page size, 1, columns], the pages of each request, int32 [requests, any], and its keys, int32 [requests]."""

    keys: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def own_pages(keys: torch.Tensor, requests: PrefillRequests) -> Pages:
    """Copy the new keys [tokens, columns] of requests to pages, as many for each as the longest needs; 0 where there are no keys."""
    lengths, device = requests.cu_seqlens.diff(), keys.device
    room = ceil_div(max(requests.max_seqlen, 1), _PAGE_SIZE)
    numbers = torch.arange(lengths.shape[0], device=device)
    owner = numbers.repeat_interleave(lengths, output_size=requests.tokens)
    place = owner * (room * _PAGE_SIZE) + torch.arange(requests.tokens, device=device) - requests.cu_seqlens[:-1][owner]
    pages = keys.new_zeros(lengths.shape[0] * room, _PAGE_SIZE, 1, keys.shape[1])
    pages.flatten(0, 2).index_copy_(0, place, keys)
    table = torch.arange(lengths.shape[0] * room, dtype=torch.int32, device=device).view(-1, room)
    return Pages(pages, table, lengths)
