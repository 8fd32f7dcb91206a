"""Factors of the keys without rotary embedding and of the values: projections to a common latent, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Factors(NamedTuple):
    """Low-rank factors, fp64: keys are about up_k @ down, values about up_v @ down.

    down: [rank, inputs]; up_k, up_v: [KV heads * head_dim, rank]
    loss: share of the energy that the rank drops, 0 to 1
    """

    down: Tensor
    up_k: Tensor
    up_v: Tensor
    loss: float


def balanced(k: Tensor, v: Tensor, metric: Tensor, rank: int) -> Factors:
    """Factorise keys and values together, by the principal components of their outputs (TransMLA, arXiv 2502.07864).

    k, v: fp64 [KV heads * head_dim, inputs]. metric: calibration.root. Keys are divided by the ratio of the mean sizes of key columns and
    value columns, so that the larger of the two does not take all of the rank.
    """
    size_k, size_v = (float((each @ metric).norm(dim=1).mean()) for each in (k, v))
    ratio = size_k / size_v if size_k > 0 and size_v > 0 else 1.0
    return _factorise(k, v, metric, rank, ratio)


def joint(k: Tensor, v: Tensor, rank: int) -> Factors:
    """Factorise the matrices of keys and values together, without calibration (MHA2MLA, arXiv 2502.14837)."""
    return _factorise(k, v, torch.eye(k.shape[1], dtype=k.dtype), rank, 1.0)


def split(k: Tensor, v: Tensor, rank: int) -> Factors:
    """Factorise the matrices of keys and of values apart, each with half of the rank (MHA2MLA, arXiv 2502.14837)."""
    none, rank_k = v[:0], rank // 2
    keys, values = joint(k, none, rank_k), joint(none, v, rank - rank_k)
    up_k = torch.cat((keys.up_k, k.new_zeros(len(k), len(values.down))), dim=1)
    up_v = torch.cat((v.new_zeros(len(v), len(keys.down)), values.up_v), dim=1)
    energy_k, energy_v = float(k.square().sum()), float(v.square().sum())
    loss = (keys.loss * energy_k + values.loss * energy_v) / max(energy_k + energy_v, 1e-300)
    return Factors(torch.cat((keys.down, values.down)), up_k, up_v, loss)


def _factorise(k: Tensor, v: Tensor, metric: Tensor, rank: int, ratio: float) -> Factors:
    """Factorise [k / ratio; v] by the singular value decomposition of its outputs."""
    both = torch.cat((k / ratio, v))
    basis, sizes, _ = torch.linalg.svd(both @ metric, full_matrices=False)
    basis = basis[:, :rank]
    energy = sizes.square()
    loss = float(energy[rank:].sum() / energy.sum().clamp(min=1e-300))
    return Factors(basis.T @ both, basis[: len(k)] * ratio, basis[len(k) :], loss)
