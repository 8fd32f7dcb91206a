"""Batch invariance of a whole sparse layer: the bits of a request, through indexer, choice and attention, depend on the request alone.

Products with the weights are torch's, and engines put batch-invariant ones in their place; here each row is multiplied by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import cute_mla
import cute_mla.layer.attention
import cute_mla.layer.indexer
from cute_mla.spec.arch import Arch
from cute_mla.testing.compare import same_bits
from tests.layer.dsa_models import V3_2
from tests.layer.dsa_steps import SparseSequences
from tests.layer.mla_models import GLM_5

# Enough keys that a request alone may be divided among SMs. Decodes: of more and of fewer keys than are chosen. Prefills: the same, behind
# cached keys, and a short prompt.
TOPK = 150
CONTEXTS, ENDS, DECODES = (199, 5, 160, 70, 0), (200, 6, 163, 72, 3), 2


class Ran(NamedTuple):
    """A request's output, and the positions that each of its new tokens attends to."""

    out: Tensor
    positions: list[list[int]]


@pytest.fixture
def _rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply every row by itself, whatever stands beside it."""

    def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None
        return torch.cat([rows.new_empty(0, len(weight)), *(row @ weight.T for row in rows.split(1))])

    def bmm(rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        result = torch.stack([linear(own, weight.T) for own, weight in zip(rows, weights, strict=True)])
        return result if out is None else out.copy_(result)

    for module in (cute_mla.layer.attention, cute_mla.layer.indexer):
        monkeypatch.setattr(module, "linear", linear)
    monkeypatch.setattr(torch, "bmm", bmm)


@pytest.fixture
def prepared(_rows_alone: None) -> SparseSequences:
    """Return sequences whose contexts are in the caches."""
    sequences = SparseSequences.drawn(V3_2, ENDS, torch.bfloat16, topk=TOPK)
    sequences.until(CONTEXTS).step([0] * len(ENDS), 0)
    return sequences


def step(
    sequences: SparseSequences, requests: Sequence[int], place: tuple[str, int], *, moved: bool = False, invariant: bool = True
) -> list[Ran]:
    """Return what a step of these requests gives each. place: architecture and SMs. moved: their pages lie elsewhere in the caches."""
    own = sequences.own
    order = torch.arange(len(own.k_cache))
    if moved:
        order = order.flip(0)
    table = own.block_table[list(requests)]
    used = table < len(order)
    picked = replace(
        sequences,
        own=replace(
            own,
            hidden=tuple(own.hidden[request] for request in requests),
            k_cache=own.k_cache[order],
            block_table=torch.where(used, order.argsort()[table.clamp(max=len(order) - 1)].int(), table),
        ),
        index_cache=sequences.index_cache[order],
    )
    contexts, decodes = [CONTEXTS[request] for request in requests], sum(request < DECODES for request in requests)
    with cute_mla.simulate(*place):
        out, batch = picked.step(contexts, decodes, picked.layer(batch_invariant=invariant))
    lengths = [ENDS[request] - CONTEXTS[request] for request in requests]
    seen = picked.positions(batch) if invariant else []
    ends = list(accumulate(lengths))
    return [
        Ran(part, [own.tolist() for own in seen[end - n : end]]) for part, n, end in zip(out.split(lengths), lengths, ends, strict=True)
    ]


@pytest.mark.in_turn
def test_shuffled_and_resized_batches(prepared: SparseSequences, arch: Arch) -> None:
    """In another order, on other pages, on other SMs, in part and alone.

    Alone on 8 SMs, which pairs of CTAs are four parts for, the keys of the first request would be split without the flag.
    """
    whole = step(prepared, range(len(ENDS)), (arch.name, 2))
    assert [len(own) for own in whole[0].positions] == [TOPK]
    assert [len(own) for own in whole[1].positions] == [6]
    for requests, moved, sms in (((1, 0, 4, 3, 2), True, 3), ((0,), False, 8), ((4, 2), True, 2)):
        for request, ran in zip(requests, step(prepared, requests, (arch.name, sms), moved=moved), strict=True):
            assert ran.positions == whole[request].positions
            assert same_bits(ran.out, whole[request].out), (requests, request)


@pytest.mark.usefixtures("_rows_alone")
def test_without_the_flag_a_long_request_changes_a_short_one() -> None:
    """The planted difference: beside a prompt of many keys a short one is attended to sparsely, and alone densely."""
    prepared = SparseSequences.drawn(GLM_5, ENDS, torch.bfloat16, topk=TOPK)
    prepared.until(CONTEXTS).step([0] * len(ENDS), 0)
    (alone,) = step(prepared, [4], ("sm90", 2), invariant=False)
    beside = step(prepared, [2, 4], ("sm90", 2), invariant=False)[1]
    assert not same_bits(alone.out, beside.out)
    torch.testing.assert_close(alone.out, beside.out, rtol=0.05, atol=0.02)
