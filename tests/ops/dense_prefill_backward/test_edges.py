"""Edges of the backward pass that no case of the suites draws, on the simulated device, and layouts on which no bit depends.

The API's refusals are tested without kernels in test_errors.py; its allocations in test_api.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import cute_mla
from cute_mla.testing.cases.base import QLayout
from cute_mla.testing.cases.dense_prefill_backward import (
    DensePrefillBackwardCase,
    make_dense_prefill_backward_tensors,
)
from cute_mla.testing.operations import operation
from tests.support.bench import Bench, expect, identical

KINDS = pytest.mark.parametrize(("dtype", "d_qk"), [("bf16", 192), ("fp16", 128), ("bf16", 256)])
LAYOUTS = pytest.mark.parametrize("q_layout", ["packed", "odd"])

SMALL = DensePrefillBackwardCase(lengths=((20, 30), (9, 70)), ends="clipped", sm_count=2)


@KINDS
@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
def test_rows_that_see_nothing_have_no_gradient_and_give_none(bench: Bench, dtype: str, d_qk: int, empty_lse: float) -> None:
    """Sequences without keys, and causal rows before the first key, whatever their dout."""
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, lengths=((20, 30), (9, 0), (140, 5), (3, 3)), causal=True, empty_lse=empty_lse)
    tensors = make_dense_prefill_backward_tensors(case)
    dq, dk, dv = bench.run(case, tensors)
    empty = torch.zeros(172, dtype=torch.bool)
    empty[20:29] = empty[29 : 29 + 135] = True
    assert (dq[empty] == 0).all()
    expect(case, tensors, (dq, dk, dv))
    dout = tensors.dout.clone()
    dout[empty] = torch.finfo(dout.dtype).max
    assert identical(bench.run(case, replace(tensors, dout=dout)), (dq, dk, dv))


@KINDS
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_rows_whose_lse_is_infinite_have_no_gradient_and_give_none(bench: Bench, dtype: str, d_qk: int, value: float) -> None:
    """Also rows that see keys, here every third, whatever their out."""
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, lengths=((20, 30), (70, 140)), group=2, causal=True)
    tensors = make_dense_prefill_backward_tensors(case)
    tensors.lse[::3, 0], tensors.out[::3, 0] = value, math.nan
    dq, dk, dv = bench.run(case, tensors)
    assert (dq[::3, 0] == 0).all()
    assert dq[1::3].any()
    expect(case, tensors, (dq, dk, dv))


@KINDS
def test_keys_that_no_row_sees_get_zeros(bench: Bench, dtype: str, d_qk: int) -> None:
    """A sequence without queries lies between others; results are full of NaN before the call."""
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, lengths=((0, 130), (20, 30), (0, 9), (5, 5), (0, 1)), outputs="given")
    tensors = make_dense_prefill_backward_tensors(case)
    dq, dk, dv = bench.run(case, tensors)
    for gradient in (dk, dv):
        for (first, end), (s_q, _) in zip(pairwise(case.k_starts), case.lengths, strict=True):
            assert gradient[first:end].any() == (s_q > 0)
    expect(case, tensors, (dq, dk, dv))


@KINDS
@LAYOUTS
def test_what_lies_behind_a_sequence_reaches_nothing(bench: Bench, dtype: str, d_qk: int, q_layout: QLayout) -> None:
    """NaN, infinities, and the largest values, in rows of every operand that belong to other sequences or to none."""
    lengths = ((20, 30), (70, 60), (70, 129), (9, 7), (3, 1))
    case = DensePrefillBackwardCase(dtype, d_qk=d_qk, lengths=lengths, outputs="given", causal=True, q_layout=q_layout, sm_count=1)
    tensors = make_dense_prefill_backward_tensors(case)
    own_q, own_k = (of_sequences(starts, (0, 2, 4)) for starts in (case.q_starts, case.k_starts))
    expected = [result[own].clone() for result, own in zip(bench.run(case, tensors), (own_q, own_k, own_k), strict=True)]
    for fill in (math.nan, math.inf, torch.finfo(tensors.k.dtype).max):
        for own, names in ((own_q, ("q", "dout", "out", "lse")), (own_k, ("k", "v"))):
            for name in names:  # in place, since a copy would have other strides
                tensor = getattr(tensors, name)
                tensor[outside(own, len(tensor))] = fill
        results = bench.run(case, tensors)
        assert identical(tuple(result[own] for result, own in zip(results, (own_q, own_k, own_k), strict=True)), tuple(expected)), fill


def of_sequences(starts: tuple[int, ...], sequences: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of some sequences."""
    return torch.cat([torch.arange(starts[sequence], starts[sequence + 1]) for sequence in sequences])


def outside(rows: torch.Tensor, total: int) -> torch.Tensor:
    """Return the other rows."""
    return torch.ones(total, dtype=torch.bool).index_fill(0, rows, False)


@KINDS
@LAYOUTS
def test_nan_in_dout_reaches_its_row_and_blocks_of_keys_that_it_sees(bench: Bench, dtype: str, d_qk: int, q_layout: QLayout) -> None:
    """In blocks of 128 keys, of which the row sees two; 0 times NaN is NaN for the keys of these that it does not see."""
    case = DensePrefillBackwardCase(
        dtype, d_qk=d_qk, lengths=((150, 300), (9, 70)), group=2, causal=True, ends="clipped", q_layout=q_layout, sm_count=2
    )
    tensors = make_dense_prefill_backward_tensors(case)
    clean = bench.run(case, tensors)
    tensors.dout[5, 1, 7] = math.nan
    results = bench.run(case, tensors)
    assert results[0][5, 1].isnan().all()
    assert results[1][:156].isnan().all()
    assert results[2][:156, 0, 7].isnan().all()
    results[0][5, 1] = clean[0][5, 1]
    for result, expected in zip(results[1:], clean[1:], strict=True):
        result[:256] = expected[:256]
    assert identical(results, clean)


def test_rows_of_no_sequence_are_not_written(bench: Bench) -> None:
    """Neither in front, nor behind, nor where a sequence ends within a block; gradients that the call allocates are 0 there."""
    case = DensePrefillBackwardCase(lengths=((20, 30), (130, 140)), outputs="given", sm_count=1)
    tensors = make_dense_prefill_backward_tensors(case)
    for given, _ in tensors.output_buffers.values():
        given.fill_(-7.0)
    results = bench.run(case, tensors)
    new = bench.run(case, replace(tensors, output_buffers={}))
    for result, allocated, starts in zip(results, new, (case.q_starts, case.k_starts, case.k_starts), strict=True):
        other = outside(torch.arange(starts[0], starts[-1]), len(result))
        assert other.sum() == 11
        assert (result[other] == -7.0).all()
        assert (allocated[other] == 0).all()
        assert not (result[~other] == -7.0).any()
        assert torch.equal(result[~other], allocated[~other])


WILD = [(5, 2, 3), (-7, 1 << 30, 90), ((1 << 31) - 1, -(1 << 31), 40), (-(1 << 31), (1 << 31) - 1, 1)]


@pytest.mark.parametrize("offsets", WILD)
def test_no_offsets_lead_outside(bench: Bench, offsets: tuple[int, int, int]) -> None:
    """Whatever they are, the kernels end, and stay within their operands: a finding of the simulator raises."""
    case = replace(SMALL, lengths=((130, 200), (1, 60)))
    tensors = make_dense_prefill_backward_tensors(case)
    wild = torch.tensor(offsets, dtype=torch.int32)
    for keys in (wild, wild.flip(0)):
        dq, _, _ = bench.run(case, replace(tensors, cu_seqlens_q=wild, cu_seqlens_k=keys))
        assert dq.shape == (131, 1, 192)


def test_sequences_that_share_keys_are_a_race(bench: Bench) -> None:
    """Offsets that go back give two CTAs the same rows of dk and dv: nothing adds up in global memory, and the simulator says so."""
    case = replace(SMALL, lengths=((20, 90), (0, 0), (9, 50)), outputs="given", sm_count=3)
    tensors = make_dense_prefill_backward_tensors(case)
    shared = torch.tensor([0, 90, 40, 90], dtype=torch.int32)
    _, findings = bench.collect(case, replace(tensors, cu_seqlens_k=shared))
    assert {finding.kind for finding in findings} == {"race"}
    assert {name for name in ("'dk'", "'dv'") if any(name in str(finding) for finding in findings)} == {"'dk'", "'dv'"}


def test_longest_sequences_may_be_said_to_be_longer(bench: Bench) -> None:
    case = replace(SMALL, group=2)
    tensors = make_dense_prefill_backward_tensors(case)
    arguments = operation(case).arguments(case, tensors, None)
    with cute_mla.simulate(bench.arch, 1):
        results = cute_mla.flash_attn_varlen_backward(**{**arguments, "max_seqlen_qo": 1000, "max_seqlen_kv": 1000})
    assert identical(results, bench.run(case, tensors))


@pytest.mark.parametrize("group", [2, 3])
def test_gradients_of_a_group_are_the_sums_over_its_heads(bench: Bench, group: int) -> None:
    """Check that dq has the bits of a call with repeated heads; dk and dv agree with the sums of that call's."""
    case = replace(SMALL, h_kv=2, group=group, causal=True)
    tensors = make_dense_prefill_backward_tensors(case)
    dq, dk, dv = bench.run(case, tensors)
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (tensors.k, tensors.v))
    repeated = bench.run(case, replace(tensors, k=k, v=v))
    assert identical((dq,), repeated[:1])
    for gradient, each in ((dk, repeated[1]), (dv, repeated[2])):
        summed = each.float().unflatten(1, (2, group)).sum(dim=2)
        assert (gradient.float() - summed).norm() < 5e-3 * summed.norm()


def test_bits_depend_on_no_layout(bench: Bench) -> None:
    case = DensePrefillBackwardCase(lengths=((70, 140), (9, 30)), h_kv=2, group=2, causal=True, ends="clipped", sm_count=2)
    expected = bench.run(case)
    for layouts in (
        {"q_layout": "sliced", "dout_layout": "heads_first", "kv_layout": "kvpacked", "outputs": "strided"},
        {"q_layout": "heads_first", "dout_layout": "sliced", "saved": "strided", "kv_layout": "heads_first", "outputs": "given"},
    ):
        assert identical(bench.run(replace(case, **layouts)), expected)  # type: ignore[arg-type]
