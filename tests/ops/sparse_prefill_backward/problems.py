"""Calls of the backward of sparse prefill, by its launches, with the gradients that fp64 autograd has."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import cute_mla
from cute_mla import reference
from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.ops.sparse_prefill_backward import Results, Saved, launch_all
from cute_mla.spec.arch import Arch
from tests.ops.sparse_prefill_backward.keys import drawn, key_of_slots

SCALE = 576**-0.5


@dataclass(frozen=True)
class Problem:
    """A call of the backward, and what it should give."""

    saved: Saved
    dout: torch.Tensor
    dlse: torch.Tensor | None
    expected: tuple[torch.Tensor, ...]

    def run(
        self, arch: Arch, chunk_tokens: int = 1 << 20, schedule: tuple[str, int] = ("round_robin", 0), code: str = "ptx", sm_count: int = 4
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return dq, dkv [keys, d_qk] and d_sink."""
        dq = torch.full_like(self.saved.q, math.nan)
        dkv = self.saved.kv.new_full((self.saved.keys.keys, self.saved.kv.shape[-1]), math.nan)
        with cute_mla.simulate(arch.name, sm_count=sm_count, schedule=schedule[0], seed=schedule[1], code=code) as device:
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
            assert result[2] is not None
            torch.testing.assert_close(result[2].double(), self.d_sink(), rtol=1e-4, atol=1e-6)

    def d_sink(self) -> torch.Tensor:
        """Return d_sink in fp64 with out as it is stored, whose rounding shows in delta."""
        assert self.saved.attn_sink is not None
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
