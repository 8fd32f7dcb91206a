"""The cost of batch invariance, by the model."""

from __future__ import annotations

import pytest

from cute_mla.profiles.model.invariance_cost import BATCH_INVARIANT_OPS, costs, markdown
from cute_mla.profiles.model.launches import NoModelError
from cute_mla.profiles.model.partition import CtaWork, DecodeWork, decode_work
from cute_mla.profiles.model.prediction import Launch
from cute_mla.profiles.model.report import launch_on
from cute_mla.profiles.rows import Case, load

GPU = "H200"


def case_named(name: str) -> Case:
    return next(case for op in (*BATCH_INVARIANT_OPS, "sparse_prefill") for case in load(op) if case.name == name)


def test_requests_are_cut_at_multiples_of_128_tiles_alone() -> None:
    """300 tiles on 132 SMs: three pieces, however many parts the plan has; and a request of 128 tiles is one piece."""
    split = decode_work([300 * 64], 132, max_splits=3)
    assert split == DecodeWork((CtaWork(128, 1), CtaWork(128, 1), CtaWork(44, 1)), cut_requests=1, splits=3, most_splits=3)
    assert decode_work([128 * 64], 132, max_splits=1) == DecodeWork((CtaWork(128, 1),), 0, 0, 0)


def test_one_request_has_one_cta_and_no_combine() -> None:
    """D12: 64 tiles, which the plan else cuts among all SMs."""
    plain, invariant = (launch_on(case_named("D12.h16"), GPU, flag) for flag in (False, True))
    assert isinstance(plain, Launch)
    assert isinstance(invariant, Launch)
    assert max(work.blocks for work in plain.cta_work) == 1
    assert invariant.cta_work == (CtaWork(64, 1),)
    assert plain.combine is not None
    assert invariant.combine is None
    assert (invariant.counts, invariant.block, invariant.bytes) == (plain.counts, plain.block, plain.bytes)


def test_a_long_request_is_merged_from_sixteen_pieces() -> None:
    """D10: 131,072 keys."""
    invariant = launch_on(case_named("D10.h16s1"), GPU, True)
    assert isinstance(invariant, Launch)
    assert [work.blocks for work in invariant.cta_work] == [128] * 16
    assert invariant.combine is not None
    assert invariant.combine.bytes == 16 * 16 * 4 * 513 + 16 * 2 * 512


def test_large_batches_cost_little_and_single_requests_much() -> None:
    found = {cost.row: cost for cost in costs(GPU)}
    assert found.keys() >= {"D1.fixed", "D12.h16", "S1.topk2048", "S2.b2s2"}
    assert found["D1.fixed"].is_small
    assert found["S1.topk2048"].is_small
    assert found["D12.h16"].ratios[0] > 5
    assert all(low <= high for low, high in (cost.ratios for cost in found.values()))


def test_prefill_has_no_flag() -> None:
    with pytest.raises(NoModelError, match="sparse_prefill has no flag batch_invariant"):
        launch_on(case_named("P1.8k"), GPU, True)


def test_every_row_is_in_the_table_or_below_it() -> None:
    text = markdown([GPU])
    for cost in costs(GPU):
        assert (f"| {cost.row} | " in text) != cost.is_small
        assert cost.row in text
