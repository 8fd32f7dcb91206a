"""Sparse cases are told apart by their ids, and their tensors hold the traps that they promise."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor

from cute_mla.cache import dequantise_cache
from cute_mla.spec.cache_format import FORMATS
from cute_mla.spec.sparse_decode import QUERY_AND_CACHE
from cute_mla.testing.cases.sparse_decode import (
    ROWS_APART,
    Pool,
    SparseCacheLayout,
    SparseDecodeCase,
    SparseDecodeTensors,
    SparseValues,
    make_sparse_decode_tensors,
)
from cute_mla.testing.cases.sparse_indices import FAR_BYTES, INT_MAX, INT_MIN
from cute_mla.testing.compare import LSE, SPARSE_DECODE_OUT, compare, same_bits
from cute_mla.testing.operations import OPERATIONS

CASE = SparseDecodeCase(batch=7, s_q=2, h_q=3, main=Pool(200, 130, 61, "edges"), extra=Pool(90, 70, 64, "edges"), indices="mixed")
SMALL = SparseDecodeCase(batch=2, h_q=2, main=Pool(40, 20, 16))


def pools(case: SparseDecodeCase, tensors: SparseDecodeTensors) -> list[tuple[Pool, Tensor, Tensor, tuple[int, ...]]]:
    """Return for each pool: itself, cache, indices, and how many indices are valid in each request."""
    found = [(case.main, tensors.k_cache, tensors.indices, case.counts[0])]
    if case.extra is not None:
        assert tensors.extra_k_cache is not None
        assert tensors.extra_indices is not None
        found.append((case.extra, tensors.extra_k_cache, tensors.extra_indices, case.counts[1]))
    return found


def named(indices: Tensor, counts: tuple[int, ...], slots: int) -> Tensor:
    """Bool [slots]: which slots the indices that count name."""
    used = torch.zeros(slots, dtype=torch.bool)
    for request, count in enumerate(counts):
        counted = indices[request, :, :count].flatten()
        used[counted[(counted >= 0) & (counted < slots)].long()] = True
    return used


def test_an_id_names_the_shape_and_what_is_unusual() -> None:
    assert SparseDecodeCase().id == "bf16-fp8_656-b1-q1-k512t64p64-h16"
    assert CASE.id == "bf16-fp8_656-b7-q2-k200t130p61_edgesxk90t70p64_edges-h3-idx_mixed"
    case = replace(SMALL, main=Pool(40, 20, 16, (3, 4)), sinks="drawn", power_of_two=True, index_layout="odd", seed=5, sm_count=3)
    assert case.id == "bf16-fp8_656-b2-q1-k40t20p16_3_4-h2-sinks_drawn-powers-idx_odd-sm3-seed5"


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="dtype is fp16 with a fp8_656 cache"):
        SparseDecodeCase("fp16")
    with pytest.raises(ValueError, match="got 1 for a batch of 2"):
        SparseDecodeCase(batch=2, main=Pool(10, 5, 64, (3,)))
    with pytest.raises(ValueError, match="'tight' is not one of fp8_656"):
        SparseDecodeCase(cache_layout="tight")
    with pytest.raises(ValueError, match="'padded_rows' is not one of fp8_584"):
        SparseDecodeCase(cache="fp8_584", cache_layout="padded_rows")


def test_lengths() -> None:
    assert SMALL.topk_lengths == (None,)
    assert SMALL.counts == ((20, 20),)
    assert CASE.topk_lengths == ((1, -70, 64, 65, 63, 0, 1 << 20), (65, 63, 0, 1 << 20, 1, -70, 64))
    assert CASE.counts == ((1, 0, 64, 65, 63, 0, 130), (65, 63, 0, 70, 1, 0, 64))
    assert CASE.key_counts == (66, 63, 64, 135, 64, 0, 194)
    drawn = SparseDecodeCase(batch=300, main=Pool(10, 9, 64, "drawn")).counts[0]
    assert set(drawn) == set(range(10))
    zeros = SparseDecodeCase(batch=300, main=Pool(10, 9, 64, "zeros")).counts[0]
    assert 100 < zeros.count(0) < 200
    assert zeros[0] == 0
    assert set(zeros) == set(range(10))


def test_tiles_count_tokens_times_keys() -> None:
    assert SparseDecodeCase(batch=2, s_q=3, h_q=128, main=Pool(512, 65)).tiles == 2 * 3 * 2 * 2
    assert CASE.tiles == 2 * (1 + 1 + 3 + 1 + 1 + 4 + 2)
    assert SparseDecodeCase(batch=3, h_q=1, main=Pool(8, 8, 64, (0, 0, 0)), extra=Pool(8, 60)).tiles == 3
    assert SparseDecodeCase(batch=0).tiles == 0


def test_tensors_have_the_shapes_of_the_call() -> None:
    tensors = make_sparse_decode_tensors(replace(CASE, outputs="given", sinks="drawn"))
    assert tensors.q.shape == (7, 2, 3, 576)
    assert tensors.k_cache.shape == (7 * 4 + 3, 61, 1, 656)
    assert tensors.indices.shape == (7, 2, 130)
    assert tensors.extra_k_cache is not None
    assert tensors.extra_k_cache.shape == (7 * 2 + 3, 64, 1, 656)
    assert tensors.extra_indices is not None
    assert tensors.extra_indices.shape == (7, 2, 70)
    assert tensors.topk_length is not None
    assert tensors.topk_length.tolist() == list(CASE.topk_lengths[0] or ())
    assert tensors.attn_sink is not None
    assert tensors.attn_sink.shape == (3,)
    assert tensors.output_buffers["out"].tensor.shape == (7, 2, 3, 512)
    assert tensors.indices.dtype == tensors.topk_length.dtype == torch.int32
    assert tensors.k_cache.dtype == torch.uint8


def test_the_same_case_gives_the_same_bits_and_another_seed_others() -> None:
    first, second, other = (
        make_sparse_decode_tensors(SMALL),
        make_sparse_decode_tensors(SMALL),
        make_sparse_decode_tensors(replace(SMALL, seed=1)),
    )
    assert same_bits(first.q, second.q)
    assert torch.equal(first.k_cache, second.k_cache)
    assert torch.equal(first.indices, second.indices)
    assert not same_bits(first.q, other.q)
    assert not torch.equal(first.indices, other.indices)


@pytest.mark.parametrize(("dtype", "cache"), QUERY_AND_CACHE)
@pytest.mark.parametrize("values", get_args(SparseValues))
def test_every_token_that_is_named_is_finite_and_every_other_is_nan(dtype: str, cache: str, values: str) -> None:
    case = replace(CASE, dtype=dtype, cache=cache, values=values)  # type: ignore[arg-type]
    tensors = make_sparse_decode_tensors(case)
    assert tensors.q.isfinite().all()
    for _, k_cache, indices, counts in pools(case, tensors):
        keys = dequantise_cache(k_cache, cache).flatten(0, 2)
        used = named(indices, counts, len(keys))
        assert 50 < used.sum() < len(keys) - 50
        assert keys[used].isfinite().all()
        assert keys[~used].isnan().all()


def test_padding_is_nan() -> None:
    case = replace(CASE, cache="fp8_584", main=Pool(200, 130, 6))
    k_cache = make_sparse_decode_tensors(case).k_cache
    pages = len(k_cache)
    assert k_cache.stride(0) == 7 * 576
    used = 6 * 584
    behind = k_cache.as_strided((pages, 7 * 576 - used), (7 * 576, 1), used)
    assert (behind == 0xFF).all()
    scales = k_cache.as_strided((pages, 6, 8), (7 * 576, 8, 1), 6 * 576)
    assert (scales[..., 7] == 0xFF).all()
    assert (scales[..., :7] != 0xFF).any()


def test_unreferenced_scales_are_nan() -> None:
    tensors = make_sparse_decode_tensors(SMALL)
    scales = tensors.k_cache[..., 512:528].clone().view(torch.float32).flatten(0, 2)
    used = named(tensors.indices, SMALL.counts[0], len(scales))
    assert scales[~used].isnan().all()
    assert scales[used].isfinite().all()
    assert (torch.frexp(scales[used]).mantissa != 0.5).all(), "not powers of two"
    powers = make_sparse_decode_tensors(replace(SMALL, power_of_two=True)).k_cache[..., 512:528].clone().view(torch.float32).flatten(0, 2)
    assert (torch.frexp(powers[used]).mantissa == 0.5).all()


def test_valid_indices_name_each_key_once() -> None:
    tensors = make_sparse_decode_tensors(replace(SMALL, main=Pool(40, 64, 16)))
    for token in tensors.indices.flatten(0, 1):
        valid = token[token >= 0]
        assert len(valid.unique()) == len(valid) == 40
        assert (token == -1).sum() == 24
        assert (token[:40] == -1).any(), "not all at the end"
    own = [set(request[request >= 0].tolist()) for request in tensors.indices]
    assert not own[0] & own[1], "requests share no key"


def test_mixed_indices_have_every_invalid_value_and_whole_tiles_of_them() -> None:
    case = SparseDecodeCase(batch=5, s_q=2, main=Pool(600, 500, 69), indices="mixed")
    tensors = make_sparse_decode_tensors(case)
    slots = tensors.k_cache.shape[0] * 69
    valid = (tensors.indices >= 0) & (tensors.indices < slots)
    assert set(tensors.indices[~valid].tolist()) == {INT_MIN, -123456, -1, slots, slots + 1, 2147480000, INT_MAX}
    rows, indices = valid.flatten(0, 1), tensors.indices.flatten(0, 1)
    assert 0.7 < rows[0].float().mean() < 0.9
    assert len(indices[0][rows[0]].unique()) < rows[0].sum(), "some are repeated"
    assert not rows[1][:64].any()
    assert rows[1][70:].any()
    assert rows[2][:61].any()
    assert not rows[2][61:133].any()
    assert rows[2][133:].any()
    assert not rows[3].any()
    assert rows[4][:250].any()
    assert not rows[4][250:].any()


def test_no_valid_index_at_all() -> None:
    tensors = make_sparse_decode_tensors(replace(CASE, indices="none"))
    assert (tensors.indices == -1).all()


def test_sinks() -> None:
    assert make_sparse_decode_tensors(SMALL).attn_sink is None
    drawn, infinite = (make_sparse_decode_tensors(replace(SMALL, h_q=6, sinks=sinks)).attn_sink for sinks in ("drawn", "infinite"))  # type: ignore[arg-type]
    assert drawn is not None
    assert drawn.isfinite().all()
    assert infinite is not None
    assert torch.equal(infinite[2::3], drawn[2::3])
    assert (infinite[0::3] == float("inf")).all()
    assert (infinite[1::3] == float("-inf")).all()


@pytest.mark.parametrize("values", ["rising", "falling"])
def test_ramps_move_the_scores_along_the_indices(values: str) -> None:
    case = SparseDecodeCase(h_q=1, main=Pool(640, 640), values=values)  # type: ignore[arg-type]
    tensors = make_sparse_decode_tensors(case)
    keys = dequantise_cache(tensors.k_cache, case.cache).flatten(0, 2)[tensors.indices[0, 0].long()]
    tiles = (keys @ tensors.q[0, 0, 0].float() / 24).view(10, 64).amax(dim=1)
    assert ((tiles.diff() if values == "rising" else -tiles.diff()) > 5).all(), "each tile moves the maximum by far"


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float8_e8m0fnu])
def test_coherent_values_tell_a_narrowed_scale(to: torch.dtype) -> None:
    """The kernel in error is one that rounds the scales of fp8_656; lse must be out of bounds, though out is not."""
    case = SparseDecodeCase(h_q=4, main=Pool(300, 128), values="coherent")
    tensors = make_sparse_decode_tensors(case)
    operation = OPERATIONS[case.op]
    expected = operation.reference(case, tensors)
    scales = tensors.k_cache[..., 512:528].clone().view(torch.float32)
    wrong = tensors.k_cache.clone()
    wrong[..., 512:528] = scales.to(to).float().view(torch.uint8)
    narrowed = operation.reference(case, replace(tensors, k_cache=wrong))
    assert not compare("lse", narrowed[1], expected[1], LSE).passed
    keys = dequantise_cache(tensors.k_cache, case.cache)
    once_rounded = replace(tensors, k_cache=keys.bfloat16())  # value times scale, rounded once, is within bounds
    allowed = operation.reference(replace(case, cache="latent"), once_rounded)
    for name, actual, wanted, tolerance in zip(("out", "lse"), allowed, expected, (SPARSE_DECODE_OUT, LSE), strict=True):
        assert compare(name, actual, wanted, tolerance).passed


def test_spread_values_have_scales_of_all_sizes() -> None:
    tensors = make_sparse_decode_tensors(replace(SMALL, main=Pool(40, 40, 16), values="spread"))
    scales = tensors.k_cache[..., 512:528].clone().view(torch.float32).flatten()
    scales = scales[scales.isfinite()]
    assert scales.max() / scales.min() > 50


LAYOUTS = [
    (dtype, cache, layout)
    for dtype, cache in QUERY_AND_CACHE
    for layout in get_args(SparseCacheLayout)
    if (cache == "fp8_584" if layout == "tight" else FORMATS[cache].scales_inside or layout not in ROWS_APART)
]


@pytest.mark.parametrize(("dtype", "cache", "layout"), LAYOUTS)
def test_a_layout_of_the_cache_changes_strides_and_no_value(dtype: str, cache: str, layout: str) -> None:
    case = replace(SMALL, dtype=dtype, cache=cache, main=Pool(40, 20, 2))
    tensors, packed = make_sparse_decode_tensors(replace(case, cache_layout=layout)), make_sparse_decode_tensors(case)  # type: ignore[arg-type]
    used = named(tensors.indices, case.counts[0], packed.k_cache.shape[0] * 2)
    keys = [dequantise_cache(cached, cache).flatten(0, 2)[used] for cached in (tensors.k_cache, packed.k_cache)]
    assert torch.equal(*keys)
    assert torch.equal(tensors.indices, packed.indices)
    nbytes = tensors.k_cache.element_size()
    assert tensors.k_cache.stride(0) * nbytes % 16 == 0
    assert tensors.k_cache.storage_offset() * nbytes % 16 == 0
    if layout == "far_rows":
        assert tensors.k_cache.stride(1) * nbytes >= FAR_BYTES
    if layout == "far":
        assert (len(tensors.k_cache) - 1) * tensors.k_cache.stride(0) * nbytes >= FAR_BYTES
        assert (tensors.indices // 2 == len(tensors.k_cache) - 1).any(), "the last page is used"


def test_odd_index_rows_are_aligned_to_nothing() -> None:
    tensors, packed = make_sparse_decode_tensors(replace(SMALL, index_layout="odd")), make_sparse_decode_tensors(SMALL)
    assert torch.equal(tensors.indices, packed.indices)
    assert tensors.indices.stride() == (23, 23, 1)
    assert tensors.indices.storage_offset() == 1


def test_an_empty_batch_has_empty_operands() -> None:
    tensors = make_sparse_decode_tensors(SparseDecodeCase(batch=0, outputs="given", extra=Pool(8, 4, 64, "drawn")))
    assert tensors.q.shape == (0, 1, 16, 576)
    assert tensors.indices.shape == (0, 1, 64)
    assert tensors.extra_topk_length is not None
    assert tensors.extra_topk_length.shape == (0,)
