"""Every line of the edge contract that dense prefill has, on the simulated device.

What the API refuses, and that it neither allocates nor copies, is tested without kernels in test_api.py and test_errors.py; that
equal inputs give equal bits, in test_bits.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import cute_mla
from cute_mla.testing.cases.dense_prefill import DensePrefillCase, make_dense_prefill_tensors
from cute_mla.testing.operations import OPERATIONS
from tests.support.bench import Bench, expect, identical

KINDS = pytest.mark.parametrize(("dtype", "d_qk"), [("bf16", 192), ("fp16", 128)])

SMALL = DensePrefillCase(lengths=((20, 30), (9, 70)), ends="clipped", sm_count=2)


@KINDS
def test_lse_is_the_natural_logarithm(bench: Bench, dtype: str, d_qk: int) -> None:
    case = replace(SMALL, dtype=dtype, d_qk=d_qk, softmax_scale=0.25)
    tensors = make_dense_prefill_tensors(case)
    tensors.q.zero_()
    out, lse = bench.run(case, tensors)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(30)] * 20 + [math.log(70)] * 9), rtol=2e-6, atol=0)
    expect(case, tensors, (out, lse))


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


@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
@pytest.mark.parametrize("sm_count", [1, 132])
def test_rows_that_see_nothing(bench: Bench, empty_lse: float, sm_count: int) -> None:
    """Sequences without keys, and causal rows before the first key; between others on one CTA, and alone."""
    case = replace(SMALL, lengths=((20, 30), (9, 0), (140, 5), (3, 3)), causal=True, empty_lse=empty_lse, sm_count=sm_count)
    tensors = make_dense_prefill_tensors(case)
    out, lse = bench.run(case, tensors)
    empty = torch.zeros(172, dtype=torch.bool)
    empty[20:29] = empty[29 : 29 + 135] = True
    assert (out[empty] == 0).all()
    assert (lse[empty] == empty_lse).all()
    assert lse[~empty].isfinite().all()
    expect(case, tensors, (out, lse))


def test_causal_is_aligned_bottom_right(bench: Bench) -> None:
    """With values that name their keys and scores that are all 0, out is the mean of the keys that a row sees."""
    case = DensePrefillCase("fp16", lengths=((65, 70), (70, 65), (1, 130)), ends="clipped", causal=True, sm_count=1)
    tensors = make_dense_prefill_tensors(case)
    tensors.q.zero_()
    for first, end in pairwise(case.k_starts):
        tensors.v[first:end] = torch.arange(end - first).view(-1, 1, 1).half()
    out, _ = bench.run(case, tensors)
    for (first, end), (s_q, s_k) in zip(pairwise(case.q_starts), case.lengths, strict=True):
        seen = (torch.arange(s_q) + 1 + s_k - s_q).clamp(min=0)
        torch.testing.assert_close(out[first:end, 0, 0].float(), ((seen - 1) / 2).clamp(min=0), rtol=1e-3, atol=1e-3)


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


@pytest.mark.parametrize("lengths", [(), ((0, 5),), ((0, 0), (0, 3))])
def test_no_query_tokens(bench: Bench, lengths: tuple[tuple[int, int], ...]) -> None:
    out, lse = bench.run(replace(SMALL, lengths=lengths))
    assert (out.shape, lse.shape) == ((0, 1, 128), (0, 1))


@KINDS
def test_no_keys_at_all(bench: Bench, dtype: str, d_qk: int) -> None:
    out, lse = bench.run(replace(SMALL, dtype=dtype, d_qk=d_qk, lengths=((130, 0), (3, 0))))
    assert (out == 0).all()
    assert (lse == math.inf).all()


def test_longest_sequences_may_be_said_to_be_longer(bench: Bench) -> None:
    case = replace(SMALL, group=2)
    tensors = make_dense_prefill_tensors(case)
    with cute_mla.simulate(bench.arch, 1):
        results = cute_mla.flash_attn_varlen_func(tensors.q, tensors.k, tensors.v, tensors.cu_seqlens_q, tensors.cu_seqlens_k, 1000, 1000)
    assert identical(results, bench.run(case, tensors))


def test_operands_that_are_shared(bench: Bench) -> None:
    """One row of q for all heads; values that are the first columns of the keys."""
    case = replace(SMALL, h_kv=2, group=2)
    tensors = make_dense_prefill_tensors(case)
    shared = replace(tensors, q=tensors.q[:, :1].expand(-1, 4, -1), v=tensors.k[..., :128])
    expect(case, shared, bench.run(case, shared))
