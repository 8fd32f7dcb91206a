"""The shipped logits kernels on the simulator: NaN in every byte that must not matter, and items that the host would not choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cute_mla.ops import mqa_logits
from cute_mla.spec.mqa_logits import MqaLogitsProblem
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.runner import SCHEDULES, Schedule
from tests.support.bench import Bench

# Rows of q, weights and logits are wider than the case says, and so are pages; what lies beside them is NaN.
STRIDED: dict[str, Any] = {"layout": "strided", "outputs": "strided", "sm_count": 2}
PAGED: dict[str, Any] = {**STRIDED, "requests": 2, "lengths": "edges"}
CASES = {
    "rows": MqaLogitsCase(tokens=10, keys=333, windows="edges", **STRIDED),
    "rows of 32 heads": MqaLogitsCase(heads=32, tokens=10, keys=333, windows="edges", clean=False, **STRIDED),
    "none of the first tiles": MqaLogitsCase(tokens=6, keys=900, windows="near", **STRIDED),
    "five heads": MqaLogitsCase(heads=5, tokens=10, keys=1402, windows="edges", clean=False, **STRIDED),
    "relative": MqaLogitsCase(heads=33, tokens=5, keys=700, columns=256, windows="random", clean=False, **STRIDED),
    "pages": MqaLogitsCase(**PAGED | {"requests": 5}, tokens=1, keys=200, page_size=64),
    "small pages": MqaLogitsCase(**PAGED | {"requests": 3}, tokens=3, keys=700, columns=1000, page_size=16),
    "large pages": MqaLogitsCase(**PAGED, heads=32, tokens=3, keys=300, page_size=128, per_token=True, clean=False),
    "fewer columns": MqaLogitsCase(**PAGED, heads=12, tokens=3, keys=300, columns=200, page_size=32, per_token=True),
    "no page": MqaLogitsCase(**PAGED | {"lengths": "full"}, tokens=1, keys=300, page_size=64, broken=True),
    "five tokens": MqaLogitsCase(**PAGED | {"lengths": "random"}, heads=63, tokens=5, keys=500, page_size=64, clean=False),
}


@pytest.mark.in_turn
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_formula(bench: Bench, name: str, schedule: str) -> None:
    bench.judge(CASES[name], Schedule(schedule, 5))


@pytest.mark.parametrize("chunk", [1, 2, 64])
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("name", ["rows", "small pages"])
def test_logits_do_not_depend_on_the_items(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, sms: int, chunk: int) -> None:
    monkeypatch.setattr(MqaLogitsProblem, "chunk", lambda problem, sm_count: chunk)
    mqa_logits.plan.cache_clear()
    bench.judge(replace(CASES[name], sm_count=sms), Schedule("lazy", 0))
    mqa_logits.plan.cache_clear()
