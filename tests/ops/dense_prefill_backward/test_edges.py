"""Edges of the backward pass that no case of the suites draws, on the simulated device, and layouts on which no bit depends.

The API's refusals are tested without kernels in test_errors.py; its allocations in test_api.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_mla.testing.cases.base import QLayout
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase, make_dense_prefill_backward_tensors
from tests.support.bench import Bench, expect, identical

KINDS = pytest.mark.parametrize("d_qk", [192, 128, 256])
LAYOUTS = pytest.mark.parametrize("q_layout", ["packed", "sliced"])

SMALL = DensePrefillBackwardCase(lengths=((20, 30), (9, 70)), ends="clipped", sm_count=2)


@KINDS
@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
def test_rows_that_see_nothing_have_no_gradient_and_give_none(bench: Bench, d_qk: int, empty_lse: float) -> None:
    """Sequences without keys, and causal rows before the first key, whatever their dout."""
    case = replace(SMALL, d_qk=d_qk, lengths=((20, 30), (9, 0), (140, 5), (3, 3)), causal=True, empty_lse=empty_lse)
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
@LAYOUTS
def test_what_lies_behind_a_sequence_reaches_nothing(bench: Bench, d_qk: int, q_layout: QLayout) -> None:
    """NaN, infinities, and the largest values, in rows of every operand that belong to other sequences or to none."""
    lengths = ((20, 30), (70, 60), (70, 129), (9, 7), (3, 1))
    case = DensePrefillBackwardCase(d_qk=d_qk, lengths=lengths, outputs="given", causal=True, q_layout=q_layout, sm_count=1)
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
def test_nan_in_dout_reaches_its_row_and_blocks_of_keys_that_it_sees(bench: Bench, d_qk: int, q_layout: QLayout) -> None:
    """In blocks of 128 keys, of which the row sees two; 0 times NaN is NaN for the keys of these that it does not see."""
    case = DensePrefillBackwardCase(
        d_qk=d_qk, lengths=((150, 300), (9, 70)), group=2, causal=True, ends="clipped", q_layout=q_layout, sm_count=2
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


def test_bits_depend_on_no_layout(bench: Bench) -> None:
    case = DensePrefillBackwardCase(lengths=((70, 140), (9, 30)), h_kv=2, group=2, causal=True, ends="clipped", sm_count=2)
    expected = bench.run(case)
    for layouts in (
        {"q_layout": "sliced", "dout_layout": "heads_first", "kv_layout": "kvpacked", "outputs": "strided"},
        {"q_layout": "heads_first", "dout_layout": "sliced", "saved": "strided", "kv_layout": "heads_first", "outputs": "given"},
    ):
        assert identical(bench.run(replace(case, **layouts)), expected)  # type: ignore[arg-type]
