"""Dense prefill's cases are told apart by their ids, and their tensors hold the traps that they promise."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import get_args

import pytest
import torch

from cute_mla.testing.cases.base import Values
from cute_mla.testing.cases.dense_prefill import DensePrefillCase, Ends, KvLayout, Neighbours, make_dense_prefill_tensors
from cute_mla.testing.compare import ErrorLimit, compare, same_bits
from cute_mla.testing.low_precision import error_limits, low_precision_attention
from cute_mla.testing.operations import operation
from tests.support.bench import expect

SMALL = DensePrefillCase(lengths=((20, 30), (7, 5), (0, 9), (4, 0), (3, 40)), h_kv=2, group=3, outputs="given")
OPERATION = operation(SMALL)
KINDS = pytest.mark.parametrize(("dtype", "d_qk"), list(product(("bf16", "fp16"), (192, 128))))


def test_an_id_names_the_shape_and_what_is_unusual() -> None:
    assert DensePrefillCase().id == "bf16-d192-128x128-h1x1-full"
    case = replace(SMALL, d_qk=128, causal=True, ends="clipped", neighbours="nan", kv_layout="kvpacked", seed=5, lengths=((3, 4), (1, 2)))
    assert case.id == "bf16-d128-3x4_1x2-h2x3-causal-clipped-nan_neighbours-kv_kvpacked-out_given-seed5"


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="d_qk is 576"):
        DensePrefillCase(d_qk=576)
    with pytest.raises(ValueError, match="rows that see no key"):
        DensePrefillCase(lengths=((1, 1), (5, 4)), neighbours="nan", causal=True)
    for causal, lengths in ((False, ((1, 1), (5, 4))), (True, ((1, 1), (5, 5), (9, 3))), (True, ((1, 1), (5, 0)))):
        DensePrefillCase(lengths=lengths, neighbours="nan", causal=causal)


def test_tiles_count_what_is_seen() -> None:
    assert DensePrefillCase(lengths=((65, 129), (64, 64)), h_kv=2, group=3).tiles == (2 * 3 + 1) * 6
    assert DensePrefillCase(lengths=((192, 192),), causal=True).tiles == 1 + 2 + 3
    assert DensePrefillCase(lengths=((128, 192),), causal=True).tiles == 2 + 3
    assert DensePrefillCase(lengths=((192, 64),), causal=True).tiles == 3, "blocks of rows that see nothing count as one"
    assert DensePrefillCase(lengths=((64, 0), (0, 64), (0, 0))).tiles == 1
    assert DensePrefillCase(lengths=()).tiles == 0


@pytest.mark.parametrize("ends", get_args(Ends))
@pytest.mark.parametrize("outputs", ["allocated", "strided"])
def test_tensors_have_the_shapes_of_the_call(ends: str, outputs: str) -> None:
    case = replace(SMALL, ends=ends, outputs=outputs)  # type: ignore[arg-type]
    tensors = make_dense_prefill_tensors(case)
    more_q, more_k = (11 if ends == "margins" and outputs == "strided" else 0, 11 if ends == "margins" else 0)
    assert tensors.q.shape == (34 + more_q, 6, 192)
    assert tensors.k.shape == (84 + more_k, 2, 192)
    assert tensors.v.shape == (84 + more_k, 2, 128)
    for offsets in (tensors.cu_seqlens_q, tensors.cu_seqlens_k):
        assert (offsets.shape, offsets.dtype) == ((6,), torch.int32)
    if ends == "clipped":
        assert [(x[0].item(), x[-1].item()) for x in (tensors.cu_seqlens_q, tensors.cu_seqlens_k)] == [(-5, 1 << 30)] * 2
    elif outputs == "strided":
        assert tensors.cu_seqlens_q.tolist() == [7, 27, 34, 34, 38, 41]
        assert tensors.cu_seqlens_k.tolist() == [7, 37, 42, 51, 51, 91]
        assert {name: given.tensor.shape for name, given in tensors.output_buffers.items()} == {"out": (45, 6, 128), "lse": (45, 6)}


@KINDS
@pytest.mark.parametrize("values", get_args(Values))
@pytest.mark.parametrize("neighbours", get_args(Neighbours))
def test_tokens_of_sequences_are_finite_and_all_others_nan(dtype: str, d_qk: int, values: str, neighbours: str) -> None:
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, values=values, neighbours=neighbours)  # type: ignore[arg-type]
    tensors = make_dense_prefill_tensors(case)
    queries = torch.zeros(case.total_q, dtype=torch.bool)
    queries[case.q_starts[0] : case.q_starts[-1]] = True
    keys = torch.zeros(case.total_k, dtype=torch.bool)
    for sequence, (first, end) in enumerate(pairwise(case.k_starts)):
        keys[first:end] = neighbours == "finite" or sequence % 2 == 0
    assert 0 < keys.sum() < case.total_k - 10
    for tensor, own in ((tensors.q, queries), (tensors.k, keys), (tensors.v, keys)):
        assert tensor[own].isfinite().all()
        assert tensor[~own].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_says_what_a_nan_neighbour_is(causal: bool) -> None:
    """Its own results are NaN, nobody else's; rows of nobody are NaN, as outputs that are given are before the call."""
    case = replace(SMALL, lengths=((20, 30), (5, 7), (0, 9), (4, 0), (50, 40)), causal=causal, neighbours="nan", empty_lse=-math.inf)
    tensors = make_dense_prefill_tensors(case)
    out, lse = OPERATION.reference(case, tensors)
    nan = torch.ones(case.total_q, dtype=torch.bool)
    for sequence in (0, 3, 4):  # the fourth has no keys that could be NaN
        nan[case.q_starts[sequence] : case.q_starts[sequence + 1]] = False
    assert nan.sum() == 11 + 5
    for result in (out, lse):
        assert torch.equal(result.isnan().flatten(1).any(dim=1), nan)
        assert torch.equal(result.isnan().flatten(1).all(dim=1), nan)
    empty = lse == -math.inf
    assert empty[:, 0].sum() == 4 + (10 if causal else 0)
    assert (out[empty] == 0).all()


def test_the_same_case_gives_the_same_bits_and_another_seed_others() -> None:
    first, second, other = (make_dense_prefill_tensors(replace(SMALL, seed=seed)) for seed in (0, 0, 1))
    for name in ("q", "k", "v"):
        assert same_bits(getattr(first, name), getattr(second, name))
        assert not same_bits(getattr(first, name), getattr(other, name))


def test_sequences_draw_their_own_keys() -> None:
    tensors = make_dense_prefill_tensors(DensePrefillCase(lengths=((1, 10), (1, 10)), ends="clipped"))
    assert not torch.equal(tensors.k[:10], tensors.k[10:])
    assert not torch.equal(tensors.v[:10], tensors.v[10:])
    assert not torch.equal(tensors.v[:10], tensors.k[:10, :, :128])


@pytest.mark.parametrize("layout", get_args(KvLayout))
@pytest.mark.parametrize("d_qk", [192, 128])
def test_a_layout_of_k_and_v_changes_strides_and_no_value(layout: str, d_qk: int) -> None:
    case = replace(SMALL, d_qk=d_qk)
    packed, other = make_dense_prefill_tensors(case), make_dense_prefill_tensors(replace(case, kv_layout=layout))  # type: ignore[arg-type]
    for ours, theirs in ((packed.k, other.k), (packed.v, other.v)):
        assert same_bits(ours, theirs)
        assert ours.is_contiguous()
        assert theirs.is_contiguous() == (layout == "packed")
        assert all(stride * 2 % 16 == 0 for stride in theirs.stride()[:-1])
        assert theirs.data_ptr() % 16 == 0
        assert theirs.stride(-1) == 1
    assert (other.v.data_ptr() == other.k.data_ptr() + 2 * d_qk) == (layout == "kvpacked")


@pytest.mark.parametrize("outputs", ["strided", "odd"])
def test_strided_outputs_leave_room_on_every_side(outputs: str) -> None:
    given = make_dense_prefill_tensors(replace(SMALL, outputs=outputs)).output_buffers  # type: ignore[arg-type]
    assert given["lse"].tensor.stride() == (1, SMALL.total_q + 3)
    assert given["out"].tensor.stride(1) == (192 if outputs == "strided" else 129)
    for tensor, storage in given.values():
        assert storage.isnan().all()
        tensor.fill_(0)
        assert storage.isnan().sum() == storage.numel() - tensor.numel() > 0


@pytest.mark.parametrize("values", ["rising", "falling"])
@pytest.mark.parametrize("d_qk", [192, 128])
def test_ramps_move_the_scores_along_the_keys(values: str, d_qk: int) -> None:
    case = DensePrefillCase(d_qk=d_qk, lengths=((1, 1280), (1, 640)), values=values)  # type: ignore[arg-type]
    tensors = make_dense_prefill_tensors(case)
    for sequence, (first, end) in enumerate(pairwise(case.k_starts)):
        scores = tensors.k[first:end, 0].float() @ tensors.q[sequence, 0].float() * case.scale
        tiles = scores.view(-1, 128).amax(dim=1).diff()
        assert ((tiles if values == "rising" else -tiles) > 6).all(), "each tile moves the maximum by more than a factor of 2^8"


def test_results_in_base_2_or_of_other_keys_fail() -> None:
    tensors = make_dense_prefill_tensors(SMALL)
    out, lse = OPERATION.reference(SMALL, tensors)
    tolerance = OPERATION.results["lse"]
    assert not compare("lse", lse * math.log2(math.e), lse, tolerance).passed
    assert compare("lse", lse * (1 + 1e-6), lse, tolerance).passed
    shifted = replace(tensors, cu_seqlens_k=tensors.cu_seqlens_k - 1, k=tensors.k.nan_to_num(0.01), v=tensors.v.nan_to_num(0.01))
    for (name, bounds), result, wrong in zip(OPERATION.results.items(), (out, lse), OPERATION.reference(SMALL, shifted), strict=True):
        assert not compare(name, wrong, result, bounds).passed


@KINDS
@pytest.mark.parametrize("causal", [False, True])
def test_the_limit_is_twice_the_error_of_the_element_type(dtype: str, d_qk: int, causal: bool) -> None:
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, causal=causal, neighbours="nan", lengths=((20, 30), (5, 7), (50, 40)))
    tensors = make_dense_prefill_tensors(case)
    expected = OPERATION.reference(case, tensors)
    low = low_precision_attention(case, tensors)
    assert low.dtype == tensors.q.dtype
    assert torch.equal(low.isnan(), expected[0].isnan())
    error = (low.float() - expected[0]).nan_to_num(0.0).abs().max().item()
    (limit,) = error_limits(case, tensors, expected).values()
    assert 0 < error < 4e-3
    assert limit.largest == pytest.approx(2 * error, abs=2e-7)


def test_an_error_beyond_the_limit_fails_even_within_the_tolerances() -> None:
    """In fp16 the limit is the stricter rule by far: P rounded to bf16 would be within the tolerances."""
    case = replace(SMALL, dtype="fp16", ends="clipped", lengths=((20, 30), (7, 50)))
    tensors = make_dense_prefill_tensors(case)
    out, lse = OPERATION.reference(case, tensors)
    expect(case, tensors, (out.half(), lse))
    coarse = out.bfloat16()
    assert compare("out", coarse, out, OPERATION.results["out"]).passed
    with pytest.raises(AssertionError, match=r"largest error .* exceeds"):
        expect(case, tensors, (coarse, lse))


@pytest.mark.parametrize("lengths", [(), ((0, 5),), ((5, 0),), ((0, 0),)])
def test_what_is_empty_has_empty_operands(lengths: tuple[tuple[int, int], ...]) -> None:
    case = DensePrefillCase(lengths=lengths, ends="clipped")
    tensors = make_dense_prefill_tensors(case)
    expected = OPERATION.reference(case, tensors)
    assert expected[0].shape == (case.total_q, 1, 128)
    assert (expected[1] == math.inf).all()
    assert error_limits(case, tensors, expected) == {"out": ErrorLimit(0.0)}
