"""Sparse attention of the layer by the kernels, on the simulated device of every architecture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.spec.arch import Arch
from tests.layer.dsa_models import TOPK, V3_2
from tests.layer.dsa_steps import SparseSequences
from tests.layer.mla_models import GLM_5, naive
from tests.layer.mla_steps import TOLERANCE

CONTEXTS, ENDS, DECODES = [65, 0, 20], [66, 30, 23], 1  # of a decode, and of two prefills
ROUNDING = {"latent": TOLERANCE[torch.bfloat16], "fp8_656": 0.05}  # of keys of 3 bits of mantissa, against the largest output
SMS = 2


@pytest.mark.parametrize(
    ("model", "cache"),
    [
        pytest.param(V3_2, "latent", id="v3_2"),
        pytest.param(V3_2, "fp8_656", id="v3_2_fp8", marks=pytest.mark.slow),
        pytest.param(GLM_5, "latent", id="glm_5", marks=pytest.mark.slow),
    ],
)
def test_a_mixed_batch_by_the_kernels(model: dict[str, Any], cache: str, arch: Arch) -> None:
    """Both kinds of sparse attention in one step: against the reference over the chosen keys, and the layer's own reference path."""
    sequences = SparseSequences.drawn(model, ENDS, torch.bfloat16, cache)
    sequences.until(CONTEXTS).step([0, 0, 0], 0)
    by_reference = replace(
        sequences, own=replace(sequences.own, k_cache=sequences.own.k_cache.clone()), index_cache=sequences.index_cache.clone()
    )
    with cute_mla.simulate(arch, SMS) as device:
        out, batch = sequences.step(CONTEXTS, DECODES)
    assert device.findings == []
    assert device.launches >= 8  # write, two choices of two launches, plan, decode, gather, prefill
    wanted, other = by_reference.step(CONTEXTS, DECODES)
    assert torch.equal(sequences.own.k_cache.view(torch.uint8), by_reference.own.k_cache.view(torch.uint8))
    assert torch.equal(sequences.index_cache, by_reference.index_cache)
    chosen = sequences.positions(batch)
    assert all(torch.equal(one, same) for one, same in zip(chosen, by_reference.positions(other), strict=True))
    assert (out - wanted).abs().max() <= TOLERANCE[torch.bfloat16] * wanted.abs().max()
    expected = _over(sequences, chosen)
    assert (out - expected).abs().max() <= ROUNDING[cache] * expected.abs().max()


def test_short_requests_and_shared_keys(arch: Arch) -> None:
    """Up to topk keys: dense decode and prefill, and sparse decode where only that reads the cache, by layers with and without indexer."""
    for cache in ("latent", "fp8_656"):
        sequences = SparseSequences.drawn(V3_2, [TOPK, 5], torch.bfloat16, cache)
        sequences.until([TOPK - 2, 3]).step([0, 0], 0)
        with cute_mla.simulate(arch, SMS) as device:
            out, batch = sequences.step([TOPK - 2, 3], 2)
            again = sequences.layer(indexed=False)(torch.cat(sequences.own.new_tokens([TOPK - 2, 3])), sequences.own.k_cache, batch)
        assert device.findings == []
        assert torch.equal(out, again)
        assert (batch.selection.decode is None) == (cache == "latent")
        expected = sequences.own.expected([TOPK - 2, 3])
        assert (out - expected).abs().max() <= ROUNDING[cache] * expected.abs().max()


def _over(sequences: SparseSequences, chosen: list[torch.Tensor]) -> torch.Tensor:
    """Return the step's output by the reference, in which each new token sees the keys that the layer chose for it."""
    own, wanted, first = sequences.own, [], 0
    for states, context in zip(own.hidden, CONTEXTS, strict=True):
        seen = torch.ones(len(states), len(states), dtype=torch.bool).tril()
        for token in range(context, len(states)):
            seen[token] = torch.zeros(len(states), dtype=torch.bool).index_fill_(0, chosen[first], value=True)
            first += 1
        wanted.append(naive(states, own.weights, own.config, seen)[context:])
    return torch.cat(wanted)
