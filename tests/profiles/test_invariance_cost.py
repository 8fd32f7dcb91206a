"""The cost of batch invariance, by the model."""

from __future__ import annotations

import pytest

from cute_mla.profiles.invariance_cost import FLAGGED, costs, markdown
from cute_mla.profiles.model import Launch
from cute_mla.profiles.model_launch import NoModel
from cute_mla.profiles.model_report import launch_on
from cute_mla.profiles.partition import Part, Split, split_parts
from cute_mla.profiles.rows import Case, load

GPU = "H200"


def case_named(name: str) -> Case:
    return next(case for op in (*FLAGGED, "sparse_prefill") for case in load(op) if case.name == name)


def test_requests_are_cut_at_multiples_of_128_tiles_alone() -> None:
    """300 tiles on 132 SMs: three pieces, however many parts the plan has; and a request of 128 tiles is one piece."""
    split = split_parts([300 * 64], 132, max_splits=3)
    assert split == Split((Part(128, 1), Part(128, 1), Part(44, 1)), cut_requests=1, splits=3, most_splits=3)
    assert split_parts([128 * 64], 132, max_splits=1) == Split((Part(128, 1),), 0, 0, 0)


def test_one_request_has_one_cta_and_no_combine() -> None:
    """D12: 64 tiles, which the plan else cuts among all SMs."""
    plain, invariant = (launch_on(case_named("D12.h16"), GPU, flag) for flag in (False, True))
    assert isinstance(plain, Launch)
    assert isinstance(invariant, Launch)
    assert max(part.blocks for part in plain.parts) == 1
    assert invariant.parts == (Part(64, 1),)
    assert plain.combine is not None
    assert invariant.combine is None
    assert (invariant.counts, invariant.block, invariant.bytes) == (plain.counts, plain.block, plain.bytes)


def test_a_long_request_is_merged_from_sixteen_pieces() -> None:
    """D10: 131,072 keys."""
    invariant = launch_on(case_named("D10.h16s1"), GPU, True)
    assert isinstance(invariant, Launch)
    assert [part.blocks for part in invariant.parts] == [128] * 16
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
    with pytest.raises(NoModel, match="sparse_prefill has no flag batch_invariant"):
        launch_on(case_named("P1.8k"), GPU, True)


def test_every_row_is_in_the_table_or_below_it() -> None:
    text = markdown([GPU])
    for cost in costs(GPU):
        assert (f"| {cost.row} | " in text) != cost.is_small
        assert cost.row in text
