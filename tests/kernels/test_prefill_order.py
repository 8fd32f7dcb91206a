"""The order in which dense prefill on sm100 hands out its items: plain integers in place of the device's."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="the CuTe DSL (build extra) is not installed")

from cute_mla.kernels.dense_prefill import operands
from cute_mla.kernels.primitives import arithmetic
from cute_mla.profiles.launches.partition import PrefillTiles, dense_prefill_order
from cute_mla.spec.dense_prefill import RANKED_ROUNDS


@pytest.fixture(autouse=True)
def on_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (operands, arithmetic):
        monkeypatch.setattr(module, "cutlass", SimpleNamespace(select_=lambda condition, a, b: a if condition else b))
    monkeypatch.setattr(operands, "Uint32", int)
    monkeypatch.setattr(operands, "Int32", int)


def handed_out(monkeypatch: pytest.MonkeyPatch, heads: int, row_blocks: int, ctas: int) -> list[list[int]]:
    """Return the items of each CTA, in order."""
    here = {"cta": 0}
    arch = SimpleNamespace(block_idx=lambda: (here["cta"], 0, 0), grid_dim=lambda: (ctas, 1, 1))
    monkeypatch.setattr(operands, "cute", SimpleNamespace(arch=arch))
    arguments: Any = SimpleNamespace(batch=1, h_q=heads, row_blocks=row_blocks)
    items = operands.DensePrefillItems(arguments, causal=False, item_rows=1)
    walks = []
    for cta in range(ctas):
        here["cta"] = cta
        indices = [items.of_round(turn) for turn in range(items.rounds() + 5)]
        walks.append([index for index in indices if index < items.count()])
        assert indices == walks[-1] + [items.count()] * (len(indices) - len(walks[-1])), "an item after a round without one"
        assert len(walks[-1]) <= items.rounds()
    return walks


def test_ranks_are_those_of_a_sort() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        size, period = draw.randrange(1, 60), draw.randrange(1, 20)
        phase = draw.randrange(period)
        expected = sorted(range(size), key=lambda number: ((number + phase) % period, number))
        assert [operands.ranked(rank, phase, size, period) for rank in range(size)] == expected


@pytest.mark.parametrize(("heads", "row_blocks", "ctas"), [(1, 1, 1), (16, 64, 132), (3, 5, 7), (128, 4, 132), (2, 200, 132), (1, 3, 8)])
def test_every_item_is_handed_out_once(monkeypatch: pytest.MonkeyPatch, heads: int, row_blocks: int, ctas: int) -> None:
    walks = handed_out(monkeypatch, heads, row_blocks, ctas)
    assert sorted(index for walk in walks for index in walk) == list(range(heads * row_blocks))
    for turn, index in ((turn, index) for walk in walks for turn, index in enumerate(walk)):
        assert index // (RANKED_ROUNDS * ctas) == turn // RANKED_ROUNDS


@pytest.mark.parametrize(("heads", "row_blocks", "ctas"), [(1, 1, 1), (16, 64, 132), (3, 5, 7), (2, 200, 132), (1, 3, 8)])
def test_the_model_hands_out_alike(monkeypatch: pytest.MonkeyPatch, heads: int, row_blocks: int, ctas: int) -> None:
    tiles = PrefillTiles(1, 1, causal=True)
    dealt = dense_prefill_order(tiles, [row_blocks], heads, ctas)
    numbers = [[item.head * row_blocks + row_blocks - 1 - item.block for item in items] for items in dealt]
    assert numbers == handed_out(monkeypatch, heads, row_blocks, ctas)


@pytest.mark.parametrize(("heads", "row_blocks", "ctas"), [(16, 64, 132), (8, 64, 132), (16, 256, 132), (128, 16, 132), (16, 64, 148)])
def test_no_cta_has_much_more_to_do(monkeypatch: pytest.MonkeyPatch, heads: int, row_blocks: int, ctas: int) -> None:
    """A causal call: as many tiles as the block is far from the first, and four tenths of one for what an item costs besides."""
    walks = handed_out(monkeypatch, heads, row_blocks, ctas)
    clocks = [sum(row_blocks - index % row_blocks + 0.4 for index in walk) for walk in walks]
    assert max(clocks) * 0.94 < sum(clocks) / ctas
