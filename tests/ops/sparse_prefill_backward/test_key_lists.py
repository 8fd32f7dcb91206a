"""Lists of the slots that name each key: complete, in order, and the same under every schedule. Sums over them, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import cute_mla
from cute_mla.ops.key_lists import IndexedKeys, KeyLists, RowSums
from cute_mla.spec.arch import Arch
from cute_mla.spec.row_sums import COLUMNS
from cute_mla.testing.compare import same_bits
from tests.ops.sparse_prefill_backward.keys import drawn, lists_of, patterns

SCHEDULES = (("round_robin", 0), ("lazy", 0), ("adversarial", 0), ("random", 1))
WHOLE = 1 << 20  # tokens: all in one chunk


def listed(
    call: IndexedKeys, arch: Arch, chunk: tuple[int, int], schedule: str = "round_robin", seed: int = 0, code: str = "ptx"
) -> KeyLists:
    with cute_mla.simulate(arch.name, schedule=schedule, seed=seed, code=code) as device:
        return call.lists(device, chunk)


def expect_lists(call: IndexedKeys, chunk: tuple[int, int], lists: KeyLists) -> None:
    starts, entries = lists_of(call, chunk)
    assert np.array_equal(lists.row_starts.numpy(), starts)
    assert np.array_equal(lists.entries.numpy()[: len(entries)], entries)


@pytest.mark.parametrize("name", patterns())
def test_lists(name: str, arch: Arch) -> None:
    call = patterns()[name]
    for chunk in call.chunks(17):
        expect_lists(call, chunk, listed(call, arch, chunk))


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_order_does_not_depend_on_the_schedule(schedule: tuple[str, int], arch: Arch) -> None:
    for name in ("duplicates", "one key", "lengths"):
        call = patterns()[name]
        chunk = (0, call.tokens)
        expect_lists(call, chunk, listed(call, arch, chunk, *schedule))


@pytest.mark.parametrize("name", ["lengths", "duplicates"])
def test_machine_code(name: str, arch: Arch) -> None:
    call = patterns()[name]
    chunk = (1, call.tokens - 1)
    expect_lists(call, chunk, listed(call, arch, chunk, code="sass"))


def rows_of(call: IndexedKeys, columns: int) -> torch.Tensor:
    """Return a row for every slot, NaN where it names no key."""
    draw = torch.Generator().manual_seed(7)
    rows = torch.randn(call.tokens * call.topk, columns, generator=draw) * torch.logspace(-3, 3, columns)
    named = torch.zeros(len(rows), dtype=torch.bool)
    named[torch.from_numpy(lists_of(call, (0, call.tokens))[1])] = True
    return torch.where(named[:, None], rows, math.nan).bfloat16()


def in_order(call: IndexedKeys, rows: torch.Tensor) -> torch.Tensor:
    """Add the rows of each key one after the other, in fp32."""
    starts, entries = lists_of(call, (0, call.tokens))
    sums = torch.zeros(call.keys, rows.shape[1])
    for key in range(call.keys):
        for entry in entries[starts[key] : starts[key + 1]]:
            sums[key] += rows[entry].float()
    return sums


def summed(
    call: IndexedKeys, arch: Arch, rows: torch.Tensor, chunk_tokens: int, out: torch.Tensor, code: str = "ptx", **options: bool
) -> None:
    """Sum the rows of all keys into out, by chunks."""
    chunks = list(call.chunks(chunk_tokens))
    with cute_mla.simulate(arch.name, code=code) as device:
        sums = out.new_full((call.keys, rows.shape[1]), math.nan, dtype=torch.float32) if len(chunks) > 1 else None
        total = RowSums(out, sums, 0.25, **options)
        for number, (first, tokens) in enumerate(chunks):
            own = rows[first * call.topk : (first + tokens) * call.topk]
            total.add(device, call.lists(device, (first, tokens)), own, number == 0, number + 1 == len(chunks))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("chunk_tokens", [1, 7, WHOLE])
def test_sums_do_not_depend_on_chunks(columns: int, chunk_tokens: int, arch: Arch) -> None:
    call = IndexedKeys(drawn(1, 20, 9, 21), None, None, 21)
    rows = rows_of(call, columns)
    expected = in_order(call, rows) * 0.25
    out = torch.full((21, columns), math.nan, dtype=torch.bfloat16)
    summed(call, arch, rows, chunk_tokens, out, accumulate=False)
    assert same_bits(out, expected.bfloat16())
    wide = torch.full((21, columns + 2), 3.0)[:, :columns]
    summed(call, arch, rows, chunk_tokens, wide, accumulate=False)
    assert same_bits(wide, expected)
    summed(call, arch, rows, chunk_tokens, wide, accumulate=True)
    assert same_bits(wide, expected + expected)


@pytest.mark.parametrize("name", ["one key", "packed", "no slots"])
def test_sums_over_lists_of_every_length(name: str, arch: Arch) -> None:
    """A list of hundreds of entries, of one, of none."""
    call = patterns()[name]
    rows = rows_of(call, 128)
    for code in ("ptx", "sass"):
        out = torch.full((call.keys, 128), math.nan)
        summed(call, arch, rows, WHOLE, out, code, accumulate=False)
        assert same_bits(out, in_order(call, rows) * 0.25)


def test_too_many_entries_are_refused(arch: Arch) -> None:
    call = IndexedKeys(torch.empty(1, 1, 1, dtype=torch.int32).expand(1, 1 << 20, 4096), None, None, 8)
    with (
        cute_mla.simulate(arch.name) as device,
        pytest.raises(ValueError, match="1048576 tokens of 4096 indices; supported: to 2147483647"),
    ):
        call.lists(device, (0, call.tokens))
