"""The reference of the backward agrees with the closed formulas, and with differences of the forward's reference."""

from __future__ import annotations

import math

import pytest
import torch

from cute_mla import reference

SCALE = 0.07


def operands(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q [2, 3, 4, 576], kv [2, 20, 1, 576] and indices [2, 3, 1, 9], some of which occur twice or name no row."""
    draw = torch.Generator().manual_seed(seed)
    q, kv = torch.randn(2, 3, 4, 576, generator=draw), torch.randn(2, 20, 1, 576, generator=draw)
    return q, kv, torch.randint(-1, 21, (2, 3, 1, 9), generator=draw, dtype=torch.int32)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -math.inf, 2.0, math.inf])])
def test_gradients_follow_the_formulas(sinks: torch.Tensor | None) -> None:
    q, kv, indices = operands()
    lengths = torch.tensor([[9, 4, 0], [20, 7, 2]], dtype=torch.int32)
    out, _, lse = reference.sparse_prefill(q, kv, indices, SCALE, sinks, lengths)
    lse[1, 0, 2] = -math.inf  # a row without gradient
    draw = torch.Generator().manual_seed(5)
    dout, dlse = torch.randn(out.shape, generator=draw), torch.randn(lse.shape, generator=draw)
    dq, dkv, d_sink = reference.sparse_prefill_backward(dout, (q, kv, indices), lse, SCALE, sinks, lengths, dlse=dlse)

    sink = torch.full((4,), -math.inf) if sinks is None else sinks
    expected_q, expected_kv, expected_sink = (torch.zeros(tensor.shape) for tensor in (q, kv, sink))
    for request, token, head in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        if lse[request, token, head].isinf() or sink[head] == math.inf:
            continue
        own = indices[request, token, 0, : max(int(lengths[request, token]), 0)]
        keys = own[(own >= 0) & (own < 20)].long()
        with_sink = torch.logaddexp(lse[request, token, head], sink[head])
        p = (SCALE * kv[request, keys, 0] @ q[request, token, head] - with_sink).exp()
        delta = out[request, token, head] @ dout[request, token, head]
        moved = delta - dlse[request, token, head] * (with_sink - lse[request, token, head]).exp()
        ds = p * (kv[request, keys, 0, :512] @ dout[request, token, head] - moved)
        expected_q[request, token, head] = SCALE * ds @ kv[request, keys, 0]
        for key, weight, score in zip(keys.tolist(), p, ds, strict=True):
            expected_kv[request, key, 0] += SCALE * score * q[request, token, head]
            expected_kv[request, key, 0, :512] += weight * dout[request, token, head]
        expected_sink[head] -= (sink[head] - with_sink).exp() * delta
    for actual, expected in ((dq, expected_q), (dkv, expected_kv), (d_sink, expected_sink)):
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def test_packed_requests_share_rows() -> None:
    """Rows of two requests that overlap get the gradients of both; those of none get none."""
    q, kv, indices = operands(4)
    packed, offsets = kv.flatten(0, 1)[:30], torch.tensor([4, 20, 26], dtype=torch.int32)
    out, _, lse = reference.sparse_prefill(q, packed, indices, SCALE, kv_offsets=offsets)
    dq, dkv, _ = reference.sparse_prefill_backward(out, (q, packed, indices), lse, SCALE, kv_offsets=offsets)
    parts = torch.zeros(30, 1, 576)
    for request, (first, end) in enumerate(((4, 20), (20, 26))):
        own = (q[request : request + 1], packed[None, first:end], indices[request : request + 1])
        of_q, of_kv, _ = reference.sparse_prefill_backward(out[request : request + 1], own, lse[request : request + 1], SCALE)
        parts[first:end] += of_kv[0]
        torch.testing.assert_close(dq[request], of_q[0])
    torch.testing.assert_close(dkv, parts)
    assert not dkv[:4].any()
    assert not dkv[26:].any()
