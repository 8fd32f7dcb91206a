"""Bits of dense prefill: equal under every schedule, and wherever a sequence's rows lie.

Their independence of other sequences is tested in tests/ops/batch_invariance/test_batch_invariance.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla.testing.cases.dense_prefill import DensePrefillCase, make_dense_prefill_tensors
from cute_mla.testing.runner import schedules
from tests.support.bench import Bench, identical

MIXED = DensePrefillCase(lengths=((65, 150), (0, 20), (3, 1), (130, 129), (9, 0)), group=2, causal=True, ends="clipped", sm_count=2)
OTHER = replace(MIXED, dtype="fp16", d_qk=128, q_layout="odd", causal=False, values="falling")
CASES = pytest.mark.parametrize("case", [MIXED, OTHER], ids=["causal", "full"])


@CASES
def test_every_schedule_gives_the_same_bits(bench: Bench, case: DensePrefillCase) -> None:
    case = replace(case, lengths=((65, 150), (3, 1), (9, 0)))
    assert len(bench.judge(case, *schedules(4, 0))) == 4


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
