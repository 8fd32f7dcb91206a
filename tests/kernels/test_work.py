"""The walk over a part's pieces on the simulator: as the plan says, and within its operands whatever the plan says."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from cute_mla import simulator
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_decode import ALL_KEYS, CAUSAL, MAX_KEYS, TILE_ROWS
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.split_plan import INVARIANT_SPLIT_TILES, NO_LIMIT, PLAN_COLUMNS, TILE_KEYS, accumulator_rows, invariant_splits
from cute_mla.testing.split_plan_reference import SplitPlan, actual_tiles, pieces, reference_plan
from tests.kernels.caches import Keys
from tests.kernels.launching import CompiledKernel, launch, nbytes

pytest.importorskip("cutlass", reason="the CuTe DSL (build extra) is not installed")

Record = tuple[int, ...]  # request, first tile, tiles, keys from there on, direct, accumulator row

CUT = INVARIANT_SPLIT_TILES * TILE_KEYS
EXTREMES = [0, 1, 2, 3, 127, 128, 129, -1, 1 << 24, 1 << 25, (1 << 25) - 1, 1 << 30, (1 << 31) - 1, -(1 << 31), 1 - (1 << 31)]


class Rows(NamedTuple):
    """The last arguments of the walk kernels: query rows, and what hides keys from them."""

    mask: int = ALL_KEYS
    s_q: int = 1
    heads: int = 1
    reach: int = NO_LIMIT

    @property
    def row_tiles(self) -> int:
        """Return the CTAs along the rows."""
        return ceil_div(self.s_q * self.heads, TILE_ROWS)

    def hidden_keys(self, row_tile: int, cluster: int) -> int:
        """Return the last keys of a request that no row of a row tile's cluster sees."""
        if self.mask != CAUSAL or self.reach != NO_LIMIT:
            return 0
        rows = [row for row in range(self.s_q * self.heads) if row // TILE_ROWS // cluster == row_tile // cluster]
        return self.s_q - 1 - rows[-1] // self.heads


ONE_ROW = Rows()


def compile_walk(arch: Arch, cluster: int = 0) -> CompiledKernel:
    """Return a walk kernel."""
    from cute_mla.aot_build.compile import compile_source
    from tests.kernels import walk_kernel

    source = walk_kernel.source(cluster)
    result = compile_source(source, arch)
    return CompiledKernel(source, result.entry, result.ptx)


compile_walk_once = cache(compile_walk)


@pytest.fixture
def kernel(built_for: Arch) -> CompiledKernel:
    return compile_walk_once(built_for)


def walk(
    kernel: CompiledKernel, plan: SplitPlan, keys: Keys, invariant: bool, rows: Rows = ONE_ROW
) -> tuple[list[list[Record]], list[simulator.Finding]]:
    """Return the pieces of every CTA: of a row tile, every part. The records have room for no more than a part can have at most."""
    batch, parts = keys.batch, len(plan.parts)
    max_splits = invariant_splits(keys.most) if invariant else 0
    accum_rows = accumulator_rows(batch, parts, max_splits)
    capacity, ctas = batch * invariant_splits(keys.most), rows.row_tiles * parts
    lengths, extra_lengths = keys.tables()
    tensors: dict[str, torch.Tensor | int] = {
        "plan": torch.tensor(plan.parts, dtype=torch.int32),
        "num_splits": torch.tensor(plan.num_splits, dtype=torch.int32),
        "lengths": lengths,
        "extra_lengths": extra_lengths,
        "records": (records := torch.zeros((ctas, capacity, 6), dtype=torch.int32)),
        "counts": (counts := torch.zeros(ctas, dtype=torch.int32)),
    }
    memory = simulator.GlobalMemory()
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            memory.add(name, tensor.data_ptr(), nbytes(tensor), writable=name in ("records", "counts"))
    args: list[Any] = [*tensors.values(), batch, keys.limit, keys.extra_limit, max_splits, accum_rows, capacity, *rows]
    findings = launch(kernel, (rows.row_tiles, 1, parts), args, memory)
    walks = zip(records.tolist(), counts.tolist(), strict=True)
    return [[tuple(record) for record in rows[:count]] for rows, count in walks], findings


def expected_walk(plan: SplitPlan, keys: Keys, invariant: bool) -> list[list[Record]]:
    """Return the walk that the plan in plain Python describes."""
    clipped = keys.counts
    max_splits = invariant_splits(keys.most) if invariant else 0
    last_row = accumulator_rows(keys.batch, len(plan.parts), max_splits) - 1
    walks: list[list[Record]] = [[] for _ in plan.parts]
    for part, piece in pieces(plan, clipped, INVARIANT_SPLIT_TILES if invariant else None, max_splits):
        left = clipped[piece.request] - piece.begin * TILE_KEYS
        row = -1 if piece.row is None else min(piece.row, last_row)
        walks[part].append((piece.request, piece.begin, piece.end - piece.begin, left, int(piece.row is None), row))
    return walks


def without_unused_rows(walks: list[list[Record]]) -> list[list[Record]]:
    """Drop the accumulator row of pieces that write their output directly; it has no meaning."""
    return [[(*record[:5], -1 if record[4] else record[5]) for record in walk] for walk in walks]


def draw_lengths(draw: random.Random, batch: int) -> list[int]:
    return [draw.choice([0, 1, 64, CUT - 1, CUT, CUT + 1, 2 * CUT, 300, draw.randrange(5 * CUT), -7]) for _ in range(batch)]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_those_of_the_plan(kernel: CompiledKernel, seed: int, invariant: bool) -> None:
    """For the lengths that were planned and for others, some of them longer than the block table."""
    draw = random.Random(seed)
    lengths = draw_lengths(draw, draw.randrange(1, 9))
    plan = reference_plan(lengths, draw.choice([1, 2, 5, 24]))
    for later in (lengths, draw_lengths(draw, len(lengths))):
        for max_keys in (max(*lengths, *later, 1), 64, CUT, CUT + 64, 2 * CUT - 640):
            check(kernel, plan, Keys.of(later, max_keys), invariant)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_keys_of_two_caches_with_and_without_tables(kernel: CompiledKernel, seed: int, invariant: bool) -> None:
    """Null tables, which nothing is read from, and lengths beyond the limits."""
    draw = random.Random(seed)
    keys = Keys.draw(draw, 2 * CUT)
    check(kernel, reference_plan(keys.counts, draw.choice([1, 2, 5, 24])), keys, invariant)


@pytest.mark.in_turn
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_row_tiles_end_with_the_last_key_that_a_row_sees(built_for: Arch, seed: int, cluster: int, invariant: bool) -> None:
    """Work tiles, their places and their accumulator rows stay; only their tiles are fewer, down to none."""
    draw = random.Random(seed)
    kernel = compile_walk_once(built_for, cluster)
    lengths = draw_lengths(draw, draw.randrange(1, 5))
    plan = reference_plan(lengths, draw.choice([1, 2, 5, 24]))
    s_q, heads = draw.choice([(2, 128), (300, 1), (5, 100)])
    for mask, reach in ((CAUSAL, NO_LIMIT), (ALL_KEYS, NO_LIMIT), (CAUSAL, 1 << 20)):
        rows = Rows(mask, s_q, heads, reach)
        for keys in (Keys.of(lengths, max(*lengths, 1)), Keys.of(draw_lengths(draw, len(lengths)), CUT + 64)):
            walks, findings = walk(kernel, plan, keys, invariant, rows)
            assert not findings
            whole = expected_walk(plan, keys, invariant)
            seen = [of_row_tile(walk, keys, rows.hidden_keys(tile, cluster)) for tile in range(rows.row_tiles) for walk in whole]
            assert without_unused_rows(walks) == seen


def of_row_tile(walk: list[Record], keys: Keys, hidden: int) -> list[Record]:
    """Return a walk without the tiles that hold only a request's last `hidden` keys."""
    return [
        (req, begin, min(tiles, max(ceil_div(max(keys.counts[req] - hidden, 0), TILE_KEYS) - begin, 0)), *others)
        for req, begin, tiles, *others in walk
    ]


def check(kernel: CompiledKernel, plan: SplitPlan, keys: Keys, invariant: bool) -> None:
    """Expect the plan's pieces."""
    walks, findings = walk(kernel, plan, keys, invariant)
    assert not findings
    assert without_unused_rows(walks) == expected_walk(plan, keys, invariant)


def nonsense(seed: int, parts: int, batch: int) -> SplitPlan:
    """Return numbers that are no plan."""
    draw = random.Random(seed)
    near = [*range(-1, batch + 2), *EXTREMES]

    def number() -> int:
        return draw.choice(near) if draw.random() < 0.8 else draw.randrange(-(1 << 31), 1 << 31)

    return SplitPlan(tuple(tuple(number() for _ in range(PLAN_COLUMNS)) for _ in range(parts)), tuple(number() for _ in range(batch + 1)))


def faults(kernel: CompiledKernel, plan: SplitPlan, lengths: list[int], max_keys: int, invariant: bool) -> Iterator[str]:
    """Return every step of a walk that no plan allows."""
    walks, findings = walk(kernel, plan, Keys.of(lengths, max_keys), invariant)
    yield from map(str, findings)
    accum_rows = accumulator_rows(len(lengths), len(plan.parts), invariant_splits(max_keys) if invariant else 0)
    for part, records in enumerate(walks):  # of one row tile
        places = [record[:2] for record in records]
        if sorted(set(places)) != places:
            yield f"part {part} does not move on: {places}"
        for req, begin, tiles, keys, direct, row in records:
            length = min(max(lengths[req], 0), max_keys)
            if tiles < 0 or begin < 0 or keys != length - begin * TILE_KEYS or (tiles and begin + tiles > ceil_div(length, TILE_KEYS)):
                yield f"part {part}: tiles {begin} + {tiles} of request {req} of {length} keys, {keys} left"
            if not direct and not 0 <= row < accum_rows:
                yield f"part {part}: row {row} of {accum_rows}"


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_plan_leads_outside(kernel: CompiledKernel, seed: int, invariant: bool) -> None:
    draw = random.Random(seed)
    batch = draw.randrange(1, 5)
    plan = nonsense(seed, draw.choice([1, 7, 40]), batch)
    lengths = [draw.choice([*EXTREMES, 500, CUT + 5]) for _ in range(batch)]
    assert not list(faults(kernel, plan, lengths, draw.choice([0, 64, 640, CUT, 3 * CUT, MAX_KEYS if batch == 1 else 64 * 300]), invariant))


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("invariant", [False, True])
def test_the_same_number_everywhere(kernel: CompiledKernel, value: int, invariant: bool) -> None:
    plan = SplitPlan(((value,) * PLAN_COLUMNS,) * 5, (value,) * 4)
    for lengths in ([100, 3000, CUT + 1], [value] * 3):
        assert not list(faults(kernel, plan, lengths, 2 * CUT, invariant))


@pytest.mark.parametrize("invariant", [False, True])
def test_unclipped_plans_are_seen_to_lead_outside(monkeypatch: pytest.MonkeyPatch, built_for: Arch, invariant: bool) -> None:
    monkeypatch.setattr("cute_mla.kernels.attention.scheduler.clip", lambda value, most: value)
    broken = compile_walk(built_for)
    assert any(list(faults(broken, nonsense(seed, 7, 2), [500, 700], 1024, invariant)) for seed in range(5))


def test_a_batch_invariant_walk_cuts_at_multiples_only(kernel: CompiledKernel) -> None:
    lengths = [3 * CUT, 5, CUT + 1]
    walks, _ = walk(kernel, reference_plan(lengths, 11), Keys.of(lengths, 3 * CUT), True)
    begun = sorted(record[:2] for records in walks for record in records)
    splits = [ceil_div(actual_tiles(length), INVARIANT_SPLIT_TILES) for length in lengths]
    assert begun == [(req, split * INVARIANT_SPLIT_TILES) for req, count in enumerate(splits) for split in range(count)]
