"""Masks of keys for dense prefill, made from the rows that tokens choose: plain torch, on any device, without synchronisation."""

from __future__ import annotations

import torch

from ..spec.masked_prefill import MASK_WORD_KEYS
from ..spec.mla import ceil_div
from .selection import ChosenKeys

_BYTES_AT_ONCE = 1 << 26  # of what is made on the way, about
_BYTES_PER_INDEX = 16  # of an index on the way: int32 before and after a choice, and int64
_WORD_BYTES = 4
_BYTES_PACKED = 8
# times eight bytes of 0 or 1, as an int64 number: bit i of its highest byte is byte i
_PACK = 0x0102040810204080


def mask_of_rows(chosen: ChosenKeys, firsts: torch.Tensor, keys: int) -> torch.Tensor:
    """Return the mask that shows each token the rows that it chooses: int32 [tokens, ceil(keys / 32)], rows two words further apart.

    chosen: of prefill requests; -1, rows beyond the count and rows outside a token's keys are left out; a row that is chosen twice counts
    once. firsts: int32 [tokens], the row of a token's key 0; keys: after it, at most. Tokens are taken so many at a time that what is made
    on the way stays near 64 MB.
    """
    tokens, words = len(firsts), ceil_div(keys, MASK_WORD_KEYS)
    indices = chosen.indices.flatten(1)
    padded = torch.empty(tokens, words + 2, dtype=torch.int32, device=firsts.device)  # a word for rows before, and one for rows behind
    at_once = max(_BYTES_AT_ONCE // (padded.shape[1] * MASK_WORD_KEYS + _BYTES_PER_INDEX * indices.shape[1]), 1)
    for first in range(0, tokens, at_once):
        own = slice(first, first + at_once)
        columns = indices[own] - (firsts[own] - MASK_WORD_KEYS).unsqueeze(1)
        counted = torch.arange(indices.shape[1], device=firsts.device) < chosen.counts[own].unsqueeze(1)
        columns = torch.where(counted & (indices[own] >= 0), columns, 0).clamp_(0, padded.shape[1] * MASK_WORD_KEYS - 1)
        flags = torch.zeros(len(columns), padded.shape[1] * MASK_WORD_KEYS, dtype=torch.uint8, device=firsts.device)
        padded[own] = pack_flags(flags.scatter_(1, columns.long(), 1))
    return padded[:, 1:-1]


def pack_flags(flags: torch.Tensor) -> torch.Tensor:
    """Return bits of flags, int32 [rows, columns / 32]: bit j % 32 of word j / 32 is flag j.

    flags: uint8 [rows, columns], contiguous, 0 or 1, a multiple of 32 columns; they are overwritten.
    """
    octets = flags.view(torch.int64).mul_(_PACK).view(torch.uint8)[:, _BYTES_PACKED - 1 :: _BYTES_PACKED]
    return octets.contiguous().view(torch.int32)
