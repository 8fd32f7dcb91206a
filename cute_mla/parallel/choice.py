"""Choice of keys by an indexer over keys distributed over ranks: each rank's own best, and the best of all ranks."""

from __future__ import annotations

import math

import torch

from ..indexer import fp8_paged_mqa_logits, topk_indices

_LAST = torch.iinfo(torch.int32).max  # sorts behind all positions


def own_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the topk greatest logits of each row among the rank's keys, fp32 [rows, topk], and the numbers of their keys, int32 likewise.

    q: e4m3 [rows, 1, heads, 128]; the other arguments as in fp8_paged_mqa_logits, with a length per row. Keys ascend; behind the last, -1.
    """
    most = block_table.shape[1] * index_cache.shape[1]
    if not most:
        return weights.new_full((q.shape[0], topk), -math.inf), lengths.new_full((q.shape[0], topk), -1)
    logits = fp8_paged_mqa_logits(q, index_cache, weights, lengths, block_table, None, most, clean_logits=False)
    keys = topk_indices(logits, lengths, topk)
    return logits.gather(1, keys.clamp(min=0).long()), keys


def best_of(values: torch.Tensor, positions: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the positions of the topk greatest values of each row, ascending, then -1: int32 [rows, topk].

    values: fp32 [rows, n]; positions: int32 [rows, n], all different but for -1, whose values do not count. Of equal values the one at the
    lower position is chosen, as topk_indices does over all keys.
    """
    order = torch.where(positions < 0, _LAST, positions).sort(dim=1).indices
    sorted_positions = positions.gather(1, order)
    columns = topk_indices(values.gather(1, order), (positions >= 0).sum(dim=1, dtype=torch.int32), topk)
    return torch.where(columns < 0, -1, sorted_positions.gather(1, columns.clamp(min=0).long()))
