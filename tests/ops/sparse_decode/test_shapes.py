"""Sparse decode on the simulated device over its shapes: heads, query tokens, formats, pages, indices, splits and values."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from cute_mla.spec.cache_format import FORMATS as CACHES
from cute_mla.spec.mla import MAX_HEADS
from cute_mla.spec.sparse_decode import QUERY_AND_CACHE
from cute_mla.testing.cases.sparse_decode import ROWS_APART, Pool, SparseCacheLayout, SparseDecodeCase
from tests.support.bench import Bench

FORMATS = pytest.mark.parametrize(("dtype", "cache"), QUERY_AND_CACHE)


@pytest.mark.parametrize("h_q", [1, 3, 8, 16, 48, 63, 64, 65, 96, 127, 128])
def test_heads(bench: Bench, h_q: int) -> None:
    cache = "fp8_584" if h_q % 2 else "fp8_656"
    bench.judge(SparseDecodeCase(cache=cache, h_q=h_q, main=Pool(100, 90), sinks="drawn", sm_count=2))


@pytest.mark.slow
@pytest.mark.parametrize("h_q", range(1, MAX_HEADS + 1))
def test_every_number_of_heads(bench: Bench, h_q: int) -> None:
    bench.judge(SparseDecodeCase(h_q=h_q, main=Pool(100, 70), outputs="strided", sm_count=1))


@FORMATS
@pytest.mark.parametrize("topk", [1, 63, 64, 65, 129])
def test_numbers_of_indices(bench: Bench, dtype: str, cache: str, topk: int) -> None:
    powers = CACHES[cache].scale == "fp32" and CACHES[cache].quantised > 0 and topk == 1
    bench.judge(SparseDecodeCase(dtype, cache=cache, h_q=5, main=Pool(200, topk), power_of_two=powers, sm_count=1))


@pytest.mark.slow
@FORMATS
def test_2048_indices_of_which_two_name_nothing(bench: Bench, dtype: str, cache: str) -> None:
    bench.judge(SparseDecodeCase(dtype, cache=cache, h_q=16, main=Pool(2046, 2048), sm_count=20))


@pytest.mark.parametrize("s_q", [1, 2, 3, 5])
@pytest.mark.parametrize("h_q", [16, 128])
def test_query_tokens(bench: Bench, s_q: int, h_q: int) -> None:
    bench.judge(SparseDecodeCase(cache="latent", batch=2, s_q=s_q, h_q=h_q, main=Pool(100, 70), indices="mixed", sm_count=8))


@pytest.mark.parametrize("page_size", [1, 2, 61, 64, 69, 576])
@FORMATS
def test_page_sizes(bench: Bench, dtype: str, cache: str, page_size: int) -> None:
    bench.judge(SparseDecodeCase(dtype, cache=cache, batch=2, h_q=8, main=Pool(150, 70, page_size), sm_count=2))


@FORMATS
@pytest.mark.parametrize(("page_size", "extra_page_size"), [(64, 2), (69, 64)])
def test_two_caches_with_pages_of_their_own(bench: Bench, dtype: str, cache: str, page_size: int, extra_page_size: int) -> None:
    main, extra = Pool(150, 70, page_size), Pool(90, 65, extra_page_size)
    bench.judge(SparseDecodeCase(dtype, cache=cache, batch=2, h_q=8, main=main, extra=extra, indices="mixed", sinks="drawn", sm_count=2))


CACHE_LAYOUTS = [
    (*kind, layout)
    for kind in QUERY_AND_CACHE
    for layout in get_args(SparseCacheLayout)
    if (kind[1] == "fp8_584" if layout == "tight" else CACHES[kind[1]].scales_inside or layout not in ROWS_APART)
]


@pytest.mark.parametrize(("dtype", "cache", "layout"), CACHE_LAYOUTS)
def test_layouts_of_the_cache(bench: Bench, dtype: str, cache: str, layout: str) -> None:
    case = SparseDecodeCase(dtype, cache=cache, batch=2, h_q=8, main=Pool(150, 70, 2), extra=Pool(90, 9, 4), sm_count=2)
    bench.judge(replace(case, cache_layout=layout))  # type: ignore[arg-type]


@pytest.mark.parametrize("q_layout", ["sliced", "odd", "even", "heads_first"])
@pytest.mark.parametrize("outputs", ["strided", "odd"])
@FORMATS
def test_layouts_of_q_and_out(bench: Bench, dtype: str, cache: str, q_layout: str, outputs: str) -> None:
    bench.judge(
        SparseDecodeCase(dtype, cache=cache, h_q=70, main=Pool(90, 70), q_layout=q_layout, outputs=outputs, sm_count=4)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("sm_count", [1, 2, 3, 7, 148, 1023])
def test_numbers_of_splits(bench: Bench, sm_count: int) -> None:
    lengths = (1000, 100)
    bench.judge(
        SparseDecodeCase(batch=2, h_q=8, main=Pool(1200, 1000, 64, lengths), extra=Pool(200, 130), sinks="drawn", sm_count=sm_count)
    )


def test_many_requests_for_few_sms(bench: Bench) -> None:
    bench.judge(SparseDecodeCase(cache="fp8_584", batch=30, h_q=4, main=Pool(60, 40, 64, "zeros"), indices="mixed", sm_count=3))


@pytest.mark.parametrize("values", ["rising", "falling", "peaks", "spread", "coherent"])
@pytest.mark.parametrize("sm_count", [1, 10])
def test_values(bench: Bench, values: str, sm_count: int) -> None:
    bench.judge(SparseDecodeCase(h_q=16, main=Pool(600, 600), values=values, sm_count=sm_count))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_softmax_scales(bench: Bench, scale: float) -> None:
    bench.judge(SparseDecodeCase(cache="fp8_584", h_q=16, main=Pool(200, 150), softmax_scale=scale, sm_count=2))


@pytest.mark.parametrize("metadata", ["tensors", "object"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_both_forms_of_metadata(bench: Bench, metadata: str, batch_invariant: bool) -> None:
    case = SparseDecodeCase(batch=3, main=Pool(200, 150, 64, "edges"), extra=Pool(100, 70), batch_invariant=batch_invariant, sm_count=5)
    bench.judge(replace(case, metadata=metadata))  # type: ignore[arg-type]
