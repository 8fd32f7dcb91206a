"""Rows of the indexer in plain torch: the rule that the kernels of index_write follow bit for bit, on devices without kernels too.

Operations are rounded and sums ordered as in norm_rope.py.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..spec.cache_rows import E4M3_MAX
from ..spec.index_write import HADAMARD_SCALE, LEAST_AMAX, ROTARY, Rope
from ..spec.mqa_logits import COLUMNS
from .cache_codec import power_of_two_scales, to_e4m3, to_e8m0
from .norm_rope import column_sum, inverse_root, rotated


class IndexRows(NamedTuple):
    """Quantised rows. codes: uint8 [.., 128], e4m3. scales: fp32 [..], powers of two; NaN for a row that is not finite."""

    codes: torch.Tensor
    scales: torch.Tensor


def layer_norm(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return LayerNorm of rows [.., 128] in fp32, with weight and bias fp32 [128]."""
    distances = rows.float() - (column_sum(rows.float()) / COLUMNS).unsqueeze(-1)
    variance = column_sum(distances * distances) / COLUMNS
    inverse = inverse_root(variance + eps)
    return distances * inverse.unsqueeze(-1) * weight + bias


def transformed(rows: torch.Tensor) -> torch.Tensor:
    """Multiply fp32 rows [.., 128] with Hadamard's matrix in natural order, times 128^-1/2: butterflies at distances 1, 2, 4, .., 64."""
    step = 1
    while step < rows.shape[-1]:
        low, high = rows.unflatten(-1, (-1, 2, step)).unbind(-2)
        rows = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        step *= 2
    return rows * HADAMARD_SCALE


def prepared(rows: torch.Tensor, angles: torch.Tensor, rope: Rope, hadamard: bool) -> IndexRows:
    """Rotate, transform if `hadamard`, and quantise rows [tokens, .., 128]. angles: as in norm_rope.rotated."""
    values = rows.float()
    values = torch.cat((rotated(values[..., :ROTARY], angles, rope == "half_split"), values[..., ROTARY:]), dim=-1)
    if hadamard:
        values = transformed(values)
    amax = values.abs().amax(dim=-1)
    scales = power_of_two_scales(amax.clamp_min(LEAST_AMAX) / E4M3_MAX)
    scales = torch.where(values.isfinite().all(dim=-1), scales, float("nan"))
    return IndexRows(to_e4m3(values / scales.unsqueeze(-1)), scales)


def write_index_rows(rows: IndexRows, index_cache: torch.Tensor, slots: torch.Tensor, exponents: bool) -> None:
    """Write keys [tokens, 128] to their slots, int64 or int32 [tokens], in an index cache uint8 [pages, page size, 1, 132].

    Slots outside the cache are skipped; the others are distinct. exponents: scales are four equal e8m0 bytes, not fp32. Nothing waits for
    the device.
    """
    pages, page_size = index_cache.shape[:2]
    scales = to_e8m0(rows.scales).unsqueeze(-1).expand(-1, 4) if exponents else _bytes_of(rows.scales)
    written = (slots >= 0) & (slots < pages * page_size)
    # As in cache_torch.write_rows: a skipped token repeats a written one, or all write back what slot 0 holds.
    source = torch.where(written, torch.arange(slots.shape[0], device=slots.device), written.int().argmax())
    places = torch.where(written.any(), slots.long()[source], 0)
    page, row = places // page_size, places % page_size
    page_rows = index_cache.as_strided((pages, page_size * index_cache.shape[3]), (index_cache.stride(0), 1))
    for width, first, values in ((COLUMNS, 0, rows.codes), (4, page_size * COLUMNS, scales)):
        columns = first + row.unsqueeze(1) * width + torch.arange(width, device=slots.device)
        where = (page.unsqueeze(1), columns)
        page_rows[where] = torch.where(written.any(), values[source], page_rows[where])


def _bytes_of(scales: torch.Tensor) -> torch.Tensor:
    """Return the bytes of fp32 [tokens], uint8 [tokens, 4]; NaN as GPUs and kernels write it."""
    bits = torch.where(scales.isnan(), 0x7FC00000, scales.contiguous().view(torch.int32)).int()
    return bits.unsqueeze(-1).view(torch.uint8)
