"""The items that dense prefill on sm90 finds, on the simulator: those of the model, and within the operands whatever the lengths say."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="the CuTe DSL (build extra) is not installed")

from cute_mla import simulator
from cute_mla.profiles.launches.partition import PrefillTiles, sorted_prefill_order
from cute_mla.spec.arch import SM90
from cute_mla.spec.mla import ceil_div
from tests.kernels.launching import CompiledKernel, launch, nbytes

TILE = 128
Record = tuple[int, ...]  # head, first row, rows, first key, keys, diagonal


@cache
def kernel() -> CompiledKernel:
    from cute_mla.aot_build.compile import compile_source
    from tests.kernels import items_kernel

    source = items_kernel.source()
    result = compile_source(source, SM90)
    return CompiledKernel(source, result.entry, result.ptx)


def found(
    starts_q: Sequence[int], starts_k: Sequence[int], totals: tuple[int, int], row_blocks: int, heads: int, causal: bool, ctas: int
) -> list[list[Record]]:
    """Return the items of every CTA. starts: cu_seqlens."""
    batch = len(starts_q) - 1
    capacity = batch * heads * row_blocks + 1
    tensors = {
        "cu_seqlens_q": torch.tensor(starts_q, dtype=torch.int32),
        "cu_seqlens_k": torch.tensor(starts_k, dtype=torch.int32),
        "records": torch.zeros((ctas, capacity, 6), dtype=torch.int32),
        "counts": torch.zeros(ctas, dtype=torch.int32),
    }
    memory = simulator.GlobalMemory()
    for name, tensor in tensors.items():
        memory.add(name, tensor.data_ptr(), nbytes(tensor), writable=name in ("records", "counts"))
    args: list[Any] = [*tensors.values(), batch, heads, *totals, row_blocks, int(causal), capacity]
    assert not launch(kernel(), (ctas, 1, 1), args, memory)
    walks = zip(tensors["records"].tolist(), tensors["counts"].tolist(), strict=True)
    return [[tuple(record) for record in rows[:count]] for rows, count in walks]


@pytest.mark.parametrize("seed", range(40))
def test_items_are_those_of_the_model(seed: int) -> None:
    draw = random.Random(seed)
    most = draw.choice([130, 700, 5000])
    lengths = [draw.choice([0, 1, 127, 128, 129, draw.randrange(most)]) for _ in range(draw.choice([1, 2, 5, 33, 70]))]
    heads, ctas, causal, cached = draw.choice([1, 3, 16]), draw.choice([1, 2, 7]), draw.random() < 0.6, draw.choice([0, 0, 100, 1000])
    starts_q, starts_k = (list(accumulate((length + more for length in lengths), initial=5)) for more in (0, cached))
    row_blocks = max(ceil_div(max(lengths), TILE), 1)
    walks = found(starts_q, starts_k, (starts_q[-1], starts_k[-1]), row_blocks, heads, causal, ctas)

    def record(sequence: int, head: int, block: int) -> Record:
        rows, keys = lengths[sequence] - block * TILE, lengths[sequence] + cached
        seen = min(block * TILE + cached + min(rows, TILE), keys) if causal else keys
        return head, starts_q[sequence] + block * TILE, rows, starts_k[sequence], seen, block * TILE + cached if causal else keys

    dealt = sorted_prefill_order(PrefillTiles(TILE, TILE, causal, cached), lengths, heads, ctas)
    assert walks == [[record(item.sequence, item.head, item.block) for item in items] for items in dealt]


@pytest.mark.parametrize("seed", range(40))
def test_items_lie_within_the_operands(seed: int) -> None:
    """Offsets that are no prefix sums, and more rows than the longest sequence may have."""
    draw = random.Random(seed)
    batch, totals, row_blocks, heads = draw.randrange(1, 40), (draw.randrange(1, 900), draw.randrange(1, 900)), draw.randrange(1, 5), 2
    near = [-(1 << 31), -1, 0, 1, 127, 128, 500, 899, 2000, (1 << 31) - 1]
    starts_q, starts_k = ([draw.choice([*near, draw.randrange(900)]) for _ in range(batch + 1)] for _ in range(2))
    items = [item for walk in found(starts_q, starts_k, totals, row_blocks, heads, draw.random() < 0.5, 3) for item in walk]
    for head, first_row, rows, first_key, keys, _ in items:
        assert 0 <= head < heads
        assert rows > 0
        assert 0 <= first_row <= totals[0] - rows
        assert keys >= 0
        assert 0 <= first_key <= totals[1] - keys
    assert len(items) <= batch * heads * row_blocks
