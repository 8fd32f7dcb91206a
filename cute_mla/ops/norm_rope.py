"""Norm and rotation of keys and queries in plain torch: the rule that the kernels of cache_insert and index_write follow bit for bit.

Every addition, multiplication, division and root is rounded to fp32 by itself. A sum over columns adds neighbours, then neighbouring sums,
and so on.
"""

from __future__ import annotations

import torch

from ..spec.mla import D_ROPE

_NAN = 0x7FFF


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return fp32 values in a dtype, rounded to nearest even; in 16 bits NaN is 0x7FFF, as GPUs round it, unless gradients flow."""
    narrow = values.to(dtype)
    if dtype == torch.float32 or narrow.requires_grad:
        return narrow
    return narrow.view(torch.int16).masked_fill(narrow.isnan(), _NAN).view(dtype)


def column_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sums of fp32 [.., columns], as many as a power of two, over neighbours, then over neighbouring sums, and so on."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values.squeeze(-1)


def inverse_root(values: torch.Tensor) -> torch.Tensor:
    """Return 1 / sqrt(value) of fp32 numbers: the root and the quotient each rounded to nearest.

    Through fp64, which does not change the rounding: torch's fp32 root on a CPU errs in the last bit (MKL).
    """
    return (1 / values.double().sqrt().float().double()).float()


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return RMSNorm of rows [.., columns] with a weight [columns], computed in fp32 and rounded once to the dtype of the rows.

    torch.nn.functional.rms_norm is the same but for the order of the sum.
    """
    values = rows.float()
    inverse = inverse_root(column_sum(values * values) / rows.shape[-1] + eps)
    return rounded(values * inverse.unsqueeze(-1) * weight.float(), rows.dtype)


def angles_at(cos_sin: torch.Tensor, positions: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Return the rows of cos_sin for tokens, fp32 [tokens, 64]: NaN for a position that it lacks. positions None: 0, 1, .."""
    places = torch.arange(tokens, device=cos_sin.device) if positions is None else positions.long()
    known = (places >= 0) & (places < len(cos_sin))
    padded = torch.cat((cos_sin, cos_sin.new_full((1, D_ROPE), float("nan"))))
    return padded[torch.where(known, places, len(cos_sin))]


def rotated(columns: torch.Tensor, angles: torch.Tensor, half_split: bool = False) -> torch.Tensor:
    """Rotate columns [tokens, .., 64] in fp32, rounded once to their dtype.

    angles: fp32 [tokens, 64], the cosines of 32 pairs, then their sines. A pair is columns 2i and 2i + 1; i and i + 32 if half_split.
    """
    cos, sin = angles.view(len(columns), *[1] * (columns.dim() - 2), D_ROPE).chunk(2, dim=-1)
    values = columns.float()
    first, second = values.chunk(2, dim=-1) if half_split else values.unflatten(-1, (-1, 2)).unbind(-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    both = torch.cat(turned, dim=-1) if half_split else torch.stack(turned, dim=-1).flatten(-2)
    return rounded(both, columns.dtype)
