"""Every line of the edge contract that sparse prefill has, on the simulated device.

What the API refuses, and that it neither allocates nor copies, is tested without kernels in test_api.py and test_errors.py; that
equal inputs give equal bits, in test_bits.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.spec.split_plan import TILE_KEYS
from cute_mla.testing.cases.sparse_indices import INT_MAX, INT_MIN
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase, make_sparse_prefill_tensors
from cute_mla.testing.runner import call
from tests.support.bench import Bench, expect, identical

KINDS = pytest.mark.parametrize(("dtype", "d_qk"), [("bf16", 576), ("fp16", 512)])

SMALL = SparsePrefillCase(s_q=4, h_q=5, s_kv=150, topk=130, sm_count=4)


@KINDS
def test_lse_is_the_natural_logarithm_and_max_logits_are_in_natural_units(bench: Bench, dtype: str, d_qk: int) -> None:
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, topk=70, softmax_scale=0.25)
    tensors = make_sparse_prefill_tensors(case)
    tensors.q.zero_()
    tensors.q[1:, :, 3] = 1  # of token 0 every score is 0, so that lse = ln 70; of the others, what column 3 is
    _, max_logits, lse = bench.run(case, tensors)
    assert lse.dtype == max_logits.dtype == torch.float32
    torch.testing.assert_close(lse[0], torch.full((5,), math.log(70)), rtol=1e-6, atol=0)
    assert (max_logits[0] == 0).all()
    for token in range(1, 4):
        logits = tensors.kv[tensors.indices[token, 0].long(), 0, 3].float() / 4
        torch.testing.assert_close(max_logits[token], logits.max().expand(5), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("empty_lse", "sinks"), [(math.inf, "none"), (-math.inf, "infinite")])
@pytest.mark.parametrize("sm_count", [1, 132])
def test_a_token_that_attends_to_nothing(bench: Bench, empty_lse: float, sinks: str, sm_count: int) -> None:
    """Out 0, max_logits -inf and the lse asked for; between others on one group of CTAs, and alone."""
    case = replace(SMALL, s_q=6, lengths=(130, 0, 130, -5, 130, 130), empty_lse=empty_lse, sinks=sinks, sm_count=sm_count)  # type: ignore[arg-type]
    tensors = make_sparse_prefill_tensors(case)
    tensors.indices[2] = -1
    out, max_logits, lse = bench.run(case, tensors)
    for token in (1, 2, 3):
        assert (out[token] == 0).all()
        assert (max_logits[token] == -math.inf).all()
        assert (lse[token] == empty_lse).all()
    for token in (0, 4, 5):
        assert lse[token].isfinite().all()
    expect(case, tensors, (out, max_logits, lse))


@KINDS
def test_an_index_outside_the_rows_is_skipped(bench: Bench, dtype: str, d_qk: int) -> None:
    """A token for each value: here and there, and a tile of nothing else in front, in the middle or at the end."""
    invalid = [INT_MIN, -123456, -1, 150, 151, 114514, 1919810, 2_147_480_000, INT_MAX]
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, s_q=len(invalid), s_kv=150, topk=3 * TILE_KEYS + 5)
    tensors = make_sparse_prefill_tensors(case)
    for token, value in enumerate(invalid):
        tile = token % 3 * TILE_KEYS
        tensors.indices[token, 0, 3::7] = value
        tensors.indices[token, 0, tile : tile + TILE_KEYS] = value
    expect(case, tensors, bench.run(case, tensors))


def test_the_first_and_the_last_row_are_rows(bench: Bench) -> None:
    case = replace(SMALL, s_q=2, topk=2)
    tensors = make_sparse_prefill_tensors(case)
    tensors.kv[0], tensors.kv[-1] = 0.5, 0.25
    tensors.indices[:] = torch.tensor([[0, 150], [149, -1]], dtype=torch.int32)[:, None]
    out, max_logits, lse = bench.run(case, tensors)
    assert (out[0] == 0.5).all()
    assert (out[1] == 0.25).all()
    torch.testing.assert_close(max_logits, lse, rtol=1e-6, atol=0)
    expect(case, tensors, (out, max_logits, lse))


def test_an_index_that_is_repeated_counts_as_often(bench: Bench) -> None:
    case = replace(SMALL, topk=66)
    tensors = make_sparse_prefill_tensors(case)
    tensors.indices[..., 1:] = tensors.indices[..., :1]
    out, max_logits, lse = bench.run(case, tensors)
    torch.testing.assert_close(lse, max_logits + math.log(66), rtol=1e-5, atol=0)
    expect(case, tensors, (out, max_logits, lse))


@KINDS
def test_what_no_index_names_never_reaches_the_output(bench: Bench, dtype: str, d_qk: int) -> None:
    """NaN, infinities, and the largest values, whose products are infinite."""
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, h_q=70, topk=70, indices="mixed")
    tensors = make_sparse_prefill_tensors(case)
    unnamed = tensors.kv[:, 0, 0].isnan()
    assert unnamed.sum() > 10
    other = replace(tensors, kv=tensors.kv.clone())
    fill = torch.tensor([math.inf, -math.inf, torch.finfo(tensors.kv.dtype).max, 0.0]).repeat(len(unnamed))
    other.kv[unnamed] = fill[: int(unnamed.sum()), None, None].to(other.kv)
    assert identical(bench.run(case, other), bench.run(case, tensors))


def test_nan_in_a_row_that_is_named_reaches_the_tokens_that_name_it(bench: Bench) -> None:
    case = replace(SMALL, topk=40)
    tensors = make_sparse_prefill_tensors(case)
    row = int(tensors.indices[1, 0, 7])
    tensors.kv[row, 0, 5] = math.nan
    out, _, _ = bench.run(case, tensors)
    naming = (tensors.indices[:, 0] == row).any(dim=-1)
    assert 0 < naming.sum() < len(naming)
    assert torch.equal(out.isnan().any(dim=2).any(dim=1), naming)


def test_indices_beyond_the_length_do_not_count(bench: Bench) -> None:
    """The rows that they name are NaN, but for those that another index names."""
    lengths = (1, 129, 64, 65, 63, 128, 0, 1 << 30, -1, INT_MIN)
    bench.judge(replace(SMALL, s_q=10, s_kv=3000, lengths=lengths))


def test_sinks_scale_out_and_leave_lse_and_max_logits_alone(bench: Bench) -> None:
    case = replace(SMALL, s_q=1, h_q=8, s_kv=300, topk=300)
    tensors = make_sparse_prefill_tensors(case)
    out, max_logits, lse = bench.run(case, tensors)
    sinks = torch.tensor([-math.inf, math.inf, float(lse[0, 2]), 3.0, -1e30, -200.0, 200.0, 1e30])
    scaled, *same = bench.run(case, replace(tensors, attn_sink=sinks))
    assert identical(same, (max_logits, lse))  # type: ignore[arg-type]
    assert torch.equal(scaled[0, 0], out[0, 0])
    assert (scaled[0, 1] == 0).all()
    torch.testing.assert_close(scaled[0, 2].float(), out[0, 2].float() / 2, rtol=2**-7, atol=1e-6)
    expect(case, replace(tensors, attn_sink=sinks), (scaled, max_logits, lse))


@pytest.mark.parametrize(("dtype", "d_qk", "h_q"), [("bf16", 576, 5), ("fp16", 512, 70)])
@pytest.mark.parametrize("counts", [(64, 100), pytest.param((1, 63, 65, 127, 128, 129, 200), marks=pytest.mark.slow)])
def test_lse_indexer_is_lse_of_a_call_that_ends_there(bench: Bench, dtype: str, d_qk: int, h_q: int, counts: tuple[int, ...]) -> None:
    """Bit for bit, for every kind of length; sinks do not count, and the other results are those of a call without it."""
    lengths = (200, 0, 130, 64, 65, -1)
    case = SparsePrefillCase(
        dtype, d_qk=d_qk, s_q=len(lengths), h_q=h_q, s_kv=150, topk=200, lengths=lengths, indices="mixed", sinks="drawn", values="rising",
        sm_count=2,
    )  # fmt: skip
    tensors = make_sparse_prefill_tensors(case)
    tensors.indices[2, :, 64:128] = -1  # a tile without keys, at the bound and behind it
    without = bench.run(case, tensors)
    assert tensors.topk_length is not None
    for count in counts:
        *others, lse_indexer = bench.run(replace(case, indexer_topk=count), tensors)
        assert identical(tuple(others), without), count
        ended = replace(tensors, topk_length=tensors.topk_length.clamp(max=count))
        assert identical((lse_indexer,), bench.run(case, ended)[2:]), count


def test_lse_indexer_of_no_keys_is_that_of_a_row_that_attends_to_nothing(bench: Bench) -> None:
    case = replace(SMALL, s_q=3, empty_lse=-math.inf, indexer_topk=70, lengths=(130, 0, 130))
    tensors = make_sparse_prefill_tensors(case)
    tensors.indices[0, :, :70] = -1
    results = bench.run(case, tensors)
    assert (results[3][:2] == -math.inf).all()
    assert results[3][2].isfinite().all()
    assert results[2][0].isfinite().all()
    expect(case, tensors, results)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_a_row_behind_the_indexer_does_not_reach_its_lse(bench: Bench, value: float) -> None:
    """Not even in the same tile, and however much greater its score is."""
    case = replace(SMALL, s_q=2, topk=70, indexer_topk=40)
    tensors = make_sparse_prefill_tensors(case)
    tensors.indices[:] = torch.arange(70, dtype=torch.int32)
    tensors.kv.copy_(torch.randn(tensors.kv.shape, generator=torch.Generator().manual_seed(0)))
    expected = bench.run(case, tensors)[3]
    tensors.kv[40:70, 0, 5] = value
    out, _, _, lse_indexer = bench.run(case, tensors)
    assert identical((lse_indexer,), (expected,))
    assert value == 3e38 or not out.isfinite().all()


@pytest.mark.parametrize("empty", [{"s_kv": 0}, {"topk": 0}])
def test_nothing_to_attend_to(bench: Bench, empty: dict[str, int]) -> None:
    out, max_logits, lse = bench.run(replace(SMALL, indices="mixed", **empty))  # type: ignore[arg-type]
    assert (out == 0).all()
    assert (max_logits == -math.inf).all()
    assert (lse == math.inf).all()


@pytest.mark.parametrize("empty", [{"s_q": 0}, {"batch": 0, "form": "batched"}])
def test_no_tokens(bench: Bench, empty: dict[str, object]) -> None:
    case = replace(SMALL, **empty)  # type: ignore[arg-type]
    out, max_logits, lse = bench.run(case)
    assert out.numel() == 0
    assert out.shape == (*make_sparse_prefill_tensors(case).q.shape[:-1], 512)
    assert max_logits.shape == lse.shape == out.shape[:-1]


def test_what_a_neighbour_has_reaches_no_other_request(bench: Bench) -> None:
    """Indices are counted in the request's own rows; those before and behind belong to others."""
    case = SparsePrefillCase(batch=3, form="ragged", s_q=2, h_q=5, s_kv=100, topk=90, indices="mixed", sm_count=4)
    tensors = make_sparse_prefill_tensors(case)
    expected = bench.run(case, tensors)
    expect(case, tensors, expected)
    first, rows = case.row_ranges[2]
    other = replace(tensors, kv=tensors.kv.clone())
    other.kv[:first] = math.nan
    other.kv[first + rows :] = math.nan
    results = bench.run(case, other)
    assert identical(tuple(result[2] for result in results), tuple(result[2] for result in expected))
    assert results[0][0].isnan().any()


def test_operands_that_are_shared(bench: Bench) -> None:
    """One index row for all tokens, one row of q for all heads, one latent for all requests."""
    case = SparsePrefillCase(batch=2, form="batched", s_q=2, h_q=8, s_kv=100, topk=70, sm_count=4)
    tensors = make_sparse_prefill_tensors(replace(case, topk=100))
    shared = replace(
        tensors,
        q=tensors.q[:, :, :1].expand(-1, -1, 8, -1),
        indices=tensors.indices[:, :1, :, :70].expand(-1, 2, -1, -1),
        kv=tensors.kv[:1].expand(2, -1, -1, -1),
    )
    expect(case, shared, bench.run(case, shared))


def instructions(bench: Bench, case: SparsePrefillCase, indices: Tensor) -> int:
    """Return warp instructions of a call with these indices, after its answer was found right."""
    tensors = replace(make_sparse_prefill_tensors(case), indices=indices)
    with cute_mla.simulate(bench.arch, case.sm_count) as device:
        results = call(case, tensors)
        executed = device.instructions
    expect(case, tensors, results)
    return executed


@pytest.mark.parametrize("h_q", [16, 128])
def test_tiles_without_valid_indices_are_skipped(bench: Bench, h_q: int) -> None:
    """In front, in the middle or behind: 7 of 8 tiles cost less than half of their instructions, for indices and handshakes."""
    case = SparsePrefillCase(s_q=2, h_q=h_q, s_kv=8 * TILE_KEYS, topk=8 * TILE_KEYS, sm_count=2)
    every = make_sparse_prefill_tensors(case).indices
    full = instructions(bench, case, every)
    alone = instructions(bench, case, every[..., :TILE_KEYS])
    for tile in (0, 4, 7):
        indices = torch.full_like(every, -1)
        indices[..., tile * TILE_KEYS : (tile + 1) * TILE_KEYS] = every[..., :TILE_KEYS]
        assert instructions(bench, case, indices) < alone + (full - alone) / 2, f"tile {tile}"
