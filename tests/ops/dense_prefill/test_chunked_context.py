"""Chunked prefill over a cached context.

Attention to the context chunk by chunk, merged with the causal attention among the new tokens, equals one causal pass over everything.

An engine does so because the context, decompressed to keys and values per head, does not fit in memory at once. Each request
has its own length of context and of new tokens; a chunk takes the next few keys of every request's context, of some none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla import reference
from cute_mla.spec.arch import Arch

CONTEXT = (150, 0, 65, 7)  # keys of each request that are cached
NEW = (40, 17, 1, 70)  # its new tokens, which see all of its context and, among themselves, what came before
CHUNK = 64
HEADS, KV_HEADS = 4, 2
SMS = 3


def ends(lengths: tuple[int, ...]) -> Tensor:
    """cu_seqlens of packed sequences."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@dataclass(frozen=True)
class Requests:
    """The new tokens' queries, packed, and each request's keys and values, context first."""

    q: Tensor
    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    @staticmethod
    def drawn(d_qk: int, dtype: torch.dtype) -> Requests:
        draw = torch.Generator().manual_seed(d_qk)
        lengths = [context + new for context, new in zip(CONTEXT, NEW, strict=True)]

        def heads(tokens: int, count: int, columns: int) -> Tensor:
            return torch.randn(tokens, count, columns, generator=draw).to(dtype)

        return Requests(
            q=heads(sum(NEW), HEADS, d_qk),
            k=tuple(heads(length, KV_HEADS, d_qk) for length in lengths),
            v=tuple(heads(length, KV_HEADS, 128) for length in lengths),
        )

    def attend(self, firsts: tuple[int, ...], stops: tuple[int, ...], causal: bool) -> tuple[Tensor, Tensor]:
        """Return the new tokens over the keys firsts[r] to stops[r] - 1 of each request."""
        counts = tuple(stop - first for first, stop in zip(firsts, stops, strict=True))
        k, v = (
            torch.cat([tensor[first:stop] for tensor, first, stop in zip(tensors, firsts, stops, strict=True)])
            for tensors in (self.k, self.v)
        )
        return cute_mla.flash_attn_varlen_func(self.q, k, v, ends(NEW), ends(counts), max(NEW), max(counts), causal=causal)

    def over_context(self) -> list[tuple[Tensor, Tensor]]:
        """Return the new tokens over their context, a chunk after the other."""
        return [
            self.attend(tuple(min(start, context) for context in CONTEXT), tuple(min(start + CHUNK, context) for context in CONTEXT), False)
            for start in range(0, max(CONTEXT), CHUNK)
        ]

    def over_new_tokens(self) -> tuple[Tensor, Tensor]:
        """Return the new tokens among themselves."""
        return self.attend(CONTEXT, self.lengths(), True)

    def in_one_pass(self) -> tuple[Tensor, Tensor]:
        """Return the new tokens over everything."""
        return self.attend((0,) * len(NEW), self.lengths(), True)

    def lengths(self) -> tuple[int, ...]:
        """Return keys of each request."""
        return tuple(map(len, self.k))

    def expect(self, result: tuple[Tensor, Tensor], roundings: int) -> None:
        """Compare the result of everything with the reference. roundings: how often what adds up to an element of out was rounded."""
        out, lse = result
        keys, lengths = torch.cat(self.k), (ends(NEW), ends(self.lengths()))
        expected, expected_lse = reference.dense_prefill(self.q, keys, torch.cat(self.v), *lengths, causal=True)
        weight, _ = reference.dense_prefill(self.q, keys, torch.cat(self.v).abs(), *lengths, causal=True)
        torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=2e-6)
        half_ulp = torch.finfo(out.dtype).eps / 2
        assert ((out.float() - expected).abs() <= roundings * half_ulp * weight + 1e-6).all()


@pytest.mark.parametrize(("d_qk", "dtype"), [(192, torch.bfloat16), (128, torch.float16)])
def test_chunks_merged_are_one_pass(arch: Arch, d_qk: int, dtype: torch.dtype) -> None:
    requests = Requests.drawn(d_qk, dtype)
    with cute_mla.simulate(arch, SMS):
        states = [*requests.over_context(), requests.over_new_tokens()]
        merged = cute_mla.merge_states([out for out, _ in states], [lse for _, lse in states])
        whole = requests.in_one_pass()
    assert len(states) == 4
    requests.expect(whole, roundings=2)  # of the weights, and of out
    requests.expect(merged, roundings=3)  # and of a chunk's out


def test_a_request_without_context_is_left_as_it_is(arch: Arch) -> None:
    """Its rows attend to nothing in any chunk, which the merge gives no weight."""
    requests = Requests.drawn(192, torch.bfloat16)
    rows = slice(NEW[0], NEW[0] + NEW[1])
    assert CONTEXT[1] == 0
    with cute_mla.simulate(arch, SMS):
        chunk, own = requests.over_context()[0], requests.over_new_tokens()
        out, lse = cute_mla.merge_states([chunk[0], own[0]], [chunk[1], own[1]])
    assert (chunk[0][rows] == 0).all()
    assert (chunk[1][rows] == math.inf).all()
    assert torch.equal(out[rows], own[0][rows])
    torch.testing.assert_close(lse[rows], own[1][rows], rtol=1e-6, atol=1e-6)
