"""Sub-calls: the call of some requests of another call, with all that belongs to them elsewhere in memory if it is to be moved.

A request is what keeps its bits: of decode a request with all its query tokens, of sparse prefill a query token, of dense prefill a
sequence, of the other ops a token or a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from .operation import Result

CUT = INVARIANT_SPLIT_TILES * TILE_KEYS  # keys after which a batch-invariant request is cut
FRONT = 9  # unused rows in front of moved keys

Picks: TypeAlias = Sequence[int]
Call: TypeAlias = tuple[Any, Any]  # a case and its operands


def elsewhere(places: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Return an order of so many rows or pages of a cache, and by its old number the new place of each."""
    order = torch.randperm(places, generator=torch.Generator().manual_seed(17)).to(device)
    return order, order.argsort()


def in_order(cache: Tensor, order: Tensor) -> Tensor:
    """Return the rows or pages of a cache in another order, of whatever type."""
    return cache.view(torch.uint8)[order].view(cache.dtype)


def relocated(cache: Tensor, numbers: Tensor, rows: int = 1) -> tuple[Tensor, Tensor]:
    """Return a cache with its pages in another order, and the numbers that follow them; numbers outside the cache stay as they are.

    rows: that a page has numbers for: 1 in a block table, the rows of a page in indices.
    """
    order, place = elsewhere(len(cache), cache.device)
    inside = (numbers >= 0) & (numbers < len(cache) * rows)
    known = numbers.where(inside, torch.zeros_like(numbers)).long()
    return in_order(cache, order), torch.where(inside, (place[known // rows] * rows + known % rows).to(numbers), numbers)


def narrowed(numbers: Tensor | None) -> Tensor | None:
    """Return int64 numbers as int32; those that int32 cannot hold stay outside of everything."""
    return None if numbers is None else numbers.clamp(-(1 << 31), (1 << 31) - 1).int()


def widened(table: Tensor, columns: int, entry: float) -> Tensor:
    """Return more columns behind those that a table has."""
    return torch.cat([table, table.new_full((*table.shape[:-1], columns), entry)], dim=-1)


def at(q: Tensor, rows: Picks) -> Tensor:
    """Return rows of q along its first dimension, in this order, whose rows of elements lie as far apart and as aligned as they did."""
    apart = q.stride(-2) if q.numel() else q.shape[-1]
    if apart == q.shape[-1]:
        return q[list(rows)]
    picked = torch.full((len(rows), *q.shape[1:-1], apart), float("nan"), dtype=q.dtype, device=q.device)[..., apart - q.shape[-1] :]
    return picked.copy_(q[list(rows)])


def rows_of(starts: Sequence[int], lengths: Sequence[int], picks: Picks) -> list[int]:
    """Return the packed rows of the picked requests, which begin at `starts`."""
    return [row for pick in picks for row in range(starts[pick], starts[pick] + lengths[pick])]


def own_rows(case: Any, tensors: Any, results: Result, place: int) -> Result:
    """Return one request's rows of results whose first dimension counts requests."""
    return tuple(result[place : place + 1] for result in results)
