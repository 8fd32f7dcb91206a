"""Rotary position embedding over pairs of neighbouring columns, with YaRN or the scaling of Llama 3.1."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .config import Llama3Scaling, MlaConfig, YarnScaling


class Rotation(NamedTuple):
    """Rotation of some tokens: fp32 cosines and sines [tokens, pairs], YaRN's scale of rotary columns included.

    query_scale: fp32 [tokens], what queries are multiplied with; None for 1. log_positions: fp32 [tokens], ln(position + 1), where
    queries of attention or of an indexer are scaled by it.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    query_scale: torch.Tensor | None = None
    log_positions: torch.Tensor | None = None

    @property
    def cos_sin(self) -> torch.Tensor:
        """Return cosines, then sines: fp32 [tokens, 2 * pairs]."""
        return torch.cat((self.cos, self.sin), dim=1)

    def scale_heads(self, q: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Multiply queries [tokens, heads, columns] of head h at position p by scale[h] * ln(p + 1) + bias[h]; rounded once."""
        if self.log_positions is None:
            raise ValueError("the rotation has no log_positions; supported: that of a config whose queries are scaled by their position")
        factors = self.log_positions.unsqueeze(1) * scale.float() + bias.float()
        return (q * factors.unsqueeze(2)).to(q.dtype)

    def unless_empty(self, pairs: int) -> Rotation:
        """Return this rotation, or where it has no columns one that leaves so many pairs as they are."""
        if self.cos.shape[1]:
            return self
        shape = (self.cos.shape[0], pairs)
        return self._replace(cos=self.cos.new_ones(shape), sin=self.sin.new_zeros(shape))

    def apply(self, columns: torch.Tensor) -> torch.Tensor:
        """Rotate rotary columns [tokens, .., 64 or 0], whose columns 2i and 2i + 1 are a pair; rounded once, to their dtype."""
        if not columns.shape[-1]:
            return columns
        by_token = (*self.cos.shape[:1], *[1] * (columns.dim() - 2), *self.cos.shape[1:])
        cos, sin = self.cos.view(by_token), self.sin.view(by_token)
        even, odd = columns.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(columns.dtype)


def frequencies(config: MlaConfig) -> torch.Tensor:
    """Return the radians per position of each pair of columns, fp32 [pairs]."""
    columns, theta = config.qk_rope_head_dim, config.rope_theta
    if config.mla_use_nope:
        return torch.zeros(columns // 2)
    if isinstance(config.rope_scaling, YarnScaling):
        return _stretched(config.rope_scaling, columns, theta)
    return pair_frequencies(columns, theta, config.rope_scaling)


def pair_frequencies(columns: int, theta: float, scaling: Llama3Scaling | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the radians per position of each pair of columns, [pairs], with the scaling of Llama 3.1 if there is one.

    The scaling is that of transformers' _compute_llama3_parameters (modeling_rope_utils.py): a share of each frequency stays, from 0 at
    low_freq_factor turns within the original context to 1 at high_freq_factor turns, and the rest is divided by the factor.
    """
    plain = theta ** (-2 * torch.arange(columns // 2, dtype=dtype) / max(columns, 1))
    if scaling is None:
        return plain
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    share = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return plain * share + plain / scaling.factor * (1 - share)


def _stretched(yarn: YarnScaling, columns: int, theta: float) -> torch.Tensor:
    """Return the frequencies of YaRN, fp32 [pairs]."""
    plain = pair_frequencies(columns, theta, None)
    first, last = _ramp(yarn, columns, theta)
    stretched = ((torch.arange(columns // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return plain * (1 - stretched) + plain / yarn.factor * stretched


def rotation(positions: torch.Tensor, radians: torch.Tensor, config: MlaConfig) -> Rotation:
    """Return the rotation of tokens at integer positions [tokens]. radians: from frequencies(), on the same device."""
    angles = positions.float().unsqueeze(1) * radians
    scaling = config.rope_scaling
    scale = 1.0 if scaling is None else scaling.rotary_scale
    return Rotation(
        angles.cos() * scale,
        angles.sin() * scale,
        _query_scale(positions, scaling) if isinstance(scaling, YarnScaling) else None,
        (positions + 1).float().log() if config.scales_by_position else None,
    )


def _query_scale(positions: torch.Tensor, yarn: YarnScaling) -> torch.Tensor | None:
    """Return what queries at these positions are multiplied with, fp32 [tokens]; None for 1."""
    if not yarn.llama_4_scaling_beta:
        return None
    contexts = positions.div(yarn.original_max_position_embeddings, rounding_mode="floor")
    return 1 + yarn.llama_4_scaling_beta * contexts.float().log1p()


def interleaved(rows: torch.Tensor) -> torch.Tensor:
    """Reorder the rows of a projection to rotary columns [.., 64 or 0, columns]: pairs i and i + 32 become pairs 2i and 2i + 1."""
    if not rows.shape[-2]:
        return rows
    halves = rows.unflatten(-2, (2, -1))
    return halves.transpose(-3, -2).flatten(-3, -2)


def halved(rows: torch.Tensor) -> torch.Tensor:
    """Reorder rotary columns back: the inverse of interleaved()."""
    return rows.unflatten(-2, (-1, 2)).transpose(-3, -2).flatten(-3, -2) if rows.shape[-2] else rows


def _ramp(yarn: YarnScaling, columns: int, theta: float) -> tuple[float, float]:
    """Return the pair up to which frequencies stay as they are, and the pair from which on they are divided by YaRN's factor."""

    def pair_that_turns(times: float) -> float:
        length = yarn.original_max_position_embeddings / (2 * math.pi * times)
        return columns * math.log(length) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(yarn.beta_slow)), columns - 1)
    return first, max(last, first + 0.001)  # a step if both pairs are the same
