"""Cases are told apart by their ids, and their tensors hold the traps that they promise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cute_mla.spec.dense_decode import FP8, FP8_CACHE, LATENT
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.cases.dense_decode import (
    DESCALE_K,
    DESCALE_Q,
    UNUSED_TABLE_ENTRY,
    DenseDecodeCase,
    DenseDecodeTensors,
    make_dense_decode_tensors,
)
from cute_mla.testing.cases.far import FAR_ELEMENTS
from cute_mla.testing.compare import same_bits

PAGED = DenseDecodeCase(batch=3, s_q=2, lengths=(37, 0, 130), h_q=6, h_kv=2, page_size=32)


def keys_of(case: DenseDecodeCase, tensors: DenseDecodeTensors, request: int) -> Tensor:
    """Return all slots of the pages that a request uses: [pages * page, h_kv, 576]."""
    pages = tensors.block_table[request, : case.pages[request]].long()
    return tensors.k_cache[pages].flatten(0, 1)


def test_an_id_names_the_shape_and_what_is_unusual() -> None:
    assert DenseDecodeCase().id == "bf16-b1-q1-k128-h16x1-p64"
    case = DenseDecodeCase("fp16", batch=2, s_q=3, s_k=140, varlen=True, causal=True, h_q=6, h_kv=2, page_size=16, zero_lengths=True)
    assert case.id == "fp16-b2-q3-k140v-h6x2-p16-causal-zeros"
    assert replace(PAGED, q_layout="odd", softmax_scale=0.25, sm_count=7).id == "bf16-b3-q2-k37_0_130-h6x2-p32-q_odd-scale0.25-sm7"


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 for a batch of 1"):
        DenseDecodeCase(lengths=(1, 2))
    with pytest.raises(ValueError, match="multiple of h_kv, got 9 and 2"):
        DenseDecodeCase(h_q=9, h_kv=2)
    with pytest.raises(ValueError, match="got 'fp8_cache' with h_kv 2"):
        DenseDecodeCase(h_q=8, h_kv=2, operands=FP8_CACHE)
    with pytest.raises(ValueError, match="got 'fp4'"):
        DenseDecodeCase(operands="fp4")
    with pytest.raises(ValueError, match="out is bf16 for e4m3 queries unless it is given, got fp16"):
        DenseDecodeCase("fp16", operands=FP8)


def test_lengths_are_drawn_as_flashmla_draws_them() -> None:
    assert DenseDecodeCase(batch=3, s_k=140).key_lengths == (140, 140, 140)
    varied = DenseDecodeCase(batch=200, s_q=4, s_k=140, varlen=True).key_lengths
    assert min(varied) == 4
    assert max(varied) > 200
    assert 120 < sum(varied) / 200 < 160
    assert varied == DenseDecodeCase(batch=200, s_q=4, s_k=140, varlen=True).key_lengths
    assert varied != DenseDecodeCase(batch=200, s_q=4, s_k=140, varlen=True, seed=1).key_lengths


def test_about_half_of_the_zero_length_cases_requests_are_empty() -> None:
    lengths = DenseDecodeCase(batch=200, s_k=140, zero_lengths=True).key_lengths
    assert set(lengths) == {0, 140}
    assert 60 < lengths.count(0) < 140
    assert DenseDecodeCase(batch=1, s_k=140, zero_lengths=True).key_lengths == (0,)


def test_tiles_count_query_rows_times_keys() -> None:
    assert DenseDecodeCase(batch=2, s_k=65, h_q=64).tiles == 4
    assert DenseDecodeCase(s_q=2, s_k=64, h_q=126, h_kv=2).tiles == 4
    assert DenseDecodeCase(batch=2, lengths=(0, 1), h_q=1).tiles == 2


def test_masked_rows_need_a_request_shorter_than_its_queries() -> None:
    assert DenseDecodeCase(s_q=4, lengths=(3,), causal=True).has_masked_rows
    assert not DenseDecodeCase(s_q=4, lengths=(4,), causal=True).has_masked_rows
    assert not DenseDecodeCase(s_q=4, lengths=(3,)).has_masked_rows


def test_tensors_have_the_shapes_of_the_call() -> None:
    tensors = make_dense_decode_tensors(replace(PAGED, outputs="given"))
    assert tensors.q.shape == (3, 2, 6, 576)
    assert tensors.k_cache.shape == (2 + 5 + 3, 32, 2, 576)
    assert tensors.block_table.shape == (3, 7)
    assert tensors.cache_seqlens.tolist() == [37, 0, 130]
    assert list(tensors.output_buffers) == ["out", "lse"]
    assert tensors.output_buffers["out"].tensor.shape == (3, 2, 6, 512)
    assert tensors.output_buffers["lse"].tensor.shape == (3, 6, 2)
    assert {tensors.block_table.dtype, tensors.cache_seqlens.dtype} == {torch.int32}
    assert {tensors.q.dtype, tensors.k_cache.dtype, tensors.output_buffers["out"].tensor.dtype} == {torch.bfloat16}


@pytest.mark.parametrize("operands", [LATENT, FP8_CACHE, FP8])
def test_e4m3_operands_are_those_of_16_bits_rounded(operands: str) -> None:
    """And have scales that no power of two makes up for."""
    case = DenseDecodeCase(batch=2, lengths=(37, 130), values="peaks")
    exact, tensors = make_dense_decode_tensors(case), make_dense_decode_tensors(replace(case, operands=operands))
    pairs = ((tensors.q, exact.q, tensors.descale_q, DESCALE_Q), (tensors.k_cache, exact.k_cache, tensors.descale_k, DESCALE_K))
    for (given, wanted, scale, value), fp8 in zip(pairs, (operands == FP8, operands != LATENT), strict=True):
        assert given.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16)
        assert (scale is not None) == fp8
        if scale is not None:
            assert scale.tolist() == pytest.approx([value])
        values = given.float() * (1.0 if scale is None else scale)
        assert torch.equal(values.isnan(), wanted.isnan())
        torch.testing.assert_close(values, wanted.float(), rtol=2**-4 + 2**-8, atol=value * 2**-10, equal_nan=True)
        assert math.frexp(value)[0] != 0.5


def test_rows_of_e4m3_begin_at_any_byte() -> None:
    assert [DenseDecodeCase(q_layout=layout, operands=FP8).row_alignment for layout in ("packed", "even", "odd")] == [16, 2, 1]
    assert [DenseDecodeCase(q_layout=layout, operands=FP8_CACHE).row_alignment for layout in ("packed", "even", "odd")] == [16, 4, 2]


def test_the_same_case_gives_the_same_bits_and_another_seed_others() -> None:
    first, second, other = (
        make_dense_decode_tensors(PAGED),
        make_dense_decode_tensors(PAGED),
        make_dense_decode_tensors(replace(PAGED, seed=1)),
    )
    assert same_bits(first.q, second.q)
    assert same_bits(first.k_cache, second.k_cache)
    assert torch.equal(first.block_table, second.block_table)
    assert not same_bits(first.q, other.q)
    assert not torch.equal(first.block_table, other.block_table)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", ["normal", "rising", "falling", "peaks"])
def test_q_and_used_keys_are_finite(dtype: str, values: str) -> None:
    case = replace(PAGED, dtype=dtype, values=values)  # type: ignore[arg-type]
    tensors = make_dense_decode_tensors(case)
    assert tensors.q.isfinite().all()
    for request, length in enumerate(case.key_lengths):
        assert keys_of(case, tensors, request)[:length].isfinite().all()


def test_everything_unused_in_the_cache_is_nan() -> None:
    tensors = make_dense_decode_tensors(PAGED)
    used = torch.zeros(tensors.k_cache.shape[:2], dtype=torch.bool)
    for request, length in enumerate(PAGED.key_lengths):
        for position in range(length):
            page = int(tensors.block_table[request, position // 32])
            assert not used[page, position % 32], "two keys share a slot"
            used[page, position % 32] = True
    assert (~used).sum() > 3 * 32
    assert tensors.k_cache[~used].isnan().all()


def test_unused_table_entries_are_out_of_range() -> None:
    tensors = make_dense_decode_tensors(PAGED)
    for request, pages in enumerate(PAGED.pages):
        assert (tensors.block_table[request, pages:] == UNUSED_TABLE_ENTRY).all()
        assert (tensors.block_table[request, :pages] < len(tensors.k_cache)).all()


def test_pages_are_shuffled() -> None:
    pages = make_dense_decode_tensors(DenseDecodeCase(s_k=64 * 40)).block_table[0, :40].tolist()
    assert len(set(pages)) == 40
    assert pages != sorted(pages)


def test_ramps_move_the_scores_monotonically() -> None:
    for values, sign in (("rising", 1), ("falling", -1)):
        case = DenseDecodeCase(s_k=640, h_q=1, values=values)  # type: ignore[arg-type]
        tensors = make_dense_decode_tensors(case)
        scores = keys_of(case, tensors, 0)[:640, 0].float() @ tensors.q[0, 0, 0].float() / 24
        tiles = sign * scores.view(10, 64).amax(dim=1)
        assert (tiles.diff() > 5).all(), "each tile moves the maximum by far"


def test_peaks_stand_out() -> None:
    case = DenseDecodeCase(s_k=640, h_q=1, values="peaks")
    tensors = make_dense_decode_tensors(case)
    scores = keys_of(case, tensors, 0)[:640, 0].float() @ tensors.q[0, 0, 0].float() / 24
    assert 1 <= (scores > 30).sum() < 40
    assert (scores < 5).sum() > 600


@pytest.mark.parametrize("layout", ["packed", "sliced", "odd", "heads_first"])
def test_a_layout_of_q_changes_strides_and_no_value(layout: str) -> None:
    case = replace(PAGED, q_layout=layout)  # type: ignore[arg-type]
    q, packed = make_dense_decode_tensors(case).q, make_dense_decode_tensors(PAGED).q
    assert same_bits(q, packed)
    assert q.stride(-1) == 1
    assert q.is_contiguous() == (layout == "packed")
    rows_aligned = all(stride % 8 == 0 for stride in q.stride()[:3]) and q.storage_offset() % 8 == 0
    assert rows_aligned == (layout != "odd")


@pytest.mark.parametrize("layout", ["layers", "padded_rows", "heads_first"])
def test_a_layout_of_the_cache_changes_strides_and_no_value(layout: str) -> None:
    case = replace(PAGED, cache_layout=layout)  # type: ignore[arg-type]
    tensors, packed = make_dense_decode_tensors(case), make_dense_decode_tensors(PAGED)
    assert same_bits(tensors.k_cache, packed.k_cache)
    assert torch.equal(tensors.block_table, packed.block_table)
    assert not tensors.k_cache.is_contiguous()
    assert all(stride % 8 == 0 for stride in tensors.k_cache.stride()[:3])


def test_what_lies_between_strided_rows_is_nan() -> None:
    tensors = make_dense_decode_tensors(replace(PAGED, q_layout="sliced", cache_layout="padded_rows", outputs="strided"))
    whole_row = tensors.q.as_strided((640,), (1,), tensors.q.storage_offset() - 32)
    assert whole_row[:32].isnan().all()
    assert whole_row[-32:].isnan().all()
    for given in tensors.output_buffers.values():
        assert given.storage.isnan().all()
        assert not given.tensor.is_contiguous()


@pytest.mark.parametrize(("outputs", "aligned"), [("strided", True), ("odd", False)])
def test_strided_outputs_leave_room_on_every_side(outputs: str, aligned: bool) -> None:
    given = make_dense_decode_tensors(replace(PAGED, outputs=outputs)).output_buffers  # type: ignore[arg-type]
    out = given["out"].tensor
    assert out.shape == (3, 2, 6, 512)
    assert given["lse"].tensor.shape == (3, 6, 2)
    assert (all(stride % 8 == 0 for stride in out.stride()[:3]) and out.storage_offset() % 8 == 0) == aligned
    for tensor, storage in given.values():
        tensor.fill_(0)
        assert storage.isnan().sum() == storage.numel() - tensor.numel() > 0


def test_the_far_cache_lies_beyond_what_32_bits_can_index() -> None:
    case = DenseDecodeCase(s_k=100, cache_layout="far")
    tensors = make_dense_decode_tensors(case)
    first_page = int(tensors.block_table[0, 0])
    assert first_page * tensors.k_cache.stride(0) >= FAR_ELEMENTS
    keys = keys_of(case, tensors, 0)
    assert keys[:100].isfinite().all()
    assert keys[100:].isnan().all()


def test_an_empty_batch_has_empty_operands() -> None:
    tensors = make_dense_decode_tensors(DenseDecodeCase(batch=0, outputs="given"))
    assert tensors.q.shape == (0, 1, 16, 576)
    assert tensors.block_table.shape[0] == 0
    assert tensors.cache_seqlens.shape == (0,)
