"""Gradients of sparse prefill against fp64 autograd: dq, dkv and d_sink, by the kernels that make them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

import cute_mla
from cute_mla import reference
from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.ops.sparse_prefill_backward import Results, Saved, launch_all
from cute_mla.spec.arch import SM90
from cute_mla.testing.compare import same_bits
from tests.ops.sparse_prefill_backward.keys import drawn, key_of_slots, patterns

SCHEDULES = (("lazy", 0), ("adversarial", 0), ("random", 1))
SCALE = 576**-0.5


@dataclass(frozen=True)
class Problem:
    """A call of the backward, and what it should give."""

    saved: Saved
    dout: torch.Tensor
    dlse: torch.Tensor | None
    expected: tuple[torch.Tensor, ...]

    def run(
        self, chunk_tokens: int = 1 << 20, schedule: tuple[str, int] = ("round_robin", 0), code: str = "ptx", sm_count: int = 4
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return dq, dkv [keys, d_qk] and d_sink."""
        dq = torch.full_like(self.saved.q, math.nan)
        dkv = self.saved.kv.new_full((self.saved.keys.keys, self.saved.kv.shape[-1]), math.nan)
        with cute_mla.simulate(SM90.name, sm_count=sm_count, schedule=schedule[0], seed=schedule[1], code=code) as device:
            terms = launch_all(device, self.saved, self.dout, self.dlse, Results(dq, dkv, None), chunk_tokens)
        return dq, dkv, None if terms is None else terms.sum(dim=0)

    def expect(self, result: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> None:
        """Assert that gradients agree with fp64 autograd, in norm and everywhere. Where they cancel, the rounding of out remains."""
        for actual, expected in zip(result[:2], self.expected[:2], strict=True):
            wanted = expected.reshape(actual.shape).double()
            assert not actual.isnan().any()
            assert (actual.double() - wanted).norm() <= 4e-3 * wanted.norm() + 1e-4
            assert ((actual.double() - wanted).abs() <= 2**-7 * max(wanted.abs().flatten().tolist(), default=0.0) + 1e-5).all()
        if self.saved.attn_sink is not None:
            torch.testing.assert_close(result[2].double(), self.d_sink(), rtol=1e-4, atol=1e-6)

    def d_sink(self) -> torch.Tensor:
        """Return d_sink in fp64 with out as it is stored, whose rounding shows in delta."""
        lse, sink = self.saved.lse.double(), self.saved.attn_sink.double()
        terms = (sink - torch.logaddexp(lse, sink)).exp() * (self.saved.out.double() * self.dout.double()).sum(dim=-1)
        return -terms.masked_fill(lse.isinf(), 0.0).sum(dim=(0, 1))


def problem(heads: int, columns: int, keys: IndexedKeys, *, sinks: bool = False, dlse: bool = False) -> Problem:
    """Draw a call over these indices. Rows of the latent that no index names are NaN."""
    draw = torch.Generator().manual_seed(heads + columns)
    batch, s_q, _ = keys.indices.shape
    q = torch.randn(batch, s_q, heads, columns, generator=draw).bfloat16()
    shape = (keys.s_kv, columns) if keys.kv_offsets is not None else (batch, keys.s_kv, columns)
    kv = torch.randn(shape, generator=draw).bfloat16()
    sink = torch.linspace(-2, 3, heads) if sinks else None
    indices, latent = keys.indices[:, :, None], kv.unsqueeze(-2)
    rest = (SCALE, sink, keys.topk_length, keys.kv_offsets)
    out, _, lse = reference.sparse_prefill(q, latent, indices, *rest)
    lse[0, 0, ::5] = math.inf  # rows without gradient
    dout = torch.randn(out.shape, generator=draw).bfloat16()
    of_lse = torch.randn(lse.shape, generator=draw) if dlse else None
    expected = reference.sparse_prefill_backward(dout, (q, latent, indices), lse, *rest, dlse=of_lse)
    unnamed = torch.ones(keys.keys, dtype=torch.bool)
    named = key_of_slots(keys)
    unnamed[torch.from_numpy(named[named >= 0])] = False
    kv.flatten(0, -2)[unnamed] = math.nan
    return Problem(Saved(q, kv, out.bfloat16(), lse, sink, keys, SCALE), dout, of_lse, expected)


def keys_of(topk: int = 130, s_kv: int = 180) -> IndexedKeys:
    """Return indices of two requests. The second tile of a token names no row, and neither does a whole token."""
    indices = drawn(2, 3, topk, s_kv)
    indices[:, 0, 64:128] = -1
    indices[1, 1] = 1 << 30
    return IndexedKeys(indices, None, None, s_kv)


@pytest.mark.parametrize(("heads", "columns"), [(64, 576), (1, 576), (65, 512), (128, 576), (12, 512)])
def test_gradients(heads: int, columns: int) -> None:
    call = problem(heads, columns, keys_of(), sinks=heads != 64, dlse=heads == 12)
    call.expect(call.run())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("columns", [576, 512])
def test_schedules(columns: int, schedule: tuple[str, int]) -> None:
    """No order of warps and copies changes a bit, nor does the number of SMs."""
    call = problem(64, columns, keys_of(), sinks=True)
    result = call.run(schedule=schedule)
    call.expect(result)
    for actual, usual in zip(result, call.run(sm_count=1), strict=True):
        assert same_bits(actual, usual)


@pytest.mark.parametrize("columns", [576, 512])
def test_machine_code(columns: int) -> None:
    call = problem(64, columns, keys_of(70), dlse=True)
    call.expect(call.run(code="sass"))


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5])
def test_chunks_do_not_change_a_bit(chunk_tokens: int) -> None:
    call = problem(16, 576, keys_of(66, 40))
    call.expect(call.run(chunk_tokens))
    for actual, usual in zip(call.run(chunk_tokens)[:2], call.run()[:2], strict=True):
        assert same_bits(actual, usual)


@pytest.mark.parametrize("name", patterns())
def test_indices_of_every_kind(name: str) -> None:
    keys = patterns()[name]
    if name == "two rounds":
        keys = IndexedKeys(keys.indices[..., :200] % 190, None, None, 200)
    call = problem(3, 512, keys)
    call.expect(call.run(7))


def test_a_request_has_the_bits_that_it_has_alone() -> None:
    call = problem(8, 576, keys_of(65, 60))
    dq, dkv, _ = call.run()
    for request in range(2):
        saved, own = call.saved, slice(request, request + 1)
        keys = replace(saved.keys, indices=saved.keys.indices[own])
        alone = replace(saved, q=saved.q[own], kv=saved.kv[own], out=saved.out[own], lse=saved.lse[own], keys=keys)
        results = Problem(alone, call.dout[own], None, ()).run()
        assert same_bits(results[0], dq[own])
        assert same_bits(results[1], dkv[60 * request : 60 * (request + 1)])


def test_strided_operands() -> None:
    """Rows of wide tensors, and results in them, have the same bits."""
    call = problem(65, 576, keys_of(33, 50))
    usual, saved = call.run(), call.saved

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 24), math.nan, dtype=tensor.dtype)
        return padded[..., 8:-16].copy_(tensor)

    moved = replace(saved, q=wide(saved.q), kv=wide(saved.kv), out=wide(saved.out), lse=saved.lse.mT.contiguous().mT)
    for actual, expected in zip(replace(call, saved=moved, dout=wide(call.dout)).run()[:2], usual[:2], strict=True):
        assert same_bits(actual, expected)
