"""Keys and queries of the indexer in e4m3, and its cache: plain torch, on any device, without synchronisation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import layer_norm

from ..ops.cache_codec import to_e4m3
from ..spec.cache_rows import E4M3_MAX
from ..spec.mqa_logits import COLUMNS, ROW_BYTES
from .rope import Rotation

LEAST_AMAX = 1e-4  # as in the quantisers of DeepSeek and DeepGEMM


class IndexRows(NamedTuple):
    """Rows of the indexer: values float8_e4m3fn [.., 128] and their scales, fp32 [..], powers of two."""

    values: torch.Tensor
    scales: torch.Tensor


class KeyNorm(NamedTuple):
    """LayerNorm of keys: weight and bias [128], and epsilon."""

    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float


def index_keys(projected: torch.Tensor, norm: KeyNorm, rope: Rotation, interleave: bool) -> IndexRows:
    """Normalise, rotate and quantise projected keys [tokens, 128]; in fp32 until e4m3."""
    keys = layer_norm(projected.float(), (COLUMNS,), norm.weight.float(), norm.bias.float(), norm.epsilon)
    return quantised_rows(keys, rope, interleave)


def quantised_rows(rows: torch.Tensor, rope: Rotation, interleave: bool) -> IndexRows:
    """Rotate the first columns of fp32 rows [tokens, .., 128] and quantise each row by its own scale.

    The scale is the least power of two not below max(amax, 1e-4) / 448, so that it multiplies logits exactly (DeepGEMM,
    utils/math.py: per_custom_dims_cast_to_fp8 with use_ue8m0).
    """
    rotary = 2 * rope.cos.shape[1]
    turned = torch.cat((rope.apply(rows[..., :rotary], interleave), rows[..., rotary:]), dim=-1)
    mantissa, exponent = torch.frexp(turned.abs().amax(dim=-1).clamp(min=LEAST_AMAX) / E4M3_MAX)
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    scales = torch.where(mantissa.isfinite(), scales, torch.nan)
    return IndexRows(to_e4m3(turned / scales.unsqueeze(-1)).view(torch.float8_e4m3fn), scales)


def write_index_rows(rows: IndexRows, index_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys [tokens] to their slots, int64 or int32 [tokens], in an index cache uint8 [pages, page size, 1, 132].

    Slots outside the cache are skipped; the others are distinct.
    """
    values, scales = _pages(index_cache)
    pages, page_size = index_cache.shape[:2]
    if not pages * page_size or not slots.shape[0]:
        return
    inside = (slots >= 0) & (slots < pages * page_size)
    # Only the device knows which tokens are skipped. A skipped token repeats a written one; where all are, slot 0 keeps its bytes.
    source = torch.where(inside, torch.arange(slots.shape[0], device=slots.device), inside.int().argmax())
    place = torch.where(inside.any(), slots.long()[source], 0)
    where = (place // page_size, place % page_size)
    for stored, given in ((values, rows.values.view(torch.uint8)), (scales, rows.scales.unsqueeze(-1).view(torch.uint8))):
        stored[where] = torch.where(inside.any(), given[source], stored[where])


def gather_index_rows(index_cache: torch.Tensor, slots: torch.Tensor) -> IndexRows:
    """Return the keys at slots, int64 [keys]; values and scales of slots outside the cache are 0."""
    pages, page_size = index_cache.shape[:2]
    inside = (slots >= 0) & (slots < pages * page_size)
    if not pages * page_size:
        empty = index_cache.new_zeros(slots.shape[0], ROW_BYTES)
        return IndexRows(empty[:, :COLUMNS].view(torch.float8_e4m3fn), empty[:, COLUMNS:].contiguous().view(torch.float32).squeeze(1))
    place = torch.where(inside, slots, 0)
    where = (place // page_size, place % page_size)
    values, scales = (torch.where(inside.unsqueeze(1), part[where], 0) for part in _pages(index_cache))
    return IndexRows(values.view(torch.float8_e4m3fn), scales.view(torch.float32).squeeze(1))


def _pages(index_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 views of an index cache: values [pages, page size, 128] and scales [pages, page size, 4]."""
    page_size = index_cache.shape[1]
    values, scales = index_cache.view(torch.uint8).flatten(1).split([page_size * COLUMNS, page_size * (ROW_BYTES - COLUMNS)], dim=1)
    return values.unflatten(1, (page_size, COLUMNS)), scales.unflatten(1, (page_size, ROW_BYTES - COLUMNS))
