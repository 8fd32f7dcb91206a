"""The layer under torch.compile: one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_mla
from tests.layer.dsa_models import V3_2
from tests.layer.dsa_steps import SparseSequences
from tests.layer.mla_models import V3
from tests.layer.mla_steps import Sequences
from tests.support.compiling import compiled, fresh

assert fresh


def test_a_layer_is_one_graph() -> None:
    """With a decode, a prefill, and one with keys in the cache."""
    contexts, decodes = (3, 0, 2), 1
    sequences = Sequences.drawn(V3, (4, 2, 4), torch.bfloat16).with_context(contexts)
    layer, hidden = sequences.layer(), torch.cat(sequences.new_tokens(contexts))
    call, counter = compiled(layer)
    with cute_mla.simulate("sm90", 2) as device:
        caches = [sequences.k_cache.clone() for _ in range(2)]
        steps: tuple[Callable[..., Any], ...] = (layer, call)
        outs = [step(hidden, cache, sequences.plan(contexts, decodes)) for step, cache in zip(steps, caches, strict=True)]
    assert device.launches
    assert torch.equal(*outs)
    assert torch.equal(*(cache.nan_to_num(7.0) for cache in caches))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_sparse_layer_is_one_graph() -> None:
    """With decodes, a prefill, and one with keys in the cache, all of which choose their keys."""
    contexts = (20, 0, 17)
    sequences = SparseSequences.drawn(V3_2, (21, 18, 19), torch.bfloat16)
    sequences.until(contexts).step([0] * 3, 0)
    layer, hidden = sequences.layer(), torch.cat(sequences.own.new_tokens(contexts))
    call, counter = compiled(layer)
    with cute_mla.simulate("sm90", 2) as device:
        batches = [sequences.own.plan(contexts, 1) for _ in range(2)]
        steps: tuple[Callable[..., Any], ...] = (layer, call)
        outs = [
            step(hidden, sequences.own.k_cache, batch, index_cache=sequences.index_cache)
            for step, batch in zip(steps, batches, strict=True)
        ]
    assert device.findings == []
    assert torch.equal(*outs)
    for one, other in zip(*(sequences.positions(batch) for batch in batches), strict=True):
        assert torch.equal(one, other)
    assert counter.frame_count == 1
