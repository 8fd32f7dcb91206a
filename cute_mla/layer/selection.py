"""Keys that the tokens of a step attend to: chosen once by a layer with an indexer, and shared by the layers behind it without one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..ops.split_plan import MlaSchedule
from ..ops.tensor_spec import record_repr


class ChosenKeys(NamedTuple):
    """Keys of tokens, in ascending order of position, then -1.

    indices: int32; of decode requests slots [requests, s_q, topk], of prefill requests rows [tokens, 1, topk] of all their keys (KeyRows).
    counts: int32 [requests] or [tokens], leading indices that count.
    """

    indices: torch.Tensor
    counts: torch.Tensor

    def __repr__(self) -> str:
        return record_repr(self)


class KeyMasks(NamedTuple):
    """Masks of the keys that prefill tokens choose, over the keys of the new tokens, and over those of each chunk of cached keys.

    chosen: what they were made of. masks: int32 [tokens, words], as flash_attn_varlen_func's key_mask.
    """

    chosen: ChosenKeys
    masks: tuple[torch.Tensor, ...]


class Selection:
    """Keys that the last layer with an indexer chose for the tokens of a step; layers without one attend to the same.

    decode, prefill: of the requests of each kind, None until a layer has chosen. schedule: of sparse decode, and rows: of prefill requests,
    both for all layers of the step. masks: of the keys of prefill, None until a layer needs them. latents: by the number of rotary
    columns, latent and rotary columns of the new tokens' keys, of the last layer that lends them, and whether it ran with gradients. A
    model whose first layers run elsewhere, and end with a layer whose keys are shared, sets decode and prefill itself.
    """

    def __init__(self) -> None:
        self.decode: ChosenKeys | None = None
        self.prefill: ChosenKeys | None = None
        self.schedule = MlaSchedule()
        self.rows: KeyRows | None = None
        self.masks: KeyMasks | None = None
        self.latents: dict[int, tuple[tuple[torch.Tensor, torch.Tensor], bool]] = {}

    def __repr__(self) -> str:
        made = [name for name in ("decode", "prefill") if getattr(self, name) is not None]
        return f"{type(self).__name__}({', '.join(made) or 'empty'})"


class KeyRows(NamedTuple):
    """All keys of prefill requests, cached and new, in rows: one request behind the other, in the order of positions.

    total: rows. first, end: int32 [tokens], the first row of the token's request, and the row behind its own key. own: int64 [tokens], the
    row of its own key. chunks: int64 [keys] of each chunk of cached keys, their rows. parts: int32 [tokens], the row of the first new key
    of the token's request, then that of the first key of each chunk.
    """

    total: int
    first: torch.Tensor
    end: torch.Tensor
    own: torch.Tensor
    chunks: tuple[torch.Tensor, ...]
    parts: tuple[torch.Tensor, ...]


def every_slot(block_table: torch.Tensor, cache_seqlens: torch.Tensor, s_q: int, page_size: int, topk: int) -> ChosenKeys:
    """Choose all keys that each token of decode requests sees, of which there are at most topk.

    block_table: int32 [requests, pages per request]; cache_seqlens: int32 [requests], as in DecodeRequests.
    """
    position = torch.arange(topk, device=block_table.device)
    column = position // page_size
    counts = cache_seqlens.clamp(0, min(topk, block_table.shape[1] * page_size))
    if not block_table.shape[1]:
        return ChosenKeys(block_table.new_full((block_table.shape[0], s_q, topk), -1), counts)
    slots = block_table[:, column.clamp(max=block_table.shape[1] - 1)] * page_size + position.int() % page_size
    behind = torch.arange(s_q - 1, -1, -1, device=block_table.device)
    seen = position < (counts.unsqueeze(1) - behind).unsqueeze(-1)
    return ChosenKeys(torch.where(seen, slots.unsqueeze(1), -1), counts)


def every_row(rows: KeyRows, topk: int) -> ChosenKeys:
    """Choose all keys that each token of prefill requests sees, of which there are at most topk."""
    row = rows.first.unsqueeze(1) + torch.arange(topk, dtype=torch.int32, device=rows.first.device)
    return ChosenKeys(torch.where(row < rows.end.unsqueeze(1), row, -1).unsqueeze(1), row_counts(rows, topk))


def row_counts(rows: KeyRows, topk: int) -> torch.Tensor:
    """Return how many keys each token of prefill requests attends to, int32 [tokens]."""
    return (rows.end - rows.first).clamp(max=topk)
