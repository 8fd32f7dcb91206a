"""Edges of sparse decode that no case of the suites draws, on the simulated device.

The API's refusals are tested without kernels in test_errors.py; its allocations in test_api.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_mla.cache import dequantise_cache
from cute_mla.ops.cache_codec import parts_of
from cute_mla.spec.arch import SM90, SM120
from cute_mla.spec.cache_format import CacheFormat
from cute_mla.spec.dense_decode import TILE_ROWS
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.sparse_decode import DECODED as CACHES
from cute_mla.spec.sparse_decode import FEW_HEADS, QUERY_AND_CACHE, SPREAD_ROWS
from cute_mla.testing.cases.sparse_indices import INT_MAX, INT_MIN
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase, make_sparse_decode_tensors
from tests.support.bench import Bench, expect, identical
from tests.support.launched import record_launches

FORMATS = pytest.mark.parametrize(("dtype", "cache"), QUERY_AND_CACHE)
QUANTISED = [cache for cache, layout in CACHES.items() if layout.quantised]
FP8 = pytest.mark.parametrize("cache", QUANTISED)
PAIRS = pytest.mark.parametrize(
    ("cache", "extra_cache"), [*((cache, "") for cache in QUANTISED), ("v41_paged", "v41_fp4")], ids=[*QUANTISED, "v41_fp4"]
)

SMALL = SparseDecodeCase(batch=2, s_q=2, h_q=5, main=Pool(150, 130, 61), sm_count=6)


def with_unnamed(cache: Tensor, layout: CacheFormat, numbers: tuple[int, ...]) -> Tensor:
    """Return a cache whose tokens that no index names, which are NaN, have other bytes, scales and padding included.

    numbers: all bytes of such a token; one of them for each token in turn.
    """
    unnamed = dequantise_cache(cache, layout.name)[:, :, 0].isnan().all(dim=-1)
    byte = torch.tensor(numbers, dtype=torch.uint8)[torch.arange(int(unnamed.sum())) % len(numbers), None]
    filled = cache.clone(memory_format=torch.contiguous_format)
    parts = parts_of("cache", filled, layout)
    for part in parts:
        part[unnamed] = byte
    parts.scales[..., layout.groups * layout.bytes_of_scale :] = numbers[0]
    return filled


@pytest.mark.in_turn
@PAIRS
def test_what_no_index_names_never_reaches_the_output(bench: Bench, cache: str, extra_cache: str) -> None:
    """NaN values, NaN scales, and finite ones whose products are infinite."""
    case = replace(SMALL, cache=cache, extra_cache=extra_cache, main=Pool(150, 70, 6), extra=Pool(90, 70, 2), indices="mixed")
    tensors = make_sparse_decode_tensors(case)
    assert tensors.extra_k_cache is not None
    expected = bench.run(case, tensors)
    for numbers in ((0xFF, 0x7F, 0x7E, 0xFE, 0), (0x7E, 0xFE)):
        k_cache = with_unnamed(tensors.k_cache, case.format, numbers)
        extra_k_cache = with_unnamed(tensors.extra_k_cache, case.extra_format, numbers)
        other = replace(tensors, k_cache=k_cache, extra_k_cache=extra_k_cache)
        assert not torch.equal(other.k_cache, tensors.k_cache)
        assert identical(bench.run(case, other), expected), numbers


def test_nan_in_a_token_that_is_named_does_reach_the_output(bench: Bench) -> None:
    tensors = make_sparse_decode_tensors(SMALL)
    slot = int(tensors.indices[0, 0, 7])
    tensors.k_cache[slot // 61, slot % 61, 0, 5] = 0x7F
    out, _ = bench.run(SMALL, tensors)
    assert out[0, 0].isnan().any()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("sink", [-1e30, -200.0, 200.0, 1e30])
def test_sinks_far_from_the_scores(bench: Bench, sink: float) -> None:
    tensors = replace(make_sparse_decode_tensors(SMALL), attn_sink=torch.full((5,), sink))
    out, lse = bench.run(SMALL, tensors)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    expect(SMALL, tensors, (out, lse), bench.arch)


def test_every_e4m3_value_and_scales_of_every_size(bench: Bench) -> None:
    """All finite codes, under a very small, a small, a usual and a large scale."""
    case = SparseDecodeCase(h_q=2, main=Pool(64, 64), sm_count=1)
    tensors = make_sparse_decode_tensors(case)
    tensors.q[..., :512] = 0  # scores are of the RoPE columns alone
    codes = torch.arange(256, dtype=torch.uint8)
    codes[127::128] = 0
    scales = torch.tensor([2.0**-126, 1.37e-20, 3.1, 1.7e9])
    tensors.k_cache[..., :512] = codes.repeat(2)
    tensors.k_cache[..., 512:528] = scales.view(torch.uint8)
    out, lse = bench.run(case, tensors)
    expect(case, tensors, (out, lse), bench.arch)
    values = codes.view(torch.float8_e4m3fn).float()
    expected = torch.cat([values[:128] * scales[0], values[128:] * scales[1], values[:128] * scales[2], values[128:] * scales[3]])
    torch.testing.assert_close(out[0, 0, 0].float(), expected, rtol=2**-6, atol=1e-37)


@pytest.mark.in_turn
@FP8
def test_byte_types_of_a_cache_are_the_same(bench: Bench, cache: str) -> None:
    case = replace(SMALL, cache=cache)
    tensors = make_sparse_decode_tensors(case)
    expected = bench.run(case, tensors)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert identical(bench.run(case, replace(tensors, k_cache=tensors.k_cache.view(dtype))), expected)


@pytest.mark.in_turn
@FORMATS
def test_a_cache_without_pages_has_no_valid_index(bench: Bench, dtype: str, cache: str) -> None:
    case = replace(SMALL, dtype=dtype, cache=cache, extra=Pool(60, 20), indices="none", empty_lse=-math.inf)
    tensors = make_sparse_decode_tensors(case)
    tensors.indices[:, :, :6] = torch.tensor([0, 1, 60, INT_MAX, INT_MIN, -1])
    out, lse = bench.run(case, replace(tensors, k_cache=tensors.k_cache[:0]))
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    second = replace(SMALL, dtype=dtype, cache=cache, extra=Pool(60, 20))
    tensors = make_sparse_decode_tensors(second)
    given = replace(tensors, k_cache=torch.empty_like(tensors.k_cache[:0]))
    tensors.indices.fill_(-1)
    expect(second, tensors, bench.run(second, given), bench.arch)


@pytest.mark.parametrize("few_heads", [True, False])
def test_calls_with_few_heads_take_their_kernels_unless_told_otherwise(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, few_heads: bool
) -> None:
    launched = record_launches(monkeypatch)
    for h_q in (FEW_HEADS, FEW_HEADS + 1):
        bench.run(replace(SMALL, h_q=h_q, few_heads=few_heads))
    assert [name.endswith("few_heads") for name in launched if "sparse_decode" in name] == [few_heads and bench.arch is SM90, False]


@pytest.mark.parametrize("h_q", [40, 70])
def test_bits_do_not_depend_on_the_heads_of_a_cta(h_q: int) -> None:
    """On RTX boards with many SMs a CTA has half as many heads where few parts of the plan have keys."""
    case = replace(SMALL, batch=1, s_q=1, h_q=h_q, sinks="drawn", batch_invariant=True)
    bench = Bench(SM120)
    few, many = (replace(case, sm_count=count) for count in (2, 48))
    grids = [one.problem(SM120).grid(one.sm_count or 0)[0] for one in (few, many)]
    assert grids == [ceil_div(h_q, TILE_ROWS), ceil_div(h_q, SPREAD_ROWS)]
    assert identical(bench.run(few), bench.run(many))
