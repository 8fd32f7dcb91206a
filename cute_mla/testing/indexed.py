"""What the cases of all sparse ops have in common: which keys indices name, how many of them count, and sinks."""

from __future__ import annotations

import random
from typing import Literal

import torch
from torch import Tensor

from ..spec.split_plan import TILE_KEYS

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
FAR_BYTES = 1 << 32  # an offset that needs 64 bits, in bytes and in 16-bit elements

_EDGES = (1, 64, 65, 63, 0, 1 << 20, -7)  # lengths, the last two to be clipped

Indices = Literal["valid", "mixed", "none"]
IndexLayout = Literal["packed", "odd"]
Sinks = Literal["none", "drawn", "infinite"]
Lengths = Literal["drawn", "zeros", "edges"] | tuple[int, ...]


def lengths_tag(lengths: Lengths) -> str:
    """Lengths in a case's id."""
    return "_".join(map(str, lengths)) if isinstance(lengths, tuple) else lengths


def told_lengths(lengths: Lengths | None, count: int, topk: int, seed: str, shift: int = 0) -> tuple[int, ...] | None:
    """What a call is told of how many of topk indices count, of `count` requests or tokens; None: nothing, as all of them do.

    lengths: "drawn": 0 to topk; "zeros": 0 for about half; "edges": lengths around a tile, too large and negative ones, in
    turn, the first of them the one at `shift`; or all of them.
    """
    draw = random.Random(seed)
    match lengths:
        case "drawn":
            return tuple(draw.randint(0, topk) for _ in range(count))
        case "zeros":
            return tuple(0 if index == 0 or draw.random() < 0.5 else draw.randint(1, topk) for index in range(count))
        case "edges":
            return tuple(_EDGES[(index + shift) % len(_EDGES)] for index in range(count))
        case given:
            return given


def counted(told: tuple[int, ...] | None, count: int, topk: int) -> tuple[int, ...]:
    """How many indices count of each of `count` requests or tokens."""
    return tuple(min(max(length, 0), topk) for length in ((topk,) * count if told is None else told))


def named_keys(indices: Indices, row: int, keys: int, topk: int, *, ordered: bool, kinds: int, draw: torch.Generator) -> Tensor:
    """int64 [topk]: which of its keys a token names, or -1 minus the number, below `kinds`, of an invalid value.

    indices: "valid": without repetition; "mixed": a fifth of them invalid, a tenth of them repeated; "none": all -1.
    row: the token's number, which with "mixed" says where whole tiles of invalid values lie: nowhere, in front, in the
    middle, everywhere, or in the second half. ordered: keys come in ascending order, but for those that are repeated.
    """
    positions = torch.full((topk,), -1)
    if indices == "none" or not topk:
        return positions
    chosen = torch.randperm(keys, generator=draw)[:topk]
    if ordered:
        chosen = chosen.sort().values
    at = torch.randperm(topk, generator=draw)[: len(chosen)].sort().values
    positions[at] = chosen
    if indices == "valid":
        return positions
    again = torch.rand(topk, generator=draw) < 0.1
    positions[again] = positions[torch.randint(topk, (int(again.sum()),), generator=draw)]
    values = -1 - torch.randint(kinds, (topk,), generator=draw)
    invalid = torch.rand(topk, generator=draw) < 0.2
    match row % 5:
        case 1:
            invalid[: TILE_KEYS + 6] = True
        case 2:
            invalid[TILE_KEYS - 3 : 2 * TILE_KEYS + 5] = True
        case 3:
            invalid[:] = True
        case 4:
            invalid[topk // 2 :] = True
        case _:
            pass
    return torch.where(invalid, values, positions)


def index_values(positions: Tensor, places: Tensor, invalid: tuple[int, ...]) -> Tensor:
    """int32, shaped as positions, which named_keys made: places[key], an int64, or the invalid value of that number."""
    valid = positions >= 0
    if not valid.any():
        places = torch.zeros(1, dtype=torch.int64)
    values = places[torch.where(valid, positions, 0)]
    return torch.where(valid, values, torch.tensor(invalid)[torch.where(valid, 0, -1 - positions)]).int()


def laid_out(indices: Tensor, layout: IndexLayout) -> Tensor:
    """int32 [b, s_q, topk] in its layout; beside them lie indices of keys. "odd": rows aligned to nothing but the element."""
    if layout == "packed":
        return indices
    storage = torch.zeros(*indices.shape[:2], indices.shape[2] + 3, dtype=torch.int32)
    storage[..., 1:-2] = indices
    return storage[..., 1:-2]


def drawn_sinks(sinks: Sinks, h_q: int, seed: int, device: torch.device) -> Tensor | None:
    """fp32 [h_q]; "none": None; "drawn": N(0, 3); "infinite": so, but of every three heads one has +inf and one -inf."""
    if sinks == "none":
        return None
    values = 3 * torch.randn(h_q, generator=torch.Generator().manual_seed(seed + 3))
    if sinks == "infinite":
        values[0::3], values[1::3] = float("inf"), float("-inf")
    return values.to(device)
