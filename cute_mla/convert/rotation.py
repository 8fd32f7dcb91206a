"""Rotary part of the keys: which combination of the heads' pairs each of DeepSeek's 32 rotary pairs holds.

A pair of columns of a head is a complex number z = x + iy, which the rotary embedding turns: z e^(i m theta) at position m. A score is the
real part of the sum of conj(q) z over pairs. DeepSeek's heads share one rotary key of 32 pairs, its slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec.mla import D_ROPE
from .options import ConvertOptions
from .source import SourceConfig

SLOTS = D_ROPE // 2
_LEAST_WEIGHT = 1e-8  # of the largest, for the keys of queries that are zero


class Pairs(NamedTuple):
    """Rows of the projections as complex numbers, complex128: q [heads, pairs, inputs], k [KV heads, pairs, inputs]. Inputs may end in a 1.

    sizes: root mean square of the pairs of q over the calibration tokens, fp64 [heads, pairs].
    metric: fp64 [inputs, inputs], see calibration.root.
    """

    q: Tensor
    k: Tensor
    sizes: Tensor
    metric: Tensor

    @staticmethod
    def of(q: Tensor, k: Tensor, config: SourceConfig, metric: Tensor) -> Pairs:
        """Read the rows of q [heads * head_dim, inputs] and k, whose columns i and i + head_dim / 2 of a head are a pair."""
        queries, keys = (torch.complex(*each.double().unflatten(0, (-1, 2, config.pairs)).unbind(1)) for each in (q, k))
        return Pairs(queries, keys, root_mean_square(queries, metric), metric)

    @property
    def weights(self) -> Tensor:
        """Return the root of the energy of the queries that meet a KV head's pair, fp64 [KV heads, pairs]."""
        return self.sizes.square().unflatten(0, (len(self.k), -1)).sum(1).sqrt()


@dataclass(frozen=True)
class Rotation:
    """Mapping of pairs to slots, and what is left for the latent.

    gather: complex128 [slots, KV heads, pairs]: a slot's key is the sum of gather * z
    spread: complex128 [KV heads, slots, pairs]: a slot's query of a head is the sum of spread * q over its pairs
    theta: base of the frequencies of the slots
    """

    gather: Tensor
    spread: Tensor
    theta: float

    def rotary_keys(self, pairs: Pairs) -> Tensor:
        """Return the keys of the slots, complex128 [slots, inputs]."""
        return torch.einsum("sgp,gpi->si", self.gather, pairs.k)

    def rotary_queries(self, pairs: Pairs) -> Tensor:
        """Return the queries of the slots, complex128 [heads, slots, inputs]."""
        by_group = pairs.q.unflatten(0, (len(pairs.k), -1))
        return torch.einsum("gsp,ghpi->ghsi", self.spread, by_group).flatten(0, 1)

    def rest(self, pairs: Pairs) -> Tensor:
        """Return what the slots do not hold of the keys, complex128 [KV heads, pairs, inputs]."""
        return pairs.k - torch.einsum("gsp,si->gpi", self.spread.conj(), self.rotary_keys(pairs))


class Chosen(NamedTuple):
    """Rotation of a layer, the keys that it leaves, and its loss: their share of the energy of scores, 0 to 1.

    fold: neighbouring frequencies that are treated as one.
    """

    rotation: Rotation
    rest: Tensor
    loss: float
    fold: int


def root_mean_square(rows: Tensor, metric: Tensor) -> Tensor:
    """Return the root mean square of the outputs of complex rows [.., inputs] over the calibration tokens, fp64 [..]."""
    flat = rows.reshape(-1, rows.shape[-1])
    square = (flat.real @ metric).square().sum(-1) + (flat.imag @ metric).square().sum(-1)
    return square.sqrt().view(rows.shape[:-1])


def choose(pairs: Pairs, config: SourceConfig, options: ConvertOptions, tolerance: float) -> Chosen:
    """Return the rotation of a layer by the method of the options. tolerance: loss up to which it is exact; such a rest is set to zero."""
    if options.method == "mha2mla":
        return _judge(owned(pairs, config, options.strategy), pairs, 1, tolerance)
    for fold in (1, 2 * _stride(config)) if options.fold is None else (options.fold,):
        chosen = _judge(principal(pairs, config, fold, options.rotation), pairs, fold, tolerance)
        if not chosen.loss:
            break
    return chosen


def _judge(rotation: Rotation, pairs: Pairs, fold: int, tolerance: float) -> Chosen:
    """Return the rotation with its loss. A rest that the queries do not see is set to zero."""
    rest, weights = rotation.rest(pairs), pairs.weights
    left, whole = ((weights * root_mean_square(keys, pairs.metric)).square().sum() for keys in (rest, pairs.k))
    loss = float(left / whole) if whole > 0 else 0.0
    return Chosen(rotation, torch.zeros_like(rest), 0.0, fold) if loss <= tolerance else Chosen(rotation, rest, loss, fold)


def _stride(config: SourceConfig) -> int:
    """Return the pairs of a head for each slot: the frequency of slot s is that of pair stride * s."""
    return config.pairs // SLOTS


def check_fold(fold: int | None, config: SourceConfig) -> None:
    """Raise ValueError unless `fold` is 1 or divides the pairs of a head into groups that fill whole slots."""
    stride = _stride(config)
    known = sorted({1, *(each for each in range(stride, config.pairs + 1, stride) if config.pairs % each == 0)})
    if fold is not None and fold not in known:
        raise ValueError(f"fold is {fold} with head_dim {config.head_dim}; supported: {', '.join(map(str, known))}")


def principal(pairs: Pairs, config: SourceConfig, fold: int, kind: str) -> Rotation:
    """Return the rotation of TransMLA: principal components over the KV heads at each frequency, or at `fold` neighbouring ones.

    A matrix that mixes the pairs of one frequency commutes with their rotation if it is complex linear. kind: "complex", unitary with
    weighted keys, minimises the error of the scores; "real", orthogonal without weights, is the published step (arXiv 2502.07864).
    """
    kv_heads, stride = config.num_key_value_heads, _stride(config)
    step = max(fold, stride)  # pairs of a group, of which the first `fold` are mixed
    weights = _floored(pairs.weights) if kind == "complex" else torch.ones_like(pairs.weights)
    weighted = (weights.unsqueeze(-1) * pairs.k).unflatten(1, (-1, step))[:, :, :fold]  # [KV heads, groups, fold, inputs]
    entries = weighted.transpose(0, 1).flatten(1, 2)  # [groups, KV heads * fold, inputs]
    outputs = torch.complex(entries.real @ pairs.metric, entries.imag @ pairs.metric)
    if kind == "real":
        basis = torch.linalg.svd(torch.cat((outputs.real, outputs.imag), dim=-1), full_matrices=False).U.to(torch.complex128)
    else:
        basis = torch.linalg.svd(outputs, full_matrices=False).U
    kept = basis[..., : step // stride].conj().unflatten(1, (kv_heads, fold))  # [groups, KV heads, fold, slots of a group]
    mixed = torch.zeros(len(kept), step // stride, kv_heads, config.pairs, dtype=torch.complex128)
    for group, components in enumerate(kept):
        mixed[group, ..., group * step : group * step + fold] = components.permute(2, 0, 1)
    mixed = mixed.flatten(0, 1)
    return Rotation(mixed * weights, (mixed / weights).transpose(0, 1), config.rope_theta)


def owned(pairs: Pairs, config: SourceConfig, strategy: str) -> Rotation:
    """Return the rotation of MHA2MLA: each slot holds a pair of one KV head, at the pair's own frequency (arXiv 2502.14837).

    By 2-norm, a slot belongs to the KV head for which the product of the sizes of queries and keys, a bound of the pair's scores, is
    largest. Sizes are root mean squares.
    """
    bound = pairs.sizes.unflatten(0, (len(pairs.k), -1)).sum(1) * root_mean_square(pairs.k, pairs.metric)
    kept = torch.arange(SLOTS) * (1 if strategy == "high" else _stride(config))
    owners = bound[:, kept].argmax(dim=0)
    mixed = torch.zeros(SLOTS, config.num_key_value_heads, config.pairs, dtype=torch.complex128)
    mixed[torch.arange(SLOTS), owners, kept] = 1
    return Rotation(mixed, mixed.transpose(0, 1), slot_theta(config, strategy))


def check_strategy(config: SourceConfig, strategy: str) -> None:
    """Raise ValueError if DeepSeek's one rotary key of 32 pairs cannot hold the pairs of a strategy of MHA2MLA, with the reason."""
    kv_heads = config.num_key_value_heads
    if strategy != "2-norm" and kv_heads > 1:
        raise ValueError(
            f"strategy is {strategy!r} with {kv_heads} KV heads, each of which keeps the same frequencies; DeepSeek's heads share one "
            "rotary key, which has a frequency once; supported: 2-norm, where each frequency goes to one KV head"
        )
    if strategy == "low" and config.pairs > SLOTS:
        raise ValueError(
            f"strategy is 'low' with head_dim {config.head_dim}; the slowest pairs start at another frequency than 1, which no rope_theta "
            "gives; supported: 2-norm, high, uniform"
        )


def slot_theta(config: SourceConfig, strategy: str | None = None) -> float:
    """Return the rope_theta of the slots: that of the source, but its root where the fastest half of the pairs is kept."""
    return math.sqrt(config.rope_theta) if strategy == "high" and config.pairs > SLOTS else config.rope_theta


def _floored(weights: Tensor) -> Tensor:
    """Return weights of at least 1e-8 of the largest; ones if all are zero."""
    most = float(weights.max())
    return weights.clamp(min=_LEAST_WEIGHT * most) if most > 0 else torch.ones_like(weights)
