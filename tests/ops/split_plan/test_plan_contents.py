"""Contents of a plan's tensors. Engines copy plans into buffers of their own, so nothing ties a plan to a call.

A plan serves calls of every kind over the same requests. Arbitrary numbers in place of a plan give wrong results, but never an access
outside the operands and never a kernel that does not end. The walk itself is tested with many more plans in tests/kernels/test_work.py.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.ops.split_plan import MlaSchedule
from cute_mla.simulator import Finding
from cute_mla.spec.arch import SM90, SM100, Arch
from cute_mla.spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from cute_mla.testing.compare import same_bits
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase, DenseDecodeTensors, make_dense_decode_tensors
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.support.bench import Bench, expect
from tests.support.right_calls import RightCall, planned

CUT = INVARIANT_SPLIT_TILES * TILE_KEYS
SM_COUNT = 6
GUARD = 64  # elements

SHORT = DenseDecodeCase(batch=3, s_q=2, lengths=(300, 0, 70), h_q=9, page_size=32, causal=True, sm_count=SM_COUNT)

Plan = tuple[Tensor, Tensor]


def make_plan(case: DenseDecodeCase, lengths: list[int]) -> Plan:
    """Return a copy of the plan for these lengths."""
    metadata, num_splits = cute_mla.get_mla_metadata(torch.tensor(lengths, dtype=torch.int32), case.s_q * case.h_q, 1, case.h_q)
    return metadata.clone(), num_splits.clone()


def decode_planned(case: DenseDecodeCase, tensors: DenseDecodeTensors, plan: Plan, invariant: bool) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = RightCall(case, tensors).run(**planned(plan), batch_invariant=invariant)
    return results


def is_overwriting(finding: Finding) -> bool:
    """Return whether several CTAs wrote the same element of the results."""
    return finding.kind == "race" and re.search(r"a store overwrites global address .* of '[^']*(out|lse)", finding.message) is not None


def with_columns(tensors: DenseDecodeTensors, columns: int) -> DenseDecodeTensors:
    """Return the operands with a block table of another width."""
    table = torch.full((tensors.block_table.shape[0], columns), 2_147_480_000, dtype=torch.int32)
    kept = min(columns, tensors.block_table.shape[1])
    table[:, :kept] = tensors.block_table[:, :kept]
    return replace(tensors, block_table=table)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_plan_for_longer_requests_serves_a_table_that_none_of_them_would_fit(bench: Bench, invariant: bool) -> None:
    tensors = make_dense_decode_tensors(SHORT)
    narrow = with_columns(tensors, 10)
    with cute_mla.simulate(bench.arch, SM_COUNT):
        for planned_for in ([9 * CUT, 9 * CUT, 9 * CUT], [0, 5 * CUT, 0], [7, 0, 70_000]):
            expect(SHORT, narrow, decode_planned(SHORT, narrow, make_plan(SHORT, planned_for), invariant))


def random_plan(near: bool) -> Callable[[Tensor, random.Random], None]:
    """Fill a tensor with random numbers, near what plans hold or from all int32."""

    def fill(tensor: Tensor, draw: random.Random) -> None:
        low, high = (-2, 8) if near else (-(1 << 31), (1 << 31) - 1)
        tensor.copy_(torch.tensor([draw.randint(low, high) for _ in range(tensor.numel())], dtype=torch.int32).view(tensor.shape))

    return fill


def constant(value: int) -> Callable[[Tensor, random.Random], None]:
    """Fill a tensor with one number."""

    def fill(tensor: Tensor, draw: random.Random) -> None:
        tensor.fill_(value)

    return fill


CONTENTS = {
    "zeros": constant(0),
    "ones": constant(1),
    "minus ones": constant(-1),
    "greatest": constant((1 << 31) - 1),
    "least": constant(-(1 << 31)),
    "near": random_plan(near=True),
    "anything": random_plan(near=False),
}


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (a tensor of NaN, all memory around it)."""
    size = math.prod(shape)
    storage = torch.full((size + 2 * GUARD,), math.nan, dtype=dtype)
    return storage[GUARD : GUARD + size].view(shape), storage


@pytest.mark.parametrize(("invariant", "columns"), [(False, 600), (True, None)])
@pytest.mark.parametrize("contents", CONTENTS)
def test_numbers_that_are_no_plan(bench: Bench, contents: str, invariant: bool, columns: int | None) -> None:
    """The only findings allowed are those of accumulator rows that such a plan leaves unwritten, and merges."""
    draw = random.Random(contents)
    tensors = make_dense_decode_tensors(SHORT)
    if columns is not None:
        tensors = with_columns(tensors, columns)
    limit = tensors.block_table.shape[1] * SHORT.page_size if invariant else None
    out, out_storage = guarded((3, 2, 9, 512), torch.bfloat16)
    lse, lse_storage = guarded((3, 9, 2), torch.float32)
    with cute_mla.simulate(bench.arch, SM_COUNT, on_finding="collect") as device:
        plan = make_plan(SHORT, [1, 1, 1])
        for tensor in plan:
            CONTENTS[contents](tensor, draw)
        given = [tensor.clone() for tensor in plan]
        size = cute_mla.workspace_size(
            "dense_decode", batch=3, s_q=2, h_q=9, batch_invariant=invariant, max_cache_seqlen=limit, device="cpu"
        )
        workspace, workspace_storage = guarded((size // 4,), torch.float32)
        RightCall(SHORT, tensors).run(**planned(plan), batch_invariant=invariant, out=out, lse=lse, workspace=workspace)
    # parts that all own the same rows, as numbers that are no plan may say, store over each other's results
    assert all(finding.kind == "poison" or is_overwriting(finding) for finding in device.findings), device.findings
    assert all(torch.equal(tensor, before) for tensor, before in zip(plan, given, strict=True))
    for tensor, storage in ((out, out_storage), (lse, lse_storage), (workspace, workspace_storage)):
        tensor.fill_(math.nan)
        assert storage.isnan().all(), "memory outside the outputs and the workspace was written"


@pytest.mark.parametrize("invariant", [False, True])
def test_lengths_that_the_table_has_no_room_for(bench: Bench, invariant: bool) -> None:
    tensors = make_dense_decode_tensors(replace(SHORT, lengths=(320, 320, 320)))
    tensors = with_columns(tensors, 10)
    with cute_mla.simulate(bench.arch, SM_COUNT):
        for given, meant in (([321, -1, 1 << 30], [320, 0, 320]), ([(1 << 31) - 1, -(1 << 31), 63], [320, 0, 63])):
            asked, answered = (replace(tensors, cache_seqlens=torch.tensor(lengths, dtype=torch.int32)) for lengths in (given, meant))
            for plan in (make_plan(SHORT, given), make_plan(SHORT, meant)):
                expect(SHORT, answered, decode_planned(SHORT, asked, plan, invariant))


@pytest.mark.parametrize("invariant", [False, True])
def test_a_plan_for_another_number_of_parts_is_refused(bench: Bench, invariant: bool) -> None:
    tensors = make_dense_decode_tensors(SHORT)
    with cute_mla.simulate(bench.arch, 9):
        plan = make_plan(SHORT, [300, 0, 70])
    with cute_mla.simulate(bench.arch, SM_COUNT), pytest.raises(ValueError, match=r"rows; supported: \d+, as get_mla_metadata returns"):
        decode_planned(SHORT, tensors, plan, invariant)


MIXED = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 0, 260), h_q=40, causal=True, sm_count=9)


def plan_on(arch: Arch, tensors: DenseDecodeTensors) -> tuple[Tensor, Tensor]:
    """Return a plan for 80 query rows on 12 multiprocessors."""
    with cute_mla.simulate(arch, 12):
        return cute_mla.get_mla_metadata(tensors.cache_seqlens, 80, 1, 40)


def test_equal_numbers_of_parts_have_equal_plans() -> None:
    """80 rows are two CTAs on either architecture."""
    hopper, blackwell = (plan_on(arch, make_dense_decode_tensors(MIXED)) for arch in (SM90, SM100))
    assert torch.equal(hopper[0], blackwell[0])
    assert torch.equal(hopper[1], blackwell[1])


def test_plans_have_as_many_parts_as_the_architecture_has_groups_of_ctas() -> None:
    lengths = torch.tensor([1000], dtype=torch.int32)
    for rows, parts in ((16, {SM90: 132, SM100: 74}), (128, {SM90: 66, SM100: 74}), (129, {SM90: 44, SM100: 37})):
        for arch, expected in parts.items():
            with cute_mla.simulate(arch):
                metadata, _ = cute_mla.get_mla_metadata(lengths, rows, 1)
                assert metadata.shape == (expected, 8)


def test_a_plan_of_one_architecture_serves_the_other(arch: Arch) -> None:
    other = SM90 if arch is SM100 else SM100
    tensors = make_dense_decode_tensors(MIXED)
    results = []
    for planner in (arch, other):
        plan = plan_on(planner, tensors)
        with cute_mla.simulate(arch, 12):
            results.append(RightCall(MIXED, tensors).run(**planned(plan)))
    assert all(same_bits(mine, theirs) for mine, theirs in zip(*results, strict=True))


def test_a_plan_that_cuts_serves_a_call_that_needs_no_combine(bench: Bench) -> None:
    """A schedule object keeps the plan of its first call, which said how many indices count."""
    case = SparseDecodeCase(batch=3, cache="latent", h_q=5, main=Pool(640, 640), sm_count=3)
    call = RightCall(case)
    schedule = MlaSchedule()
    with cute_mla.simulate(bench.arch, case.sm_count):
        call.run(**planned((schedule, None)), topk_length=torch.tensor([640, 0, 0], dtype=torch.int32))
        splits = schedule.num_splits
        assert splits is not None
        assert splits[1] == 2
        expect(case, call.tensors, call.run(**planned((schedule, None))))
