"""The reference against arithmetic written out key by key, and against torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch

from cute_mla.reference import attention, dense_decode, visible_keys


def by_hand(q: torch.Tensor, keys: torch.Tensor, scale: float, limit: int) -> tuple[torch.Tensor, float]:
    """One row over the first `limit` keys, in fp64."""
    scores = [float(q.double() @ keys[j].double()) * scale for j in range(limit)]
    if not scores:
        return torch.zeros(512, dtype=torch.float64), math.inf
    total = sum(math.exp(score) for score in scores)
    out = sum((math.exp(score) / total * keys[j, :512].double() for j, score in enumerate(scores)), torch.zeros(512, dtype=torch.float64))
    return out, math.log(total)


@pytest.mark.parametrize("causal", [False, True])
def test_dense_decode_by_hand(causal: bool) -> None:
    torch.manual_seed(0)
    q = torch.randn(3, 2, 4, 576)
    k_cache = torch.randn(6, 16, 2, 576)
    table = torch.tensor([[5, 2], [2147480000, 2147480000], [1, 2147480000]], dtype=torch.int32)
    lengths = torch.tensor([19, 0, 1], dtype=torch.int32)
    out, lse = dense_decode(q, k_cache, table, lengths, causal=causal)
    for request, length in enumerate(lengths.tolist()):
        for token in range(2):
            for head in range(4):
                keys = torch.cat([k_cache[5, :, head // 2], k_cache[2, :, head // 2]]) if request == 0 else k_cache[1, :, head // 2]
                limit = max(length - (1 - token), 0) if causal else length
                expected, expected_lse = by_hand(q[request, token, head], keys, 576**-0.5, limit)
                torch.testing.assert_close(out[request, token, head].double(), expected, rtol=1e-5, atol=1e-5)
                assert float(lse[request, head, token]) == pytest.approx(expected_lse, rel=1e-5)


def test_causal_of_a_request_shorter_than_its_query() -> None:
    torch.manual_seed(0)
    q, k_cache = torch.randn(1, 4, 1, 576), torch.randn(1, 64, 1, 576)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out, lse = dense_decode(q, k_cache, table, lengths, causal=True, empty_lse=-math.inf)
    assert out[0, :2].abs().max() == 0
    assert lse[0, 0, :2].tolist() == [-math.inf, -math.inf]
    torch.testing.assert_close(out[0, 2, 0], k_cache[0, 0, 0, :512])


def test_what_lies_beyond_the_length_does_not_matter() -> None:
    torch.manual_seed(0)
    q, k_cache = torch.randn(1, 1, 2, 576), torch.randn(3, 64, 1, 576)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    expected = dense_decode(q, k_cache, table, lengths)
    k_cache[0, 6:] = math.nan
    k_cache[2] = math.nan
    for got, want in zip(dense_decode(q, k_cache, table, lengths), expected, strict=True):
        assert torch.equal(got, want)


def test_attention_agrees_with_torch() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 64), torch.randn(2, 9, 64), torch.randn(2, 9, 32)
    visible = visible_keys(5, 9, True, q.device)
    out, _ = attention(q, k, v, 0.3, visible)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.3)
    torch.testing.assert_close(out, expected)
    assert visible.sum(dim=1).tolist() == [5, 6, 7, 8, 9]
