"""Dense decode on the simulated device over its shapes: heads, query tokens, pages, splits, types and values."""

from __future__ import annotations

import pytest

from cute_mla.spec.mla import MAX_HEADS
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from tests.support.bench import Bench


@pytest.mark.parametrize(
    ("h_q", "h_kv"), [(1, 1), (3, 1), (3, 3), (9, 1), (9, 3), (16, 2), (63, 1), (63, 3), (64, 8), (126, 1), (126, 3), (128, 1), (128, 8)]
)
def test_heads(bench: Bench, h_q: int, h_kv: int) -> None:
    bench.judge(DenseDecodeCase("fp16" if h_kv > 1 else "bf16", s_k=90, h_q=h_q, h_kv=h_kv, sm_count=h_kv))


@pytest.mark.slow
@pytest.mark.parametrize("h_q", range(1, MAX_HEADS + 1))
def test_every_number_of_heads(bench: Bench, h_q: int) -> None:
    bench.judge(DenseDecodeCase(lengths=(70,), h_q=h_q, outputs="strided", sm_count=1))


@pytest.mark.parametrize(("s_q", "h_q"), [(1, 1), (3, 21), (2, 32), (13, 5), (1, 127), (2, 64), (3, 43), (3, 64), (5, 128)])
def test_rows_around_tiles(bench: Bench, s_q: int, h_q: int) -> None:
    """1, 63, 64, 65, 127, 128, 129, 192 and 640 rows: the last of a CTA, the first of the next one, of the next pair of CTAs."""
    bench.judge(DenseDecodeCase("fp16", batch=2, lengths=(130, 3), s_q=s_q, h_q=h_q, causal=True, outputs="strided", sm_count=4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 3, 4, 9])
def test_query_tokens(bench: Bench, s_q: int, causal: bool) -> None:
    bench.judge(DenseDecodeCase(batch=2, lengths=(70, 130), s_q=s_q, h_q=20, causal=causal, sm_count=4))


def test_query_tokens_that_share_a_tile_with_their_neighbours(bench: Bench) -> None:
    bench.judge(DenseDecodeCase(batch=2, lengths=(70, 3), s_q=3, h_q=48, causal=True, sm_count=4))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 192])
def test_page_sizes(bench: Bench, page_size: int, dtype: str) -> None:
    bench.judge(DenseDecodeCase(dtype, batch=2, lengths=(200, 33), h_q=8, page_size=page_size, sm_count=2))


@pytest.mark.parametrize("sm_count", [1, 2, 3, 7, 132, 1023])
def test_numbers_of_splits(bench: Bench, sm_count: int) -> None:
    bench.judge(DenseDecodeCase(batch=2, lengths=(1500, 100), h_q=8, sm_count=sm_count))


def test_splits_of_several_row_tiles_and_kv_heads(bench: Bench) -> None:
    bench.judge(DenseDecodeCase(batch=3, lengths=(300, 0, 700), s_q=3, h_q=128, h_kv=2, causal=True, sm_count=40))


@pytest.mark.parametrize("length", [1, 16, 17, 63, 64, 65, 127, 128, 129])
def test_lengths_around_tiles_and_pages(bench: Bench, length: int) -> None:
    bench.judge(DenseDecodeCase(lengths=(length,), s_q=2, h_q=5, page_size=16, causal=True, sm_count=1))


def test_many_requests_for_few_sms(bench: Bench) -> None:
    bench.judge(DenseDecodeCase("fp16", batch=40, s_k=30, h_q=4, varlen=True, zero_lengths=True, sm_count=3))


@pytest.mark.parametrize("values", ["rising", "falling", "peaks"])
@pytest.mark.parametrize("sm_count", [1, 5])
def test_scores_of_a_wide_range(bench: Bench, values: str, sm_count: int) -> None:
    bench.judge(DenseDecodeCase("fp16" if sm_count == 1 else "bf16", s_k=600, h_q=16, values=values, sm_count=sm_count))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_softmax_scales(bench: Bench, scale: float) -> None:
    bench.judge(DenseDecodeCase(s_k=200, h_q=16, softmax_scale=scale, sm_count=2))


@pytest.mark.parametrize("metadata", ["tensors", "object"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_both_forms_of_metadata(bench: Bench, metadata: str, batch_invariant: bool) -> None:
    bench.judge(DenseDecodeCase(batch=3, s_k=150, varlen=True, metadata=metadata, batch_invariant=batch_invariant, sm_count=5))  # type: ignore[arg-type]
