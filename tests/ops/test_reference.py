"""The reference against arithmetic written out key by key, and against torch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_mla import reference
from cute_mla.reference import IndexedCache, attention, dense_decode, dense_prefill, sparse_decode, sparse_prefill, visible_keys

ROUNDED = 2.0**-23  # relative: twice the error of rounding fp64 to fp32 once


def by_hand(q: torch.Tensor, keys: torch.Tensor, scale: float, limit: int) -> tuple[torch.Tensor, float]:
    """Return one row over the first `limit` keys, in fp64."""
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
                torch.testing.assert_close(out[request, token, head].double(), expected, rtol=ROUNDED, atol=1e-12)
                assert float(lse[request, head, token]) == pytest.approx(expected_lse, rel=ROUNDED)


def test_causal_of_a_request_shorter_than_its_query() -> None:
    torch.manual_seed(0)
    q, k_cache = torch.randn(1, 4, 1, 576), torch.randn(1, 64, 1, 576)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out, lse = dense_decode(q, k_cache, table, lengths, causal=True, empty_lse=-math.inf)
    assert out[0, :2].abs().max() == 0
    assert lse[0, 0, :2].tolist() == [-math.inf, -math.inf]
    torch.testing.assert_close(out[0, 2, 0], k_cache[0, 0, 0, :512])


@pytest.mark.parametrize("entry", [3, -1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_page_outside_the_cache_is_a_page_of_zeros(dtype: torch.dtype, entry: int) -> None:
    torch.manual_seed(0)
    q, k_cache = torch.randn(1, 1, 2, 576), torch.randn(3, 64, 1, 576).to(dtype)
    lengths = torch.tensor([140], dtype=torch.int32)
    zeros = k_cache.clone()
    zeros[2] = 0
    expected = dense_decode(q, zeros, torch.tensor([[1, 2, 0]], dtype=torch.int32), lengths)
    for got, want in zip(dense_decode(q, k_cache, torch.tensor([[1, entry, 0]], dtype=torch.int32), lengths), expected, strict=True):
        assert torch.equal(got, want)


def test_what_lies_beyond_the_length_does_not_matter() -> None:
    torch.manual_seed(0)
    q, k_cache = torch.randn(1, 1, 2, 576), torch.randn(3, 64, 1, 576)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    expected = dense_decode(q, k_cache, table, lengths)
    k_cache[0, 6:] = math.nan
    k_cache[2] = math.nan
    for got, want in zip(dense_decode(q, k_cache, table, lengths), expected, strict=True):
        assert torch.equal(got, want)


def test_scales_of_dense_decode_are_those_of_its_operands() -> None:
    torch.manual_seed(0)
    q, k_cache = torch.randn(2, 1, 4, 576).to(torch.float8_e4m3fn), torch.randn(3, 64, 1, 576).to(torch.float8_e4m3fn)
    table, lengths = torch.tensor([[1, 0], [2, 2]], dtype=torch.int32), torch.tensor([70, 3], dtype=torch.int32)
    descales = torch.tensor([0.3]), torch.tensor(0.7)
    expected = dense_decode(q.float() * 0.3, k_cache.float() * 0.7, table, lengths)
    for got, want in zip(dense_decode(q, k_cache, table, lengths, descales=descales), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_attention_agrees_with_torch() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 64), torch.randn(2, 9, 64), torch.randn(2, 9, 32)
    visible = visible_keys(5, 9, True, q.device)
    out, _ = attention(q, k, v, 0.3, visible)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), attn_mask=visible, scale=0.3)
    torch.testing.assert_close(out, expected.float())
    assert visible.sum(dim=1).tolist() == [5, 6, 7, 8, 9]


def sparse_by_hand(q: torch.Tensor, keys: list[torch.Tensor], scale: float, sink: float) -> tuple[torch.Tensor, float]:
    """Return one head over its keys, in fp64, with the sink as one more exponential in the sum."""
    scores = [float(q.double() @ key.double()) * scale for key in keys]
    total = sum(math.exp(score) for score in scores)
    out = torch.zeros(512, dtype=torch.float64)
    if not keys or sink == math.inf:
        return out, math.log(total) if keys else math.inf
    for score, key in zip(scores, keys, strict=True):
        out += math.exp(score) / (total + math.exp(sink)) * key[:512].double()
    return out, math.log(total)


INVALID = (-(2**31), -123456, -1, 40, 41, 2147480000, 2**31 - 1)  # of 40 slots


def sparse_operands(d_qk: int, extra: bool) -> tuple[torch.Tensor, list[IndexedCache]]:
    """3 requests of 2 tokens: one whole, one cut off by its lengths, one without keys; every slot that no index names is NaN."""
    torch.manual_seed(0)
    q = torch.randn(3, 2, 4, d_qk)
    caches = []
    for cache in range(1 + extra):
        slots = torch.full((40, d_qk), math.nan)
        indices = torch.randint(0, 20, (3, 2, 11), dtype=torch.int32)  # some occur twice
        indices[..., 2:9] = torch.tensor(INVALID, dtype=torch.int32)
        indices[1, :, 9:] = 30  # beyond the request's length
        indices[2] = -1
        slots[:20] = torch.randn(20, d_qk)
        caches.append(IndexedCache(slots, indices, torch.tensor([99, 9, 11 * cache], dtype=torch.int32)))
    return q, caches


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("extra", [False, True])
def test_sparse_decode_by_hand(d_qk: int, extra: bool) -> None:
    q, caches = sparse_operands(d_qk, extra)
    sinks = [-math.inf, 0.5, 3.0, math.inf]
    out, lse = sparse_decode(q, caches, attn_sink=torch.tensor(sinks))
    assert out.shape == (3, 2, 4, 512)
    assert lse.shape == (3, 4, 2)
    for request in range(3):
        for token in range(2):
            keys = []
            for cache in caches:
                chosen = cache.indices[request, token].tolist()[: 9 if request == 1 else 11]
                keys += [cache.slots[index] for index in chosen if 0 <= index < 40]
            assert len(keys) == (4, 2, 0)[request] * len(caches)
            for head, sink in enumerate(sinks):
                expected, expected_lse = sparse_by_hand(q[request, token, head], keys, d_qk**-0.5, sink)
                torch.testing.assert_close(out[request, token, head].double(), expected, rtol=ROUNDED, atol=1e-12)
                assert float(lse[request, head, token]) == pytest.approx(expected_lse, rel=ROUNDED)
    assert out[2].count_nonzero() == 0


def test_sparse_decode_without_sinks_is_that_of_sinks_that_weigh_nothing() -> None:
    q, caches = sparse_operands(576, True)
    nothing = torch.full((4,), -math.inf)
    for got, want in zip(sparse_decode(q, caches), sparse_decode(q, caches, attn_sink=nothing), strict=True):
        assert torch.equal(got, want)


def test_sparse_decode_of_nothing() -> None:
    q, caches = sparse_operands(512, False)
    for length in (0, -5):
        none = [cache._replace(length=torch.full((3,), length, dtype=torch.int32)) for cache in caches]
        out, lse = sparse_decode(q, none, attn_sink=torch.zeros(4), empty_lse=-math.inf)
        assert out.count_nonzero() == 0
        assert (lse == -math.inf).all()


def test_sparse_decode_over_every_slot_is_dense_decode() -> None:
    torch.manual_seed(0)
    q, k_cache = torch.randn(2, 2, 3, 576), torch.randn(2, 32, 1, 576)
    table, lengths = torch.tensor([[1, 0], [0, 1]], dtype=torch.int32), torch.tensor([64, 40], dtype=torch.int32)
    slots = torch.arange(64, dtype=torch.int32)
    indices = torch.stack([slots, slots]).unsqueeze(1).expand(2, 2, 64)  # the order of request 0 does not matter
    dense = dense_decode(q, k_cache, table, lengths, softmax_scale=0.1)
    sparse = sparse_decode(q, [IndexedCache(k_cache.flatten(0, 2), indices, lengths)], softmax_scale=0.1)
    for got, want in zip(sparse, dense, strict=True):
        torch.testing.assert_close(got, want)


def prefill_operands(d_qk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, kv, indices and lengths of 4 tokens of 3 heads over 40 rows.

    One token is whole, one cut off, one has no valid index, one has length 0. Every row that no index names is NaN.
    """
    torch.manual_seed(0)
    kv = torch.full((40, 1, d_qk), math.nan)
    kv[:20] = torch.randn(20, 1, d_qk)
    indices = torch.randint(0, 20, (4, 1, 11), dtype=torch.int32)  # some occur twice
    indices[..., 2:9] = torch.tensor(INVALID, dtype=torch.int32)
    indices[1, :, 9:] = 30  # beyond the token's length
    indices[2] = -1
    return torch.randn(4, 3, d_qk), kv, indices, torch.tensor([99, 9, 11, -5], dtype=torch.int32)


@pytest.mark.parametrize("d_qk", [576, 512])
@pytest.mark.parametrize("with_lengths", [False, True])
def test_sparse_prefill_by_hand(d_qk: int, with_lengths: bool) -> None:
    q, kv, indices, lengths = prefill_operands(d_qk)
    if not with_lengths:
        q, indices = q[[0, 2]], indices[[0, 2]]
    sinks = [-math.inf, 0.5, math.inf]
    told = lengths if with_lengths else None
    out, max_logits, lse = sparse_prefill(q, kv, indices, 0.1, attn_sink=torch.tensor(sinks), topk_length=told)
    assert out.shape == (*q.shape[:2], 512)
    assert max_logits.shape == lse.shape == q.shape[:2]
    for token, most in enumerate((11, 9, 11, 0) if with_lengths else (11, 11)):
        keys = [kv[index, 0] for index in indices[token, 0].tolist()[:most] if 0 <= index < 40]
        assert len(keys) == ((4, 2, 0, 0) if with_lengths else (4, 0))[token]
        for head, sink in enumerate(sinks):
            expected, expected_lse = sparse_by_hand(q[token, head], keys, 0.1, sink)
            torch.testing.assert_close(out[token, head].double(), expected, rtol=ROUNDED, atol=1e-12)
            assert float(lse[token, head]) == pytest.approx(expected_lse, rel=ROUNDED)
            largest = max((float(q[token, head].double() @ key.double()) * 0.1 for key in keys), default=-math.inf)
            assert float(max_logits[token, head]) == pytest.approx(largest, rel=ROUNDED)


def test_sparse_prefill_of_nothing() -> None:
    q, kv, indices, lengths = prefill_operands(576)
    for options in ({"topk_length": lengths.clamp(max=0)}, {"kv": kv[:0]}, {"indices": indices[..., :0]}):
        operands: dict[str, Any] = {"q": q, "kv": kv, "indices": indices, **options}
        out, max_logits, lse = sparse_prefill(**operands, sm_scale=0.1, attn_sink=torch.zeros(3), empty_lse=-math.inf)
        assert out.count_nonzero() == 0
        assert (lse == -math.inf).all()
        assert (max_logits == -math.inf).all()


def test_sparse_prefill_of_a_batch_is_that_of_its_requests() -> None:
    q, kv, indices, lengths = prefill_operands(576)
    q, indices, lengths = q.unflatten(0, (2, 2)), indices.unflatten(0, (2, 2)), lengths.unflatten(0, (2, 2))
    requests = torch.stack([kv, kv.flip(0)])
    got = sparse_prefill(q, requests, indices, 0.1, topk_length=lengths)
    for request in range(2):
        alone = sparse_prefill(q[request], requests[request], indices[request], 0.1, topk_length=lengths[request])
        for whole, expected in zip(got, alone, strict=True):
            torch.testing.assert_close(whole[request], expected, equal_nan=True)


@pytest.mark.parametrize(
    ("offsets", "rows"),
    [
        ([0, 15, 20], [(0, 15), (15, 20)]),
        ([3, 3, 9], [(3, 3), (3, 9)]),
        ([-7, 4, 99], [(0, 4), (4, 20)]),
        ([8, 2, 5], [(0, 0), (2, 5)]),
        ([-(2**31), 2**31 - 1, 2**31 - 1], [(0, 20), (0, 0)]),
    ],
)
def test_sparse_prefill_of_requests_with_offsets(offsets: list[int], rows: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    q, kv = torch.randn(2, 3, 2, 512), torch.randn(20, 1, 512)
    indices = torch.randint(-2, 20, (2, 3, 1, 30), dtype=torch.int32)
    got = sparse_prefill(q, kv, indices, 0.1, kv_offsets=torch.tensor(offsets, dtype=torch.int32))
    for request, (first, end) in enumerate(rows):
        for whole, expected in zip(got, sparse_prefill(q[request], kv[first:end], indices[request], 0.1), strict=True):
            torch.testing.assert_close(whole[request], expected)


def test_sparse_prefill_and_sparse_decode_agree() -> None:
    q, caches = sparse_operands(576, False)
    indices, sink = caches[0].indices, torch.tensor([0.0, 1.0, -1.0, -math.inf])
    lengths = caches[0].length
    assert lengths is not None
    out, lse = sparse_decode(q, caches, 0.1, sink)
    got, _, got_lse = sparse_prefill(
        q, caches[0].slots[:, None].expand(3, -1, -1, -1), indices[:, :, None], 0.1, sink, lengths[:, None].expand(3, 2)
    )
    torch.testing.assert_close(got, out)
    torch.testing.assert_close(got_lse.mT, lse)


def test_dense_prefill_by_hand() -> None:
    """Two KV heads of two query heads each; sequences of more, fewer and no keys than queries, and tokens that nobody has."""
    torch.manual_seed(0)
    q, k, v = torch.randn(11, 4, 192), torch.randn(13, 2, 192), torch.randn(13, 2, 128)
    k[11:], v[11:] = math.nan, math.nan
    ends_q, ends_k = [0, 2, 7, 7, 9], [0, 5, 8, 11, 11]
    for causal in (False, True):
        out, lse = dense_prefill(q, k, v, torch.tensor(ends_q), torch.tensor(ends_k), softmax_scale=0.1, causal=causal)
        for r in range(4):
            s_q, s_k = ends_q[r + 1] - ends_q[r], ends_k[r + 1] - ends_k[r]
            for i in range(s_q):
                seen = [j for j in range(s_k) if not causal or j <= i + s_k - s_q]
                for head in range(4):
                    row = q[ends_q[r] + i, head].double()
                    scores = [float(row @ k[ends_k[r] + j, head // 2].double()) * 0.1 for j in seen]
                    total = sum(math.exp(score) for score in scores)
                    expected = torch.zeros(128, dtype=torch.float64)
                    for j, score in zip(seen, scores, strict=True):
                        expected += math.exp(score) / total * v[ends_k[r] + j, head // 2].double()
                    torch.testing.assert_close(out[ends_q[r] + i, head].double(), expected, rtol=ROUNDED, atol=1e-12)
                    wanted = math.log(total) if seen else math.inf
                    assert float(lse[ends_q[r] + i, head]) == pytest.approx(wanted, rel=ROUNDED)
        assert out[9:].isnan().all()
        assert lse[9:].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_dense_prefill_agrees_with_torch(causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(9, 4, 128), torch.randn(9, 2, 128), torch.randn(9, 2, 128)
    ends = torch.tensor([0, 9])
    out, _ = dense_prefill(q, k, v, ends, ends, causal=causal)
    heads = (tensor.transpose(0, 1).double() for tensor in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=causal)  # type: ignore[misc, arg-type]
    torch.testing.assert_close(out.transpose(0, 1), expected.float())


def test_dense_prefill_of_ends_outside_the_tokens() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 1, 128), torch.randn(8, 1, 128), torch.randn(8, 1, 128)
    out, lse = dense_prefill(q, k, v, torch.tensor([-3, 2, 1, 99]), torch.tensor([4, -(2**31), 5, 2**31 - 1]), empty_lse=-math.inf)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    alone, _ = dense_prefill(q[1:], k[5:], v[5:], torch.tensor([0, 5]), torch.tensor([0, 3]))
    torch.testing.assert_close(out[1:], alone)


def test_dense_prefill_is_dense_decode_of_one_page_where_values_are_keys() -> None:
    torch.manual_seed(0)
    q, pages = torch.randn(2, 3, 4, 576), torch.randn(2, 64, 2, 576)
    lengths = torch.tensor([64, 64], dtype=torch.int32)
    out, lse = dense_decode(q, pages, torch.tensor([[0], [1]], dtype=torch.int32), lengths, causal=True)
    keys = pages.flatten(0, 1)
    got, got_lse = dense_prefill(q.flatten(0, 1), keys, keys[..., :512], torch.tensor([0, 3, 6]), torch.tensor([0, 64, 128]), causal=True)
    torch.testing.assert_close(got.unflatten(0, (2, 3)), out)
    torch.testing.assert_close(got_lse.unflatten(0, (2, 3)).transpose(1, 2), lse)


def test_blocks_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(tokens, heads, 64) for tokens, heads in ((9, 6), (13, 2), (13, 2), (9, 6)))
    visible, live = visible_keys(9, 13, True, q.device), torch.rand(9, 6) < 0.8

    def compute() -> tuple[torch.Tensor, ...]:
        out = attention(q[:, :2].transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), 0.3, visible)
        return *out, *reference.attention_gradients(dout, (q, k, v), 0.3, visible, live)

    whole = compute()
    for scores in (1, 30, 120, 250):  # of a row, two rows, a head, two heads
        monkeypatch.setattr("cute_mla.reference.latent._BLOCK_SCORES", scores)
        for part, one in zip(compute(), whole, strict=True):
            assert part.dtype == torch.float32
            torch.testing.assert_close(part, one, rtol=ROUNDED, atol=1e-12)


def test_gradients_are_rounded_once() -> None:
    """One query row and head: with weights p, dv = p dout, dS = p (v dout - sum p v dout), dq = scale dS k, dk = scale dS q."""
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(tokens, 1, 64) for tokens in (1, 7, 7, 1))
    found = reference.attention_gradients(dout, (q, k, v), 0.3, visible_keys(1, 7, False, q.device), torch.ones(1, 1, dtype=torch.bool))
    q, k, v, dout = (tensor[:, 0].double() for tensor in (q, k, v, dout))
    weights = (k @ q[0] * 0.3).softmax(dim=0)
    dp = v @ dout[0]
    ds = 0.3 * weights * (dp - weights @ dp)
    for gradient, wanted in zip(found, (ds[None] @ k, torch.outer(ds, q[0]), torch.outer(weights, dout[0])), strict=True):
        torch.testing.assert_close(gradient[:, 0].double(), wanted, rtol=ROUNDED, atol=1e-12)


def test_merged_states_are_rounded_once() -> None:
    torch.manual_seed(0)
    outs, lses = torch.randn(5, 3, 64), 3 * torch.randn(5, 3)
    out, lse = reference.merge_states(outs, lses)
    weights = lses.double().softmax(dim=0).unsqueeze(-1)
    torch.testing.assert_close(out.double(), (weights * outs).sum(dim=0), rtol=ROUNDED, atol=1e-12)
    torch.testing.assert_close(lse.double(), lses.double().logsumexp(dim=0), rtol=ROUNDED, atol=0)
