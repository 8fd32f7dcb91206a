"""Which bits dense prefill gives: a sequence's own alone, whatever is computed beside it, and wherever its rows lie."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from bench import Bench, Result, expect, identical

from cute_mla.testing.dense_prefill_cases import DensePrefillCase, DensePrefillTensors, make_dense_prefill_tensors
from cute_mla.testing.runner import schedules

MIXED = DensePrefillCase(lengths=((65, 150), (0, 20), (3, 1), (130, 129), (9, 0)), group=2, causal=True, ends="clipped", sm_count=2)
OTHER = replace(MIXED, dtype="fp16", d_qk=128, q_layout="odd", causal=False, values="falling")
CASES = pytest.mark.parametrize("case", [MIXED, OTHER], ids=["causal", "full"])


def sequence_of(case: DensePrefillCase, tensors: DensePrefillTensors, sequence: int) -> tuple[DensePrefillCase, DensePrefillTensors]:
    """The operands of one sequence alone."""
    queries, keys = (list(pairwise(starts))[sequence] for starts in (case.q_starts, case.k_starts))
    ends = [torch.tensor([0, end - first], dtype=torch.int32) for first, end in (queries, keys)]
    alone = DensePrefillTensors(tensors.q[slice(*queries)], tensors.k[slice(*keys)], tensors.v[slice(*keys)], *ends)
    return replace(case, lengths=(case.lengths[sequence],)), alone


def results_of(case: DensePrefillCase, results: Result, sequence: int) -> Result:
    """The results of one sequence."""
    first, end = list(pairwise(case.q_starts))[sequence]
    return tuple(result[first:end] for result in results)


@CASES
def test_every_schedule_gives_the_same_bits(bench: Bench, case: DensePrefillCase) -> None:
    case = replace(case, lengths=((65, 150), (3, 1), (9, 0)))
    assert len(bench.judge(case, *schedules(4, 0))) == 4


@CASES
def test_bits_depend_on_neither_neighbours_nor_sm_count(bench: Bench, case: DensePrefillCase) -> None:
    tensors = make_dense_prefill_tensors(case)
    together = bench.run(case, tensors)
    expect(case, tensors, together)
    for sm_count in (1, 132):
        assert identical(bench.run(replace(case, sm_count=sm_count), tensors), together)
    for sequence in (0, 2, 3, 4):
        assert identical(bench.run(*sequence_of(case, tensors, sequence)), results_of(case, together, sequence)), sequence


def test_bits_depend_on_no_layout(bench: Bench) -> None:
    """Nor on whether Q comes by TMA, nor on which of the query heads that share keys it is."""
    case = replace(MIXED, lengths=((65, 150), (3, 1)))
    expected = bench.run(case)
    for layout in (
        {"kv_layout": "kvpacked"},
        {"q_layout": "odd", "outputs": "strided"},
        {"kv_layout": "heads_first", "q_layout": "sliced"},
    ):
        assert identical(bench.run(replace(case, **layout)), expected), layout  # type: ignore[arg-type]
    tensors = make_dense_prefill_tensors(case)
    out, lse = bench.run(case, replace(tensors, q=tensors.q[:, :1].expand(-1, 2, -1).contiguous()))
    assert identical((out[:, 0], lse[:, 0]), (out[:, 1], lse[:, 1]))
    assert identical((out[:, 0], lse[:, 0]), (expected[0][:, 0], expected[1][:, 0]))


def test_another_seed_gives_other_bits(bench: Bench) -> None:
    case = replace(MIXED, lengths=((9, 20),))
    assert not identical(bench.run(case), bench.run(replace(case, seed=1)))
