"""Random operands of benchmark rows: values, page orders and selections. Equal seeds give equal tensors."""

from __future__ import annotations

import math

import torch

from cute_mla.layer.key_masks import pack_flags
from cute_mla.spec.masked_prefill import MASK_WORD_KEYS
from cute_mla.spec.mla import D_ROPE, ceil_div
from cute_mla.spec.mqa_logits import COLUMNS, SCALE_BYTES

VALUE_DEVIATION = 0.1  # standard deviation of values, which are clamped to [-1, 1]
_MOST_DRAWS = 1 << 26  # random numbers sorted at a time
_KEYS_AT_A_TIME = 1 << 20  # whose exact numbers are drawn together
_MOST = 4  # halves: exact numbers are 0, 0.5, .. 2, and their negatives


def generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a seeded random generator on a device."""
    return torch.Generator(device=device).manual_seed(seed)


def values(draw: torch.Generator, dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Draw N(0, 0.1) clamped to [-1, 1], on the generator's device. Zeros would run faster."""
    made = torch.empty(size, dtype=dtype, device=draw.device)
    return made.normal_(0.0, VALUE_DEVIATION, generator=draw).clamp_(-1.0, 1.0)


def random_slots(draw: torch.Generator, tokens: int, page_size: int) -> torch.Tensor:
    """Draw int64 [tokens]: different slots of a cache just large enough for the tokens."""
    return torch.randperm(ceil_div(tokens, page_size) * page_size, generator=draw, device=draw.device)[:tokens]


def angle_table(draw: torch.Generator, positions: int) -> torch.Tensor:
    """Return fp32 [positions, 64]: cosines of 32 random angles of each position, then their sines."""
    angles = torch.empty(positions, D_ROPE // 2, device=draw.device).uniform_(0, 2 * math.pi, generator=draw)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def selections(draw: torch.Generator, tokens: int, count: int, rows: int) -> torch.Tensor:
    """Draw int32 [tokens, count]: for each token `count` distinct row indices below `rows`, in random order. count <= rows."""
    chosen = torch.empty(tokens, count, dtype=torch.int32, device=draw.device)
    step = max(_MOST_DRAWS // max(rows, 1), 1)
    for first in range(0, tokens, step):
        here = chosen[first : first + step]
        here.copy_(torch.rand(len(here), rows, generator=draw, device=draw.device).argsort(dim=-1)[:, :count])
    return chosen


def shown_keys(draw: torch.Generator, seen: torch.Tensor, keys: int, count: int) -> torch.Tensor:
    """Draw a mask of keys, int32 [tokens, ceil(keys / 32)], that shows each token `count` of the keys that it sees, or all of them.

    seen: int64 [tokens] on the generator's device, the first keys of its sequence that a token sees. Further bits are arbitrary.
    """
    words = ceil_div(keys, MASK_WORD_KEYS)
    mask = torch.empty(len(seen), words, dtype=torch.int32, device=draw.device)
    step = max(_MOST_DRAWS // max(keys, 1), 1)
    for first in range(0, len(seen), step):
        here = seen[first : first + step].unsqueeze(1)
        order = torch.rand(len(here), keys, generator=draw, device=draw.device)
        order += torch.arange(keys, device=draw.device) >= here
        flags = torch.zeros(len(here), words * MASK_WORD_KEYS, dtype=torch.uint8, device=draw.device)
        mask[first : first + step] = pack_flags(flags.scatter_(1, order.argsort(dim=-1)[:, :count], 1))
    return mask


def page_order(device: torch.device, pages: int, seed: int) -> torch.Tensor:
    """Draw int32 [pages]: the pages of a pool in random order."""
    return torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=torch.int32)


def exact_numbers(draw: torch.Generator, *size: int) -> torch.Tensor:
    """Draw e4m3 [*size, 128]: halves from -2 to 2."""
    made = torch.empty((*size, COLUMNS), dtype=torch.float8_e4m3fn, device=draw.device)
    for first in range(0, size[0], _KEYS_AT_A_TIME):
        here = made[first : first + _KEYS_AT_A_TIME]
        here.copy_(torch.randn(here.shape, generator=draw, device=draw.device).mul_(2).round_().clamp_(-_MOST, _MOST).div_(2))
    return made


def exact_scales(draw: torch.Generator, keys: int) -> torch.Tensor:
    """Draw fp32 [keys]: 1 or 0.5."""
    return 1.0 - torch.randint(0, 2, (keys,), generator=draw, device=draw.device) / 2


def exact_index_cache(draw: torch.Generator, pages: int, page_size: int) -> torch.Tensor:
    """Draw an index cache, uint8 [pages, page size, 1, 132]."""
    numbers = exact_numbers(draw, pages * page_size).view(torch.uint8).view(pages, page_size * COLUMNS)
    scales = exact_scales(draw, pages * page_size).view(torch.uint8).view(pages, page_size * SCALE_BYTES)
    return torch.cat([numbers, scales], dim=1).view(pages, page_size, 1, COLUMNS + SCALE_BYTES)
