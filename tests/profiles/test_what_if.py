"""Predicted gains of changes, by the model, on the rows that each concerns, before it is made."""

from __future__ import annotations

import pytest

from cute_mla.profiles.model.machines import machines
from cute_mla.profiles.model.prediction import Launch
from cute_mla.profiles.model.report import launch_on
from cute_mla.profiles.model.what_if import CHANGES, Change, gains, markdown
from cute_mla.profiles.rows import OPS, load

GPU = "H200"
MAY_COST = {"no pairs: every CTA converts or gathers all"}  # and depends on what L2 delivers


def launch(row: str) -> Launch:
    found = launch_on(next(case for op in OPS for case in load(op) if case.name == row), GPU)
    assert isinstance(found, Launch)
    return found


def change_named(name: str) -> Change:
    return next(change for change in CHANGES if change.name == name)


def test_every_change_is_of_known_rows_and_costs_nothing() -> None:
    found = gains(GPU)
    assert len(found) == sum(len(change.rows) for change in CHANGES)
    for gain in found:
        assert gain.saved_us[0] < gain.before_us[0]
        if gain.change not in MAY_COST:
            assert min(gain.saved_us) >= 0, gain


def test_every_change_changes_what_the_model_is_told() -> None:
    for change in CHANGES:
        for row in change.rows:
            assert change.apply(launch(row)) != launch(row), (change.name, row)


def test_half_of_what_is_fixed() -> None:
    """D12.h128 on an H200 at best: half of the longest role's fixed instructions, 2.04 clocks each."""
    before, bounds = launch("D12.h128"), machines()[GPU]
    longest = max(role.fixed / role.warps for name, role in before.counts.items() if name not in before.block.lone)
    gain = next(gain for gain in gains(GPU) if (gain.change, gain.row) == ("fixed instructions halved", "D12.h128"))
    assert gain.saved_us[0] == pytest.approx(bounds.best.us(2.04 * longest / 2), abs=1e-6)


def test_swapped_operands_take_as_long_as_the_argument_says() -> None:
    after = change_named("keys as rows, for at most 16 heads").apply(launch("S3.h16"))
    assert sum(after.block.flops.values()) / machines()[GPU].best.mma_flops_per_clock == pytest.approx(1360)


def test_a_term_that_a_kernel_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="dense_decode_sm90_bf16_cluster2 has no 'transposition' among S: K, S: Q from shared memory"):
        change_named("V transposed for nothing").apply(launch("D1.fixed"))


def test_the_table_has_a_line_for_every_gain() -> None:
    lines = markdown(GPU).splitlines()
    assert len(lines) == 2 + len(gains(GPU))
    assert lines[2].startswith("| fixed instructions halved | D5.fixed | ")
