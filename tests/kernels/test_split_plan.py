"""The shipped split_plan on the simulator, integer for integer against the plan in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from cute_mla import simulator
from cute_mla.spec.arch import SM120, Arch
from cute_mla.spec.split_plan import ALONE_WHOLE_EIGHTHS, MAX_PARTS, PIECE_OVERHEAD_TILES, PLAN_COLUMNS, TILE_KEYS, piece_overhead
from cute_mla.testing.split_plan_reference import SplitPlan, reference_plan
from tests.kernels import launching
from tests.kernels.caches import WITHOUT_WINDOW, Keys
from tests.kernels.launching import CompiledKernel, launch, nbytes, shipped
from tests.mutation.planting import Bug, together

GARBAGE = 0x5A5A5A5A
HUGE = (1 << 31) - 1


@pytest.fixture
def kernel(built_for: Arch) -> CompiledKernel:
    return shipped("split_plan", "i32")


def run_plan(
    kernel: CompiledKernel,
    keys: list[int] | Keys,
    num_parts: int,
    policy: simulator.Policy | None = None,
    eighths: int = 0,
) -> tuple[SplitPlan, list[simulator.Finding]]:
    """Return the kernel's plan, for one cache if only lengths are given.

    The outputs start as garbage, at addresses that are multiples of 4 bytes only.
    """
    keys = Keys.of(keys) if isinstance(keys, list) else keys
    batch = keys.batch
    tables = keys.tables()
    parts = torch.full((num_parts * PLAN_COLUMNS + 1,), GARBAGE, dtype=torch.int32)[1:]
    splits = torch.full((batch + 2,), GARBAGE, dtype=torch.int32)[1:]
    memory = simulator.GlobalMemory()
    for name, table in zip(("lengths", "extra_lengths"), tables, strict=True):
        if batch and isinstance(table, torch.Tensor):
            memory.add(name, table.data_ptr(), nbytes(table), writable=False)
    memory.add("plan", parts.data_ptr(), nbytes(parts))
    memory.add("num_splits", splits.data_ptr(), nbytes(splits))
    args = [*tables, parts, splits, 0, 0, batch, num_parts, keys.limit, keys.extra_limit, 0, 0, 0, 1, *WITHOUT_WINDOW, eighths]
    findings = launch(kernel, (1, 1, 1), args, memory, policy)
    rows = tuple(tuple(row) for row in parts.view(num_parts, PLAN_COLUMNS).tolist())
    return SplitPlan(rows, tuple(splits.tolist())), findings


def check(kernel: CompiledKernel, lengths: list[int], num_parts: int) -> None:
    plan, findings = run_plan(kernel, lengths, num_parts)
    assert not findings
    assert plan == reference_plan(lengths, num_parts)


@pytest.mark.parametrize("num_parts", [1, 2, 66, 132, 1023, MAX_PARTS])
@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [0],
        [1],
        [64],
        [65],
        [131_072],
        [0, 1, 63, 64, 65],
        [0] * 40,
        [-1, -(1 << 31), 5000],
        [0] * 20 + [100_000] + [0] * 20,
        [4096] * 128,
    ],
    ids=lambda lengths: f"batch{len(lengths)}_max{max(lengths, default=0)}",
)
def test_corner_lengths(kernel: CompiledKernel, lengths: list[int], num_parts: int) -> None:
    check(kernel, lengths, num_parts)


@pytest.mark.parametrize("batch", [31, 33, 1023, 1024, 1025, 2048, 2049, 3000])
def test_batches_around_the_number_of_threads(kernel: CompiledKernel, batch: int) -> None:
    draw = random.Random(batch)
    lengths = [draw.choice([0, 1, 64, 65, draw.randrange(20_000)]) for _ in range(batch)]
    check(kernel, lengths, draw.choice([132, MAX_PARTS]))


@pytest.mark.parametrize("lengths", [[64] * 1024, [64] * 2048, [640] * 1024], ids=["one_each", "two_each", "long"])
def test_boundaries_where_requests_start(kernel: CompiledKernel, lengths: list[int]) -> None:
    """T is a multiple of num_parts, and every search meets its key."""
    check(kernel, lengths, MAX_PARTS)
    check(kernel, [*lengths, 1 << 20], MAX_PARTS)
    check(kernel, lengths[: MAX_PARTS // 2], MAX_PARTS)


def test_all_inner_boundaries_cut(kernel: CompiledKernel) -> None:
    """One request of 100 * 1,024 cost units: 1,023 cuts, the last of them counted by the last step of the search."""
    check(kernel, [(100 * MAX_PARTS - PIECE_OVERHEAD_TILES) * TILE_KEYS], MAX_PARTS)


def test_costs_beyond_32_bits(kernel: CompiledKernel) -> None:
    """2^25 tiles each: the total passes 2^32 at request 128."""
    check(kernel, [HUGE] * 300, 132)
    check(kernel, [7, *[HUGE] * 300, 64], 7)


def tiles(*counts: int) -> list[int]:
    """Lengths of so many tiles."""
    return [count * TILE_KEYS for count in counts]


# Costs are tiles and 3; a part with whole requests may cost ceil(sum / parts) + 5, or + 3 or 4 where they cost up to 8 or 16 on average.
WHOLE = {
    "one each": (tiles(*[30] * 7), 7),
    "fewer than parts": (tiles(*[30] * 5), 6),
    "two each": (tiles(*[64] * 128), 66),
    "of one tile": (tiles(*[1] * 128), 148),
    "of two tiles": (tiles(*[2] * 7), 3),
    "just": (tiles(*[27] * 5), 6),
    "uneven": (tiles(46, 1, 1, 1, 1, 1, 10, 44, 46), 4),
    "1,023": (tiles(*[3] * 1023), 132),
    "1,024": (tiles(*[3] * 1024), MAX_PARTS),
    "1,024 in few": (tiles(*[1] * 1024), 7),
    "1,000 parts": (tiles(*[9] * 1000), 1000),
}
CUT = {
    "one too long": (tiles(*[30] * 6, 37), 7),
    "one part too few": (tiles(*[64] * 134), 66),
    "not quite": (tiles(*[33] * 5), 6),
    "1,025": (tiles(*[3] * 1025), 132),
    "the last one alone": (tiles(*[64] * 132, 64), 66),
}


@pytest.mark.parametrize("case", WHOLE)
def test_requests_stay_whole(kernel: CompiledKernel, case: str) -> None:
    lengths, num_parts = WHOLE[case]
    assert reference_plan(lengths, num_parts).num_splits[-1] == 0
    check(kernel, lengths, num_parts)


@pytest.mark.parametrize(("tiles_each", "batch", "num_parts", "stay"), [(64, 128, 148, True), (64, 110, 148, False), (27, 5, 8, False)])
def test_requests_stay_whole_where_parts_may_cost_a_quarter_more(
    kernel: CompiledKernel, tiles_each: int, batch: int, num_parts: int, stay: bool
) -> None:
    lengths = tiles(*[tiles_each] * batch)
    plan, findings = run_plan(kernel, lengths, num_parts, eighths=ALONE_WHOLE_EIGHTHS)
    assert not findings
    assert plan == reference_plan(lengths, num_parts, eighths=ALONE_WHOLE_EIGHTHS)
    assert (plan.num_splits[-1] == 0) == stay
    assert reference_plan(lengths, num_parts).num_splits[-1] > 0


@pytest.mark.parametrize("tiles_each", [[32] * 128, [64] * 128, [3, 17, 0, 1, 90] * 9, [2048], [1] * 1025])
def test_a_start_costs_less_on_rtx_boards(tiles_each: list[int]) -> None:
    lengths, token = tiles(*tiles_each), launching.built_for.set(SM120)
    plan, findings = run_plan(shipped("split_plan", "i32"), lengths, SM120.sm_count)
    launching.built_for.reset(token)
    assert not findings
    assert plan == reference_plan(lengths, SM120.sm_count, overhead=piece_overhead(SM120))
    if len(set(tiles_each)) == 1 < len(tiles_each) < 1000:  # the greatest share shrinks towards the mean
        assert plan != reference_plan(lengths, SM120.sm_count)


@pytest.mark.parametrize("case", CUT)
def test_requests_are_cut_where_parts_would_cost_more(kernel: CompiledKernel, case: str) -> None:
    lengths, num_parts = CUT[case]
    assert reference_plan(lengths, num_parts).num_splits[-1] > 0
    check(kernel, lengths, num_parts)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_of_like_lengths(kernel: CompiledKernel, seed: int) -> None:
    draw = random.Random(seed)
    around, num_parts = draw.randrange(1, 60), draw.randrange(1, 40)
    lengths = tiles(*(around + draw.randrange(-1, 2) for _ in range(num_parts * draw.randrange(1, 4) - draw.randrange(1))))
    check(kernel, lengths, num_parts)


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(kernel: CompiledKernel, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randrange(draw.choice([2, 200, 20_000])) for _ in range(draw.randrange(1, 200))]
    check(kernel, lengths, draw.randrange(1, 200))


@pytest.mark.parametrize("seed", range(25))
def test_keys_of_two_caches_with_and_without_tables(kernel: CompiledKernel, seed: int) -> None:
    """Null tables, which nothing is read from, and lengths beyond the limits."""
    draw = random.Random(seed)
    keys = Keys.draw(draw, draw.choice([2, 200, 20_000]))
    num_parts = draw.randrange(1, 200)
    plan, findings = run_plan(kernel, keys, num_parts)
    assert not findings
    assert plan == reference_plan(keys.counts, num_parts)


@pytest.mark.parametrize("batch", [0, 1, 1500])
def test_every_request_has_the_limit_where_there_are_no_tables(kernel: CompiledKernel, batch: int) -> None:
    plan, findings = run_plan(kernel, Keys(batch, None, None, 2048, 100), 40)
    assert not findings
    assert plan == reference_plan([2148] * batch, 40)


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
def test_schedules(kernel: CompiledKernel, schedule: str) -> None:
    lengths = [9000, 0, 70, 123_456, 64, 64, 8192]
    plan, findings = run_plan(kernel, lengths, 132, policy=simulator.Policy(schedule=schedule, seed=3))
    assert not findings
    assert plan == reference_plan(lengths, 132)


OVERHEAD = Bug("overhead of a piece, one more in the costs but not in the cuts", r"(add\.s32 .*), 4;", r"\1, 5;", together)
CAP = Bug("cap one lower, so that the request that just fits does not", r"(max\.u64 (\s*%rd\d+), .*;)", r"\1 sub.s64 \2, \2, 1;", together)
BARRIERS = Bug("missing barriers", r"bar\.sync", "// bar.sync", together)


@pytest.mark.parametrize(
    ("bug", "lengths", "num_parts", "schedule"),
    [
        (OVERHEAD, [9000, 70, 12_345], 20, "round_robin"),
        (CAP, *WHOLE["just"], "round_robin"),
        (BARRIERS, [9000, 0, 70, 123_456, 64, 64, 8192], 132, "adversarial"),
    ],
    ids=["overhead", "cap", "barriers"],
)
def test_planted_bugs_are_noticed(kernel: CompiledKernel, bug: Bug, lengths: list[int], num_parts: int, schedule: str) -> None:
    def is_noticed(broken: CompiledKernel) -> bool:
        plan, findings = run_plan(broken, lengths, num_parts, policy=simulator.Policy(schedule=schedule))
        return plan != reference_plan(lengths, num_parts) or (bug is BARRIERS and bool(findings))

    assert kernel.survivors(bug, is_noticed) == []
