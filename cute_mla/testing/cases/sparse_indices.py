"""Indices, numbers of indices and attention sinks, which the cases of all sparse ops share."""

from __future__ import annotations

import random
from typing import Literal

import torch
from torch import Tensor

from ...spec.split_plan import TILE_KEYS
from .far import FAR_DIMENSIONS, far_tensor

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
FAR_BYTES = 1 << 32  # an offset that needs 64 bits, in bytes and in 16-bit elements

# Lengths around a tile. Kernels clip the second, which is less than -1 tile, and the last. The last token, which may lie far, has indices,
# and so has the next one behind the second on the same CTAs, of every token or of every third: it shows how many tiles those have counted.
_EDGES = (1, -70, 64, 65, 63, 0, 1 << 20)

Indices = Literal["valid", "mixed", "none"]
IndexLayout = Literal["packed", "odd", "far_requests", "far_tokens"]
Sinks = Literal["none", "drawn", "infinite"]
Lengths = Literal["drawn", "zeros", "edges"] | tuple[int, ...]


def lengths_tag(lengths: Lengths) -> str:
    """Return the tag of lengths in a case's id."""
    return "_".join(map(str, lengths)) if isinstance(lengths, tuple) else lengths


def draw_topk_lengths(lengths: Lengths | None, count: int, topk: int, seed: str, shift: int = 0) -> tuple[int, ...] | None:
    """Return the topk_length argument for `count` requests or tokens with topk indices each, or None if `lengths` is None.

    lengths: "drawn": 0 to topk; "zeros": 0 for about half; "edges": lengths around a tile, too large ones and negative ones, in
    turn from number `shift` on; a tuple: these lengths.
    """
    draw = random.Random(seed)
    match lengths:
        case "drawn":
            return tuple(draw.randint(0, topk) for _ in range(count))
        case "zeros":
            return tuple(0 if index == 0 or draw.random() < 0.5 else draw.randint(1, topk) for index in range(count))
        case "edges":
            return tuple(_EDGES[(index + shift) % len(_EDGES)] for index in range(count))
        case fixed:
            return fixed


def clip_topk_lengths(lengths: tuple[int, ...] | None, count: int, topk: int) -> tuple[int, ...]:
    """Return how many indices the kernel uses for each of `count` requests or tokens; lengths: the topk_length argument."""
    return tuple(min(max(length, 0), topk) for length in ((topk,) * count if lengths is None else lengths))


def draw_key_positions(indices: Indices, row: int, keys: int, topk: int, *, ordered: bool, kinds: int, draw: torch.Generator) -> Tensor:
    """Draw the keys that a token attends to, int64 [topk]: positions of keys, or -1 - kind for an invalid value, kind < `kinds`.

    indices: "valid": without repetition; "mixed": a fifth of them invalid, a tenth of them repeated; "none": all -1.
    row: the token's number. With "mixed" row % 5 selects where whole tiles of invalid values lie: nowhere, at the front, in the
    middle, everywhere, or in the second half. ordered: positions ascend, repeated ones excepted.
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


def encode_indices(positions: Tensor, slots: Tensor, invalid: tuple[int, ...]) -> Tensor:
    """Map positions of draw_key_positions to int32 indices: slots[position], int64, or the invalid value of that kind."""
    valid = positions >= 0
    if not valid.any():
        slots = torch.zeros(1, dtype=torch.int64)
    values = slots[torch.where(valid, positions, 0)]
    return torch.where(valid, values, torch.tensor(invalid)[torch.where(valid, 0, -1 - positions)]).int()


def lay_out_indices(indices: Tensor, layout: IndexLayout, device: torch.device) -> Tensor:
    """Return indices int32 [b, s_q, topk] in their layout on a device.

    layout: "odd": rows aligned to one element, between indices of valid keys; a FarDimension: far in that dimension.
    """
    if layout == "packed":
        return indices.to(device)
    if layout != "odd":
        return far_tensor(indices.shape, FAR_DIMENSIONS.index(layout), torch.int32, device).copy_(indices)
    storage = torch.zeros(*indices.shape[:2], indices.shape[2] + 3, dtype=torch.int32, device=device)
    storage[..., 1:-2] = indices
    return storage[..., 1:-2]


def draw_sinks(sinks: Sinks, h_q: int, seed: int, device: torch.device) -> Tensor | None:
    """Draw attention sinks, fp32 [h_q].

    sinks: "none": no tensor; "drawn": N(0, 3); "infinite": like "drawn", but every three heads include one with +inf and one with -inf.
    """
    if sinks == "none":
        return None
    values = 3 * torch.randn(h_q, generator=torch.Generator().manual_seed(seed + 3))
    if sinks == "infinite":
        values[0::3], values[1::3] = float("inf"), float("-inf")
    return values.to(device)
