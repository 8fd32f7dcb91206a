"""The shipped logits kernels on the simulator: NaN in every byte that must not matter, and items that the host would not choose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla import simulator
from cute_mla.spec.mqa_logits import HEAD_TILES, MqaLogitsConfig
from tests.kernels.launching import shipped
from tests.kernels.mqa_logits_problem import Call, Memory, mistakes, run

pytestmark = pytest.mark.usefixtures("built_for")

POLICIES = (
    simulator.Policy(),
    simulator.Policy(async_mode="lazy"),
    simulator.Policy(schedule="random", seed=5, async_mode="random"),
    simulator.Policy(schedule="adversarial", seed=1, async_mode="lazy"),
)
WINDOWS = ((0, 300), (17, 129), (5, 5), (200, 100), (0, -3), (64, 65), (1, 400), (128, 256), (0, 1 << 40))
CALLS = {
    "rows": Call(windows=WINDOWS, keys=333),
    "rows of 32 heads": Call(heads=32, windows=WINDOWS, keys=333, clean=False),
    "none of the first tiles": Call(windows=((300, 400), (310, 420), (600, 700), (5, 5), (520, 530)), keys=900),
    "five heads": Call(heads=5, windows=((0, 0), (0, 1), (0, 63), (0, 64), (0, 65), (100, 1400)), keys=1402, clean=False),
    "relative": Call(heads=33, windows=((3, 70), (60, 300), (128, 700)), keys=700, relative=True, clean=False, room=256),
    "pages": Call(lengths=(200, 0, 65, 1), page_size=64),
    "small pages": Call(lengths=(700, 3, 129), tokens=3, page_size=16, room=1000),
    "large pages": Call(lengths=((300, 10, 0), (128, 127, 256)), tokens=3, page_size=128, heads=32, clean=False),
    "fewer columns": Call(lengths=((300, 10, 0), (128, 127, 256)), tokens=3, page_size=32, heads=12, room=200),
    "no page": Call(lengths=(300, 200), page_size=64, dead=1),
    "five tokens": Call(lengths=(500, 200), tokens=5, page_size=64, heads=63, clean=False),
}


def wrong_with(call: Call, policy: simulator.Policy) -> list[str]:
    """Return what is wrong with a call of the shipped kernel."""
    config = MqaLogitsConfig(call.paged, next(tile for tile in HEAD_TILES if call.heads <= tile))
    return run(shipped("mqa_logits", config.name), call, policy)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.schedule}, {policy.async_mode}")
@pytest.mark.parametrize("name", CALLS)
def test_logits_are_those_of_the_formula(name: str, policy: simulator.Policy) -> None:
    assert wrong_with(CALLS[name], policy) == []


@pytest.mark.parametrize("chunk", [1, 2, 64])
@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("name", ["rows", "small pages"])
def test_logits_do_not_depend_on_the_items(name: str, chunk: int, sms: int) -> None:
    call = replace(CALLS[name], chunk=chunk, sms=sms)
    assert wrong_with(call, POLICIES[1]) == []


def test_logits_that_were_not_written_are_told() -> None:
    operands = Memory(CALLS["rows"])
    operands.arguments()
    assert "logits, the first (0, 0): -7.5 is not" in "".join(mistakes(operands))
