"""Edges of dense prefill that no case of the suites draws, on the simulated device, and layouts on which no bit depends.

The API's refusals are tested without kernels in test_errors.py; its allocations in test_api.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cute_mla.testing.operations import OPERATIONS
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase, make_dense_prefill_tensors
from tests.support.bench import Bench, expect, identical

KINDS = pytest.mark.parametrize(("dtype", "d_qk"), [("bf16", 192), ("fp16", 128)])

SMALL = DensePrefillCase(lengths=((20, 30), (9, 70)), ends="clipped", sm_count=2)


@KINDS
@pytest.mark.parametrize("keys", [1, 2, 3])
def test_lse_near_zero(bench: Bench, dtype: str, d_qk: int, keys: int) -> None:
    """There the bound is an absolute one, 1e-6, and lse the logarithm of one to three exponentials."""
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, lengths=((129, keys),), softmax_scale=1.0)
    tensors = make_dense_prefill_tensors(case)
    tensors.q.zero_()
    tensors.k.zero_()
    # the other scores lie below the first, each row's by more; lse would be 0 but for the rounding of the first
    gaps = torch.linspace(0, 8, 129).unsqueeze(1) * torch.arange(keys)
    first = -torch.exp(-gaps).sum(dim=1).log()
    tensors.q[:, 0, 0], tensors.q[:, 0, 1] = first.to(tensors.q), torch.linspace(0, -8, 129).to(tensors.q)
    tensors.k[:, 0, 0], tensors.k[:, 0, 1] = 1.0, torch.arange(keys).to(tensors.k)
    _, lse = bench.run(case, tensors)
    expected = OPERATIONS[case.op].reference(case, tensors)[1]
    assert expected.abs().max() < 0.05
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-6)


@KINDS
def test_what_lies_behind_a_sequence_reaches_nothing(bench: Bench, dtype: str, d_qk: int) -> None:
    """NaN, infinities, and the largest values, whose products are infinite."""
    case = DensePrefillCase(dtype, d_qk=d_qk, lengths=((20, 30), (0, 200), (70, 129), (0, 7)), outputs="given", sm_count=1)
    tensors = make_dense_prefill_tensors(case)
    expected = [result.clone() for result in bench.run(case, tensors)]
    own = torch.zeros(case.total_k, dtype=torch.bool)
    for sequence in (0, 2):
        own[case.k_starts[sequence] : case.k_starts[sequence + 1]] = True
    for fill in (math.nan, math.inf, torch.finfo(tensors.k.dtype).max):
        k, v = tensors.k.clone(), tensors.v.clone()
        k[~own] = v[~own] = fill
        assert identical(bench.run(case, replace(tensors, k=k, v=v)), tuple(expected)), fill


def test_values_of_128_columns_padded_to_256(bench: Bench) -> None:
    """Heads of the window layers of dots3-note have 256 columns of q and k, and 128 of v."""
    case = DensePrefillCase(d_qk=256, lengths=((70, 130), (9, 9)), causal=True, sm_count=2)
    tensors = make_dense_prefill_tensors(case)
    tensors.v[..., 128:] = 0
    out, lse = bench.run(case, tensors)
    assert not out[..., 128:].any()
    expect(case, tensors, (out, lse))


def test_nan_in_a_key_reaches_the_rows_that_see_it(bench: Bench) -> None:
    case = DensePrefillCase(lengths=((20, 30), (9, 70)), group=2, ends="clipped")
    tensors = make_dense_prefill_tensors(case)
    tensors.k[35, 0, 5] = math.nan
    out, lse = bench.run(case, tensors)
    assert out[20:].isnan().all()
    assert lse[20:].isnan().all()
    assert out[:20].isfinite().all()


def test_rows_of_no_sequence_are_not_written(bench: Bench) -> None:
    """Neither in front, nor behind, nor where a sequence ends within a block of rows."""
    case = DensePrefillCase(lengths=((20, 30), (130, 20)), outputs="given", sm_count=1)
    tensors = make_dense_prefill_tensors(case)
    for given, _ in tensors.output_buffers.values():
        given.fill_(-7.0)
    out, lse = bench.run(case, tensors)
    rows = torch.ones(case.total_q, dtype=torch.bool)
    rows[case.q_starts[0] : case.q_starts[-1]] = False
    assert rows.sum() == 11
    for result in (out, lse):
        assert (result[rows] == -7.0).all()
        assert not (result[~rows] == -7.0).any()


WILD = [(5, 2, 3), (-7, 1 << 30, 90), ((1 << 31) - 1, -(1 << 31), 40), (-(1 << 31), (1 << 31) - 1, 1)]


@pytest.mark.parametrize("offsets", WILD)
def test_no_offsets_lead_outside(bench: Bench, offsets: tuple[int, int, int]) -> None:
    """Whatever they are, the kernel ends, and stays within its operands: a finding of the simulator raises."""
    case = replace(SMALL, lengths=((130, 200), (1, 60)))
    tensors = make_dense_prefill_tensors(case)
    wild = torch.tensor(offsets, dtype=torch.int32)
    for keys in (wild, wild.flip(0)):
        out, _ = bench.run(case, replace(tensors, cu_seqlens_q=wild, cu_seqlens_k=keys))
        assert out.shape == (131, 1, 128)


def test_bits_depend_on_no_layout(bench: Bench) -> None:
    """Nor on which of the query heads that share keys it is."""
    case = DensePrefillCase(lengths=((65, 150), (3, 1)), group=2, causal=True, ends="clipped", sm_count=2)
    expected = bench.run(case)
    for layout in (
        {"kv_layout": "kvpacked"},
        {"q_layout": "sliced", "outputs": "strided"},
        {"kv_layout": "heads_first", "q_layout": "sliced"},
    ):
        assert identical(bench.run(replace(case, **layout)), expected), layout  # type: ignore[arg-type]
    tensors = make_dense_prefill_tensors(case)
    out, lse = bench.run(case, replace(tensors, q=tensors.q[:, :1].expand(-1, 2, -1).contiguous()))
    assert identical((out[:, 0], lse[:, 0]), (out[:, 1], lse[:, 1]))
    assert identical((out[:, 0], lse[:, 0]), (expected[0][:, 0], expected[1][:, 0]))
