"""Calls over chosen keys with NaN in every row that no index names, and what fp64 says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

import cute_mla
from cute_mla import indexer
from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.spec.arch import Arch
from tests.ops.sparse_prefill_backward.keys import drawn, key_of_slots

SCALE = 576**-0.5


SMALL: dict[str, Any] = {
    "q": torch.zeros(3, 4, 128).bfloat16(),
    "k": torch.zeros(9, 128).bfloat16(),
    "weights": torch.zeros(3, 4),
    "indices": torch.zeros(3, 1, 5, dtype=torch.int32),
}


@dataclass(frozen=True)
class Simulated:
    """Device, order and code of a call."""

    arch: str
    schedule: str = "round_robin"
    seed: int = 0
    code: str = "ptx"
    sm_count: int = 4

    def active(self) -> Any:
        """Return the context of the simulated device."""
        return cute_mla.simulate(self.arch, sm_count=self.sm_count, schedule=self.schedule, seed=self.seed, code=self.code)


@dataclass(frozen=True)
class Chosen:
    """Queries [batch, s_q, heads, columns], keys [.., columns] and terms [batch, s_q, heads] of tokens that have chosen keys."""

    q: torch.Tensor
    k: torch.Tensor
    terms: torch.Tensor
    keys: IndexedKeys
    sinks: torch.Tensor | None = None

    def tables(self) -> dict[str, Any]:
        """Return indices, lengths and offsets by the names of arguments."""
        keys = self.keys
        return {"indices": keys.indices.unsqueeze(-2), "topk_length": keys.topk_length, "kv_offsets": keys.kv_offsets}

    def probs(self, run: Simulated) -> torch.Tensor:
        """Return attention_head_sums."""
        with run.active():
            tables = {**self.tables(), "attn_sink": self.sinks, "sm_scale": SCALE}
            return indexer.attention_head_sums(self.q, self.k.unsqueeze(-2), self.terms, **tables)

    def scores(self, run: Simulated) -> torch.Tensor:
        """Return indexer_scores."""
        with run.active():
            return indexer.indexer_scores(self.q, self.k, self.terms, **self.tables())

    def gradients(self, run: Simulated, dscores: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        """Return indexer_backward."""
        with run.active():
            return indexer.indexer_backward(self.q, self.k, self.terms, dscores=dscores, **self.tables(), **options)

    def named(self) -> torch.Tensor:
        """Return which slots name a key, bool [batch, s_q, topk]."""
        return torch.from_numpy(key_of_slots(self.keys) >= 0).view(self.keys.indices.shape)

    def at_slots(self, k: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return <q_h, k> of all slots, [batch * s_q, heads, topk]; those of slots that name no key are of any key."""
        slots = torch.from_numpy(key_of_slots(self.keys)).clamp(min=0)
        rows = k.flatten(0, -2)
        chosen = rows[slots] if len(rows) else rows.new_zeros(*slots.shape, rows.shape[-1])
        return torch.einsum("thd,tjd->thj", q.flatten(0, 1), chosen)

    def expected_probs(self) -> torch.Tensor:
        """Return the sums of probabilities in fp64."""
        lse = self.terms.double()
        if self.sinks is not None:
            lse = torch.logaddexp(lse, self.sinks.double())
        dead = self.terms.isinf() | (lse == math.inf)
        scores = self.at_slots(self.k.double().nan_to_num(), self.q.double()) * SCALE - lse.flatten(0, 1).unsqueeze(-1)
        sums = scores.exp().masked_fill(dead.flatten(0, 1).unsqueeze(-1), 0.0).sum(dim=1)
        return sums.view(self.keys.indices.shape).masked_fill(~self.named(), 0.0)

    def expected_scores(self, operands: tuple[torch.Tensor, ...] | None = None) -> torch.Tensor:
        """Return the scores in fp64. operands: q, k and weights, by default the call's."""
        q, k, weights = operands or self.doubles()
        sums = torch.einsum("th,thj->tj", weights.flatten(0, 1), self.at_slots(k, q).relu())
        return sums.view(self.keys.indices.shape).masked_fill(~self.named(), -math.inf)

    def doubles(self) -> tuple[torch.Tensor, ...]:
        """Return q, k and weights in fp64, with gradients; rows of k that no index names are 0."""
        return tuple(tensor.double().nan_to_num().requires_grad_() for tensor in (self.q, self.k, self.terms))

    def expected_gradients(self, dscores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return dq, dk and dweights by fp64 autograd."""
        operands = self.doubles()
        scores = self.expected_scores(operands).masked_fill(~self.named(), 0.0)
        loss = (scores * dscores.double().masked_fill(~self.named(), 0.0)).sum()
        return torch.autograd.grad(loss, operands, allow_unused=True, materialize_grads=True)

    def request(self, number: int) -> Chosen:
        """Return one request of a call without offsets, alone."""
        own = slice(number, number + 1)
        lengths = self.keys.topk_length
        keys = replace(self.keys, indices=self.keys.indices[own], topk_length=None if lengths is None else lengths[own])
        return replace(self, q=self.q[own], k=self.k[own], terms=self.terms[own], keys=keys)


def chosen(keys: IndexedKeys, heads: int, columns: int, *, sinks: bool = False) -> Chosen:
    """Draw a call over these indices. Terms are weights with 128 columns, else lse of about the right size."""
    draw = torch.Generator().manual_seed(heads + columns)
    batch, s_q, _ = keys.indices.shape
    q = torch.randn(batch, s_q, heads, columns, generator=draw).bfloat16()
    shape = (keys.s_kv, columns) if keys.kv_offsets is not None else (batch, keys.s_kv, columns)
    k = torch.randn(shape, generator=draw).bfloat16()
    terms = torch.randn(batch, s_q, heads, generator=draw)
    unnamed = torch.ones(keys.keys, dtype=torch.bool)
    slots = key_of_slots(keys)
    unnamed[torch.from_numpy(slots[slots >= 0])] = False
    k.flatten(0, -2)[unnamed] = math.nan
    sink = torch.linspace(-2, 6, heads) if sinks else None
    return Chosen(q, k, terms if columns == 128 else terms + 4.0, keys, sink)


def keys_of(topk: int = 130, s_kv: int = 180) -> IndexedKeys:
    """Return indices of two requests. The second tile of a token names no key, and neither does a whole token."""
    indices = drawn(2, 2, topk, s_kv)
    indices[:, 0, 64:128] = -1
    indices[1, 1] = 1 << 30
    return IndexedKeys(indices, None, None, s_kv)


def drawn_gradients(call: Chosen) -> torch.Tensor:
    """Draw gradients of scores, NaN in slots that name no key."""
    draw = torch.Generator().manual_seed(5)
    return torch.randn(call.keys.indices.shape, generator=draw).masked_fill(~call.named(), math.nan)


def expect_probs(call: Chosen, sums: torch.Tensor) -> None:
    expected = call.expected_probs()
    assert ((sums.double() - expected).abs() <= 1e-5 * expected.abs() + 1e-7).all()
    assert not sums[~call.named()].any()


def expect_scores(call: Chosen, scores: torch.Tensor) -> None:
    """Assert that scores differ from fp64 by roundings of fp32 alone."""
    named, expected = call.named(), call.expected_scores().detach()
    assert (scores[~named] == -math.inf).all()
    products = call.at_slots(call.k.double().nan_to_num().abs(), call.q.double().abs())
    size = torch.einsum("th,thj->tj", call.terms.double().abs().flatten(0, 1), products)
    assert ((scores.double() - expected).abs()[named] <= 1e-6 * size.view(named.shape)[named]).all()


def expect_gradients(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    """Assert that dq and dk agree with fp64 as far as bf16 goes, and dweights as far as fp32 goes."""
    for gradient, wanted, bound in zip(actual, expected, (4e-3, 4e-3, 1e-5), strict=True):
        assert gradient.shape == wanted.shape
        assert not gradient.isnan().any()
        assert (gradient.double() - wanted).norm() <= bound * wanted.norm()
        largest = max(wanted.abs().flatten().tolist(), default=0.0)
        assert ((gradient.double() - wanted).abs() <= 2 * bound * largest).all()


SCHEDULES = (("lazy", 0), ("adversarial", 0), ("random", 1))


def runs(arch: Arch) -> list[Simulated]:
    """Return a call in every order, in machine code, and on one SM."""
    orders = [Simulated(arch.name, schedule, seed) for schedule, seed in SCHEDULES]
    return [*orders, Simulated(arch.name, code="sass"), Simulated(arch.name, sm_count=1)]
