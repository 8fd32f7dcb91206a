"""Sparse prefill's cases are told apart by their ids, and their tensors hold the traps that they promise."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from cute_mla.testing.cases.far import FAR_ELEMENTS
from cute_mla.testing.cases.sparse_indices import INT_MAX, INT_MIN
from cute_mla.testing.cases.sparse_prefill import (
    AMPLIFIED,
    Form,
    KvLayout,
    PrefillValues,
    SparsePrefillCase,
    SparsePrefillTensors,
    make_sparse_prefill_tensors,
)
from cute_mla.testing.compare import compare, same_bits
from cute_mla.testing.operations import operation

SMALL = SparsePrefillCase(s_q=5, h_q=3, s_kv=40, topk=20)
RAGGED = SparsePrefillCase(batch=5, form="ragged", s_q=5, h_q=2, s_kv=300, topk=250, indices="mixed")
OPERATION = operation(SMALL)


def tokens_of(case: SparsePrefillCase, tensors: SparsePrefillTensors) -> list[tuple[int, Tensor]]:
    """Return each token's request and its valid indices."""
    rows = tensors.indices.reshape(case.tokens, case.topk)
    return [(token // case.s_q, rows[token, :count]) for token, count in enumerate(case.counts)]


def named(case: SparsePrefillCase, tensors: SparsePrefillTensors) -> Tensor:
    """Bool [kv_rows]: which rows of kv the indices that count name."""
    used = torch.zeros(case.kv_rows, dtype=torch.bool)
    for request, indices in tokens_of(case, tensors):
        first, rows = case.row_ranges[request]
        used[first + indices[(indices >= 0) & (indices < rows)].long()] = True
    return used


def test_an_id_names_the_shape_and_what_is_unusual() -> None:
    assert SparsePrefillCase().id == "bf16-d576-b1-q1-k512t64-h16"
    assert RAGGED.id == "bf16-d576-b5-q5-k300t250-h2-ragged-idx_mixed"
    case = replace(SMALL, d_qk=512, lengths=(3, 4, 0, 1, 2), sinks="drawn", index_layout="odd", kv_layout="far", seed=5, sm_count=3)
    assert case.id == "bf16-d512-b1-q5-k40t20-h3-len_3_4_0_1_2-sinks_drawn-idx_odd-kv_far-sm3-seed5"


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="d_qk is 128"):
        SparsePrefillCase(d_qk=128)
    with pytest.raises(ValueError, match="batch is 2 with form 'single'"):
        SparsePrefillCase(batch=2)
    with pytest.raises(ValueError, match="got 3 for 4 tokens"):
        SparsePrefillCase(batch=2, s_q=2, form="batched", lengths=(1, 2, 3))


def test_lengths_are_of_tokens() -> None:
    assert SMALL.topk_lengths is None
    assert SMALL.counts == (20,) * 5
    edges = SparsePrefillCase(batch=2, form="batched", s_q=4, topk=130, lengths="edges")
    assert edges.topk_lengths == (1, -70, 64, 65, 63, 0, 1 << 20, 1)
    assert edges.counts == (1, 0, 64, 65, 63, 0, 130, 1)
    zeros = SparsePrefillCase(s_q=300, topk=9, lengths="zeros").counts
    assert 100 < zeros.count(0) < 200
    assert set(zeros) == set(range(10))


def test_tiles_count_tokens_times_keys() -> None:
    assert SparsePrefillCase(batch=2, form="batched", s_q=3, h_q=128, topk=65).tiles == 2 * 3 * 2 * 2
    assert SparsePrefillCase(s_q=4, h_q=1, topk=70, lengths=(0, 64, 65, -1)).tiles == 1 + 1 + 2 + 1
    assert SparsePrefillCase(batch=0, form="batched").tiles == 0
    assert SparsePrefillCase(topk=0).tiles == 1


def test_ragged_requests() -> None:
    assert RAGGED.request_lengths[:2] == (300, 0)
    assert all(1 <= rows <= 300 for rows in RAGGED.request_lengths[2:])
    assert RAGGED.offsets is not None
    assert RAGGED.offsets[0] == 7
    assert RAGGED.offsets[-1] == RAGGED.kv_rows - 4
    assert tuple(rows for _, rows in RAGGED.row_ranges) == RAGGED.request_lengths
    clipped = replace(RAGGED, form="clipped")
    assert clipped.offsets is not None
    assert (clipped.offsets[0], clipped.offsets[-1]) == (-5, 1 << 30)
    assert clipped.offsets[2] < clipped.offsets[1], "the second request ends before it begins"
    assert [rows for _, rows in clipped.row_ranges][:2] == [307, 0]
    assert sum(clipped.row_ranges[-1]) == clipped.kv_rows


SHAPES = [
    ("single", 1, (5, 3), (40, 1, 576)),
    ("batched", 2, (2, 5, 3), (2, 40, 1, 576)),
    ("ragged", 2, (2, 5, 3), (40 + 11, 1, 576)),
    ("clipped", 1, (1, 5, 3), (40 + 11, 1, 576)),
]


@pytest.mark.parametrize(("form", "batch", "rows", "kv"), SHAPES)
def test_tensors_have_the_shapes_of_the_call(form: str, batch: int, rows: tuple[int, ...], kv: tuple[int, ...]) -> None:
    case = replace(SMALL, form=form, batch=batch, lengths="drawn", sinks="drawn", outputs="strided")  # type: ignore[arg-type]
    tensors = make_sparse_prefill_tensors(case)
    assert tensors.q.shape == (*rows, 576)
    assert tensors.kv.shape == kv
    assert tensors.indices.shape == (*rows[:-1], 1, 20)
    assert tensors.topk_length is not None
    assert tensors.topk_length.shape == rows[:-1]
    assert tensors.attn_sink is not None
    assert tensors.attn_sink.shape == (3,)
    assert (tensors.kv_offsets is None) == (form in ("single", "batched"))
    assert tensors.kv_offsets is None or tensors.kv_offsets.shape == (batch + 1,)
    assert {name: given.tensor.shape for name, given in tensors.output_buffers.items()} == {
        "out": (*rows, 512),
        "max_logits": rows,
        "lse": rows,
    }
    assert tensors.indices.dtype == tensors.topk_length.dtype == torch.int32


def test_the_same_case_gives_the_same_bits_and_another_seed_others() -> None:
    first, second, other = (make_sparse_prefill_tensors(replace(SMALL, seed=seed)) for seed in (0, 0, 1))
    assert same_bits(first.q, second.q)
    assert same_bits(first.kv, second.kv)
    assert torch.equal(first.indices, second.indices)
    assert not same_bits(first.q, other.q)
    assert not torch.equal(first.indices, other.indices)


@pytest.mark.parametrize(("dtype", "d_qk"), list(product(("bf16", "fp16"), (576, 512))))
@pytest.mark.parametrize("values", get_args(PrefillValues))
def test_every_row_that_is_named_is_finite_and_every_other_is_nan(dtype: str, d_qk: int, values: str) -> None:
    for form in ("ragged", "clipped"):
        case = replace(RAGGED, dtype=dtype, d_qk=d_qk, values=values, form=form, topk=65, lengths="edges")  # type: ignore[arg-type]
        tensors = make_sparse_prefill_tensors(case)
        assert tensors.q.isfinite().all()
        used = named(case, tensors)
        assert 100 < used.sum() < case.kv_rows - 50
        assert tensors.kv[used].isfinite().all()
        assert tensors.kv[~used].isnan().all()


@pytest.mark.parametrize(("dtype", "d_qk"), list(product(("bf16", "fp16"), (576, 512))))
def test_the_reference_is_finite_but_for_rows_without_keys(dtype: str, d_qk: int) -> None:
    case = replace(RAGGED, dtype=dtype, d_qk=d_qk, lengths="edges", sinks="infinite")
    tensors = make_sparse_prefill_tensors(case)
    out, max_logits, lse = OPERATION.reference(case, tensors)
    assert out.isfinite().all()
    valid = [int(((i >= 0) & (i < case.row_ranges[request][1])).sum()) for request, i in tokens_of(case, tensors)]
    empty = torch.tensor(valid).view(5, 5) == 0
    assert 5 < empty.sum() < 20
    assert (lse[empty] == math.inf).all()
    assert (max_logits[empty] == -math.inf).all()
    assert (out[empty] == 0).all()
    assert lse[~empty].isfinite().all()
    assert (max_logits[~empty] <= lse[~empty] + 1e-6).all()


def test_valid_indices_name_each_row_once() -> None:
    for token in make_sparse_prefill_tensors(replace(SMALL, topk=64)).indices.flatten(0, 1):
        valid = token[token >= 0]
        assert len(valid.unique()) == len(valid) == 40
        assert (token[:40] == -1).any(), "not all at the end"


def test_mixed_indices_have_every_invalid_value_and_whole_tiles_of_them() -> None:
    case = SparsePrefillCase(s_q=10, h_q=1, s_kv=600, topk=500, indices="mixed")
    indices = make_sparse_prefill_tensors(case).indices.squeeze(1)
    valid = (indices >= 0) & (indices < 600)
    assert set(indices[~valid].tolist()) == {INT_MIN, -123456, -1, 600, 601, 114514, 1919810, 2147480000, INT_MAX}
    assert 0.35 < valid[0].float().mean() < 0.5, "at most every second one"
    assert not (valid[0, :63] & valid[0, 1:64]).any()
    assert not (valid[5, :63] & valid[5, 1:64]).any()
    assert 0.7 < valid[6, 70:].float().mean() < 0.9
    assert len(indices[0][valid[0]].unique()) < valid[0].sum(), "some are repeated"
    assert not valid[1, :64].any(), "a tile in front"
    assert valid[1, 70:128].any()
    assert valid[2, :61].any()
    assert not valid[2, 64:128].any(), "a tile in the middle"
    assert valid[2, 133:192].any()
    assert not valid[3].any(), "nothing else"
    assert valid[4, :250].any()
    assert not valid[4, 256:].any(), "tiles at the end"


def test_ragged_indices_name_rows_that_only_neighbours_have() -> None:
    tensors = make_sparse_prefill_tensors(RAGGED)
    elsewhere = {"in front": 0, "behind": 0}
    for request, indices in tokens_of(RAGGED, tensors):
        first, rows = RAGGED.row_ranges[request]
        outside = indices[(indices < 0) | (indices >= rows)].long() + first
        elsewhere["in front"] += int(((outside >= 0) & (outside < first)).sum())
        elsewhere["behind"] += int(((outside >= first + rows) & (outside < RAGGED.kv_rows)).sum())
        assert rows or (indices == 0).any(), "not even the first row is one of a request that has none"
    assert min(elsewhere.values()) > 50


def test_a_kernel_that_takes_a_neighbours_rows_is_wrong() -> None:
    """The comparison tells it: rows of neighbours are not NaN alone, so this is no matter of NaN."""
    case = replace(RAGGED, indices="valid", topk=60, s_q=2)
    tensors = make_sparse_prefill_tensors(case)
    expected = OPERATION.reference(case, tensors)
    assert tensors.kv_offsets is not None
    shifted = replace(tensors, kv_offsets=tensors.kv_offsets - 1, kv=tensors.kv.nan_to_num(0.01))
    wrong = OPERATION.reference(case, shifted)
    for (name, tolerance), actual, wanted in zip(OPERATION.results.items(), wrong, expected, strict=True):
        assert not compare(name, actual, wanted, tolerance).passed


@pytest.mark.parametrize("values", ["rising", "falling"])
@pytest.mark.parametrize("d_qk", [576, 512])
def test_ramps_move_the_scores_along_the_indices(values: str, d_qk: int) -> None:
    case = SparsePrefillCase(h_q=1, d_qk=d_qk, s_kv=640, topk=640, values=values)  # type: ignore[arg-type]
    tensors = make_sparse_prefill_tensors(case)
    keys = tensors.kv[tensors.indices[0, 0].long(), 0].float()
    tiles = (keys @ tensors.q[0, 0].float() * case.scale).view(10, 64).amax(dim=1)
    assert ((tiles.diff() if values == "rising" else -tiles.diff()) > 5).all(), "each tile moves the maximum by far"


def test_amplified_rows_stress_rescaling() -> None:
    """One row in fifty is 2^8 times larger; where one turns up, the maximum of a running softmax moves by far."""
    case = SparsePrefillCase(h_q=4, s_kv=2000, topk=2000, values="amplified", softmax_scale=64.0)
    tensors = make_sparse_prefill_tensors(case)
    norms = tensors.kv.float().norm(dim=-1).flatten()
    large = norms > norms.max() / 16
    assert 20 < large.sum() < 60
    ratio = norms[large].mean() / norms[~large].mean()
    assert ratio == pytest.approx(AMPLIFIED, rel=0.05)
    scores = tensors.q[0].float() @ tensors.kv[tensors.indices[0, 0].long(), 0].float().T * case.scale
    running = scores.view(4, -1, 40).amax(dim=-1).cummax(dim=-1).values
    assert (running.diff() > 6).sum() >= 4, "more than a factor of 2^8, which a lazy reference would let pass"


def test_max_logits_in_base_2_fail() -> None:
    """And the reference of a lazily moved maximum instead of the maximum."""
    tensors = make_sparse_prefill_tensors(SMALL)
    _, max_logits, _ = OPERATION.reference(SMALL, tensors)
    tolerance = OPERATION.results["max_logits"]
    assert not compare("max_logits", max_logits * math.log2(math.e), max_logits, tolerance).passed
    assert not compare("max_logits", max_logits - 1e-3, max_logits, tolerance).passed
    assert compare("max_logits", max_logits * (1 + 1e-6), max_logits, tolerance).passed


@pytest.mark.parametrize("form", get_args(Form))
@pytest.mark.parametrize("layout", get_args(KvLayout))
def test_a_layout_of_kv_changes_strides_and_no_value(form: str, layout: str) -> None:
    case = replace(SMALL, form=form, batch=1 if form == "single" else 3)  # type: ignore[arg-type]
    packed, other = make_sparse_prefill_tensors(case), make_sparse_prefill_tensors(replace(case, kv_layout=layout))  # type: ignore[arg-type]
    assert torch.equal(packed.indices, other.indices)
    assert same_bits(packed.kv, other.kv)
    assert all(stride * 2 % 16 == 0 for stride in other.kv.stride()[:-1])
    assert other.kv.storage_offset() * 2 % 16 == 0
    assert packed.kv.is_contiguous()
    assert other.kv.is_contiguous() == (layout == "packed")
    if layout == "far":
        rows = torch.arange(case.kv_rows) * other.kv.stride(-3)
        far = rows >= FAR_ELEMENTS
        assert case.kv_rows // 10 <= far.sum() <= case.kv_rows // 4
        assert (named(case, other) & far).any()


@pytest.mark.parametrize("outputs", ["strided", "odd"])
def test_strided_outputs_leave_room_on_every_side(outputs: str) -> None:
    given = make_sparse_prefill_tensors(replace(SMALL, outputs=outputs)).output_buffers  # type: ignore[arg-type]
    assert list(given) == ["out", "max_logits", "lse"]
    assert given["max_logits"].tensor.stride() == (1, 8)
    assert given["lse"].tensor.stride() == (6, 1)
    for tensor, storage in given.values():
        assert storage.isnan().all()
        assert not tensor.is_contiguous()
        tensor.fill_(0)
        assert storage.isnan().sum() == storage.numel() - tensor.numel() > 0


def test_odd_index_rows_are_aligned_to_nothing() -> None:
    tensors, packed = make_sparse_prefill_tensors(replace(SMALL, index_layout="odd")), make_sparse_prefill_tensors(SMALL)
    assert torch.equal(tensors.indices, packed.indices)
    assert (tensors.indices.stride(0), tensors.indices.stride(2)) == (23, 1)
    assert tensors.indices.storage_offset() == 1


@pytest.mark.parametrize("empty", [{"batch": 0, "form": "batched"}, {"s_q": 0}, {"s_kv": 0}, {"topk": 0}])
def test_what_is_empty_has_empty_operands(empty: dict[str, object]) -> None:
    case = replace(SparsePrefillCase(lengths="drawn", outputs="given", indices="mixed"), **empty)  # type: ignore[arg-type]
    tensors = make_sparse_prefill_tensors(case)
    out, _, lse = OPERATION.reference(case, tensors)
    assert out.shape == tensors.output_buffers["out"].tensor.shape
    assert (lse == math.inf).all()
