"""The shipped split_plan for requests with different numbers of query tokens: units and plan, against plain Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from cute_mla import simulator
from cute_mla.spec.arch import Arch
from cute_mla.spec.split_plan import NO_LIMIT, PLAN_COLUMNS, UNIT_COLUMNS, RaggedQueries
from cute_mla.testing.split_plan_reference import SplitPlan, Unit, reference_plan, reference_units
from tests.kernels.caches import WITHOUT_WINDOW
from tests.kernels.launching import CompiledKernel, launch, nbytes, shipped
from tests.mutation.planting import Bug, together

GARBAGE = 0x5A5A5A5A
HUGE = (1 << 31) - 1

Planned = tuple[SplitPlan, list[tuple[int, ...]], list[simulator.Finding]]


@pytest.fixture
def kernel(built_for: Arch) -> CompiledKernel:
    return shipped("split_plan", "i32")


def run(kernel: CompiledKernel, lengths: Sequence[int], offsets: Sequence[int], ragged: RaggedQueries, num_parts: int) -> Planned:
    """Return the kernel's plan, its table of units and findings. The outputs start as garbage, at multiples of 4 bytes only."""
    units = ragged.units
    tensors = {
        "lengths": torch.tensor([*lengths, 0], dtype=torch.int32)[:-1],
        "plan": torch.full((num_parts * PLAN_COLUMNS + 1,), GARBAGE, dtype=torch.int32)[1:],
        "num_splits": torch.full((units + 2,), GARBAGE, dtype=torch.int32)[1:],
        "cu_seqlens_q": torch.tensor(offsets, dtype=torch.int32),
        "units": torch.full((ragged.table_rows * UNIT_COLUMNS + 1,), GARBAGE, dtype=torch.int32)[1:],
    }
    memory = simulator.GlobalMemory()
    for name, tensor in tensors.items():
        if tensor.numel():
            memory.add(name, tensor.data_ptr(), nbytes(tensor), writable=name not in ("lengths", "cu_seqlens_q"))
    pointers: list[torch.Tensor | int] = [tensors["lengths"], 0, tensors["plan"], tensors["num_splits"], tensors["cu_seqlens_q"]]
    table: torch.Tensor | int = tensors["units"] if ragged.unit_tokens else 0
    scalars = [units, num_parts, NO_LIMIT, 0, ragged.requests, ragged.total_q, ragged.max_seqlen_q, max(ragged.unit_tokens, 1)]
    findings = launch(kernel, (1, 1, 1), [*pointers, table, *scalars, *WITHOUT_WINDOW, 0], memory)
    parts = tuple(tuple(row) for row in tensors["plan"].view(num_parts, PLAN_COLUMNS).tolist())
    rows = [tuple(row) for row in tensors["units"].view(-1, UNIT_COLUMNS).tolist()]
    return SplitPlan(parts, tuple(tensors["num_splits"].tolist())), rows, findings


def expected(
    lengths: Sequence[int], offsets: Sequence[int], ragged: RaggedQueries, num_parts: int
) -> tuple[SplitPlan, list[tuple[int, ...]]]:
    """Return plan and table. Of a unit the keys count that its last token sees."""
    if not ragged.unit_tokens:
        used = min(max(offsets[-1], 0), ragged.total_q)
        return reference_plan(lengths[:used], num_parts, ragged.units), []
    units = reference_units(offsets, ragged)
    keys = [max(max(lengths[unit.request], 0) - unit.later, 0) for unit in units]
    behind = Unit(0, 0, 0, 0, 0, ragged.unit_tokens)
    rows = [unit.row for unit in units] + [behind.row] * (ragged.units - len(units))
    return reference_plan(keys, num_parts, ragged.units), rows


def check(kernel: CompiledKernel, lengths: Sequence[int], offsets: Sequence[int], ragged: RaggedQueries, num_parts: int) -> None:
    plan, rows, findings = run(kernel, lengths, offsets, ragged, num_parts)
    assert not findings
    assert (plan, rows) == expected(lengths, offsets, ragged, num_parts)


def offsets_of(tokens: Sequence[int]) -> list[int]:
    return list(accumulate(tokens, initial=0))


TOKENS = {
    "one request": [5],
    "none": [0, 0, 0],
    "one token each": [1] * 40,
    "around a unit": [0, 1, 2, 3, 4, 5, 6, 7, 0],
    "a long one": [1, 1, 1000, 1, 0, 2],
    "last is empty": [3, 3, 0],
}


@pytest.mark.parametrize("unit_tokens", [1, 3, 8])
@pytest.mark.parametrize("case", TOKENS)
def test_tokens(kernel: CompiledKernel, case: str, unit_tokens: int) -> None:
    tokens = TOKENS[case]
    lengths = [100 + 7 * request * request for request in range(len(tokens))]
    ragged = RaggedQueries(len(tokens), sum(tokens) + 3, max(*tokens, unit_tokens), unit_tokens)
    check(kernel, lengths, offsets_of(tokens), ragged, 20)


@pytest.mark.parametrize("requests", [1023, 1025, 2100])
def test_requests_around_the_number_of_threads(kernel: CompiledKernel, requests: int) -> None:
    draw = random.Random(requests)
    tokens = [draw.choice([0, 0, 1, 2, 9]) for _ in range(requests)]
    lengths = [draw.randrange(3000) for _ in tokens]
    check(kernel, lengths, offsets_of(tokens), RaggedQueries(requests, sum(tokens), 9, 4), 132)


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(kernel: CompiledKernel, seed: int) -> None:
    draw = random.Random(seed)
    tokens = [draw.randrange(draw.choice([2, 5, 40])) for _ in range(draw.randrange(1, 60))]
    lengths = [draw.choice([-3, 0, 64, draw.randrange(20_000)]) for _ in tokens]
    spare, unit_tokens = draw.randrange(5), draw.randrange(1, 9)
    ragged = RaggedQueries(len(tokens), sum(tokens) + spare, max(*tokens, unit_tokens, 1), unit_tokens)
    check(kernel, lengths, offsets_of(tokens), ragged, draw.randrange(1, 200))


@pytest.mark.parametrize("offsets", [[0, 50, 4, HUGE], [-5, 2, -(1 << 31), 9], [7, 3, 1, 0], [HUGE] * 4, [0, HUGE, 0, HUGE]], ids=str)
def test_offsets_that_are_none_keep_to_the_tokens(kernel: CompiledKernel, offsets: list[int]) -> None:
    for unit_tokens, most in ((2, 4), (4, 4), (1, 9)):
        ragged = RaggedQueries(3, 9, most, unit_tokens)
        check(kernel, [500, 70, 300], offsets, ragged, 7)
        assert all(row[1] in range(10) and row[1] + row[2] in range(10) for row in run(kernel, [500, 70, 300], offsets, ragged, 7)[1])


@pytest.mark.parametrize("used", [0, 1, 5, 9, 12, -1])
def test_query_tokens_that_are_units(kernel: CompiledKernel, used: int) -> None:
    """Sparse decode: the lengths are those of tokens, and of the offsets only the last one counts."""
    check(kernel, [500, 70, 0, 64, 130, 7, 9, 1, 3000], [HUGE, -1, used], RaggedQueries(2, 9, 9), 7)


def test_a_plan_without_its_barriers_is_noticed(kernel: CompiledKernel) -> None:
    ragged, lengths, offsets = RaggedQueries(40, 123, 9, 2), [100] * 40, [3 * request for request in range(41)]
    bug = Bug("missing barriers", r"bar\.sync", "// bar.sync", together)

    def is_noticed(broken: CompiledKernel) -> bool:
        plan, rows, findings = run(broken, lengths, offsets, ragged, 20)
        return bool(findings) or (plan, rows) != expected(lengths, offsets, ragged, 20)

    assert kernel.survivors(bug, is_noticed) == []


def test_a_plan_of_the_keys_that_only_later_tokens_see_is_noticed(kernel: CompiledKernel) -> None:
    """The costs of units are those of their own keys: 10 tiles of the first, 20 of the last."""
    ragged, lengths, offsets = RaggedQueries(1, 1280, 1280, 640), [1280], [0, 1280]
    plan, _ = expected(lengths, offsets, ragged, 3)
    assert plan != reference_plan([1280, 1280], 3, 2)
    check(kernel, lengths, offsets, ragged, 3)
