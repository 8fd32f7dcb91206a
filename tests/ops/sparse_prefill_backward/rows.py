"""Calls of the kernel that makes rows for the gradient of the latent, with the rows that fp64 has."""

from __future__ import annotations

import math
from typing import Any

import torch

import cute_mla
from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.ops.sparse_prefill_backward import ScoreGradients, launch_rows
from cute_mla.spec.arch import Arch
from cute_mla.spec.sparse_prefill_dkv import tiles
from tests.ops.sparse_prefill_backward.keys import drawn, key_of_slots


def call_of(topk: int, s_q: int = 3) -> IndexedKeys:
    """Return indices of two requests. The second tile of a token names no row, and neither does a whole token."""
    indices = drawn(2, s_q, topk, 300)
    indices[:, 0, 64:128] = -1
    indices[1, 1] = 1 << 30
    return IndexedKeys(indices, None, None, 300)


def operands(call: IndexedKeys, heads: int, columns: int) -> tuple[tuple[torch.Tensor, torch.Tensor], ScoreGradients]:
    """Draw q, dout, P and dS; NaN in slots that name no row, and in tiles behind the last one."""
    draw = torch.Generator().manual_seed(heads + columns)
    shape = (*call.indices.shape[:2], heads)
    q, dout = (torch.randn(*shape, width, generator=draw).bfloat16() for width in (columns, 512))
    slots = torch.randn(2, call.tokens, heads, 64 * tiles(call.topk), generator=draw)
    named = torch.zeros(call.tokens, 1, slots.shape[-1], dtype=torch.bool)
    named[:, 0, : call.topk] = torch.from_numpy(key_of_slots(call) >= 0)
    slots = torch.where(named, slots, math.nan).bfloat16().unflatten(-1, (-1, 64)).transpose(2, 3).contiguous()
    return (q, dout), ScoreGradients(slots[0], slots[1])


def expected_rows(call: IndexedKeys, queries: tuple[torch.Tensor, torch.Tensor], gradients: ScoreGradients) -> torch.Tensor:
    """Return the rows in fp64, [tokens, topk, columns], NaN where a slot names no row."""
    q, dout = (tensor.flatten(0, 1).double() for tensor in queries)
    p, ds = (tensor.transpose(1, 2).flatten(2)[..., : call.topk].double() for tensor in (gradients.probs, gradients.dscores))
    rows = ds.mT @ q
    rows[..., :512] += p.mT @ dout
    return rows


def run(
    arch: Arch,
    call: IndexedKeys,
    chunk: tuple[int, int],
    shape: tuple[int, int],
    schedule: tuple[str, int] = ("round_robin", 0),
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a chunk [tokens, topk, columns], 0 where nothing was written, and those in fp64. shape: heads, columns."""
    queries, gradients = operands(call, *shape)
    first, tokens = chunk
    own = ScoreGradients(gradients.probs[first : first + tokens], gradients.dscores[first : first + tokens])
    with cute_mla.simulate(arch.name, schedule=schedule[0], seed=schedule[1], **{"sm_count": 4, **how}) as device:
        rows = launch_rows(device, call, chunk, queries, own)
    named = torch.from_numpy(key_of_slots(call) >= 0)[first : first + tokens, :, None]
    rows = rows.reshape(tokens, call.topk, shape[1])
    expected = expected_rows(call, queries, gradients)[first : first + tokens]
    return rows.masked_fill(~named, 0.0), expected.masked_fill(~named, 0.0)


def expect(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert not actual.isnan().any()
    assert (actual.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
    assert (actual.double() - expected).norm() <= 2.5e-3 * expected.norm()
