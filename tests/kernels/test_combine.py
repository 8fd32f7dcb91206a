"""The shipped combine on the simulator, against the formula in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch

from cute_mla import simulator
from cute_mla.spec.combine import BLOCKS_PER_SM, COLUMN_BLOCKS, NARROW_BLOCKS, ROWS_PER_BLOCK, grid
from cute_mla.spec.mla import D_V, ceil_div
from cute_mla.spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS, invariant_splits
from tests.kernels.caches import WITHOUT_WINDOW, Keys
from tests.kernels.launching import CompiledKernel, fails, launch, nbytes, shipped
from tests.mutation.planting import Bug, together

pytestmark = pytest.mark.usefixtures("built_for")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # relative to the value, at worst
CANARY = 7.0


@dataclass
class Problem:
    """One call.

    rows[r]: accumulator rows of request r. A split in `empty`, (row, token, head), has lse -inf and no out row.
    lengths: given for a batch-invariant call, in which every request has as many rows. keys: the same where a second cache adds to
    them. sink: of every head; None for a null pointer.

    out is a view with the given strides, in elements, over a flat buffer that starts at `offset`.
    """

    rows: list[int]
    s_q: int = 1
    h_q: int = 2
    dtype: str = "bf16"
    lengths: list[int] | None = None
    keys: Keys | None = None
    sink: list[float] | None = None
    empty_lse: float = math.inf
    empty: set[tuple[int, int, int]] = field(default_factory=set)
    strides: tuple[int, int, int] | None = None
    offset: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        total = sum(self.rows)
        self.accum = torch.randn(total, self.s_q, self.h_q, D_V, generator=draw)
        self.lse_accum = torch.randn(total, self.s_q, self.h_q, generator=draw) * 4
        for position in self.empty:
            self.accum[position] = math.nan
            self.lse_accum[position] = -math.inf
        self.first_rows = [sum(self.rows[:r]) for r in range(len(self.rows) + 1)]
        if self.lengths is not None:
            self.keys = Keys.of(self.lengths)
        given = self.first_rows if self.keys is None else [(-1) ** r << 30 for r in self.first_rows]  # nobody is to believe that
        self.num_splits = torch.tensor(given, dtype=torch.int32)
        self.tables = (self.keys or Keys(len(self.rows), None, None)).tables()
        self.attn_sink = 0 if self.sink is None else torch.tensor(self.sink)
        shape = (len(self.rows), self.s_q, self.h_q, D_V)
        strides = (*(self.strides or (self.s_q * self.h_q * D_V, self.h_q * D_V, D_V)), 1)
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1
        self.buffer = torch.full((self.offset + reach,), CANARY, dtype=DTYPES[self.dtype])
        self.out = self.buffer.as_strided(shape, strides, self.offset)
        self.lse = torch.full((len(self.rows), self.h_q, self.s_q), CANARY)

    def used(self, request: int) -> int:
        """Return the number of splits to merge, by the contract."""
        if self.keys is None:
            return self.rows[request]
        return min(self.rows[request], ceil_div(self.keys.counts[request], TILE_KEYS * INVARIANT_SPLIT_TILES))

    @property
    def max_splits(self) -> int:
        """Return max_splits as spec.dense_decode defines it."""
        return 0 if self.keys is None else self.rows[0]

    def memory(self) -> simulator.GlobalMemory:
        """Return the memory that the kernel may touch, without the out rows of empty and unused splits: reading one is a finding."""
        memory = simulator.GlobalMemory()
        for name, tensor in self.tables_by_name():
            if tensor.numel():
                memory.add(name, tensor.data_ptr(), nbytes(tensor), writable=False)
        for request in range(len(self.rows)):
            first = self.first_rows[request]
            for position in self._written(first, self.used(request)):
                row = self.accum[position]
                memory.add(f"out_accum{position}", row.data_ptr(), nbytes(row), writable=False)
        memory.add("out", self.buffer.data_ptr(), nbytes(self.buffer))
        memory.add("lse", self.lse.data_ptr(), nbytes(self.lse))
        return memory

    def tables_by_name(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the read-only tensors that exist in full, without null pointers."""
        lengths, extra_lengths = self.tables
        given = {"lengths": lengths, "extra_lengths": extra_lengths, "attn_sink": self.attn_sink}
        yield from ((name, table) for name, table in given.items() if isinstance(table, torch.Tensor))
        yield from (("num_splits", self.num_splits), ("lse_accum", self.lse_accum))

    def args(self, out: torch.Tensor | int, lse: torch.Tensor | int, strides: Sequence[int]) -> list[int | float | torch.Tensor]:
        """Return the kernel's arguments. strides: three of out, three of lse."""
        keys = self.keys or Keys(len(self.rows), None, None)
        operands = [*self.tables, self.num_splits, self.attn_sink, self.accum, self.lse_accum, out, lse, 0, 0]
        limits = (keys.limit, keys.extra_limit, self.max_splits, len(self.accum))
        units = (0, 0, 0)  # requests, total_q, causal: without cu_seqlens_q
        return [*operands, *strides, self.empty_lse, len(self.rows), self.s_q, self.h_q, *limits, *units, *WITHOUT_WINDOW]

    def _written(self, first: int, count: int) -> list[tuple[int, int, int]]:
        positions = [(first + s, token, head) for s in range(count) for token in range(self.s_q) for head in range(self.h_q)]
        return [position for position in positions if position not in self.empty]

    def run(
        self,
        kernel: CompiledKernel | None = None,
        column_blocks: int = 1,
        token_blocks: int | None = None,
        head_blocks: int | None = None,
        policy: simulator.Policy | None = None,
        memory: simulator.GlobalMemory | None = None,
    ) -> list[simulator.Finding]:
        kernel = kernel or shipped("combine", self.dtype)
        shape = (token_blocks or len(self.rows) * self.s_q, head_blocks or ceil_div(self.h_q, ROWS_PER_BLOCK), column_blocks)
        args = self.args(self.out, self.lse, (*self.out.stride()[:3], *self.lse.stride()))
        return launch(kernel, shape, args, memory or self.memory(), policy)

    def expected(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [s_q, h_q, 512], lse [h_q, s_q]) of a request in float64."""
        first = self.first_rows[request]
        rows = slice(first, first + self.used(request))
        lse = self.lse_accum[rows].double() * math.log(2)
        weights = torch.softmax(lse, dim=0)
        vanishes = torch.exp2((lse - lse.amax(0)) / math.log(2)) < torch.finfo(torch.float32).tiny
        values = torch.where(vanishes[..., None], 0.0, self.accum[rows].double())
        merged = torch.logsumexp(lse, dim=0)
        empty = torch.isneginf(merged)
        out = torch.where(empty[..., None], 0.0, (weights[..., None] * values).sum(0))
        if self.sink is not None:
            seen = torch.sigmoid(merged - torch.tensor(self.sink, dtype=torch.float64))  # 1 / (1 + exp(sink - lse))
            out = torch.where(empty[..., None], 0.0, out * seen[..., None])
        return out, torch.where(empty, self.empty_lse, merged).T

    def check(self) -> None:
        """Compare out and lse of every request, and that nothing else was written."""
        touched = torch.zeros_like(self.buffer, dtype=torch.bool)
        inside = touched.as_strided(self.out.shape, self.out.stride(), self.offset)
        for request in range(len(self.rows)):
            if self.used(request) < 2:
                assert (self.lse[request] == CANARY).all()
                continue
            inside[request] = True
            out, lse = self.expected(request)
            torch.testing.assert_close(self.lse[request].double(), lse, rtol=3e-7, atol=1e-6, equal_nan=True)
            torch.testing.assert_close(self.out[request].double(), out, rtol=HALF_ULP[self.dtype] * 1.01, atol=1e-6, equal_nan=True)
        assert (self.buffer[~touched] == CANARY).all()


def run_all(problem: Problem) -> None:
    """With 1, 4 and 8 blocks of columns: all right, and the same bits."""
    run_grids(problem, (None, 1), (None, COLUMN_BLOCKS), (None, NARROW_BLOCKS))


def run_grids(problem: Problem, *grids: tuple[int | None, int], head_blocks: Sequence[int | None] = (None,)) -> None:
    """With each grid, (blocks of query tokens or None for all, blocks of columns), and blocks of heads: right, and the same bits."""
    results = []
    for (token_blocks, column_blocks), heads in product(grids, head_blocks):
        problem.buffer.fill_(CANARY)
        problem.lse.fill_(CANARY)
        assert not problem.run(column_blocks=column_blocks, token_blocks=token_blocks, head_blocks=heads)
        problem.check()
        results.append((problem.out.clone().view(torch.int16), problem.lse.clone().view(torch.int32)))
    assert all(torch.equal(*pair) for result in results for pair in zip(result, results[0], strict=True))


@pytest.mark.parametrize("s_q", [1, 3])
def test_a_block_takes_several_query_tokens(s_q: int) -> None:
    """More than 32, which are asked for at once; cut ones first, last, next to each other and far apart."""
    rows = [2, 0, 0, 3, 2, *[0] * 30, 2, *[0] * 40, 33, 2]
    run_grids(Problem(rows, s_q=s_q, h_q=1), (None, 1), (1, 1), (2, 1), (2, COLUMN_BLOCKS), (75, 1), (len(rows) * s_q - 1, 1))


def test_a_block_takes_several_query_tokens_of_invariant_calls() -> None:
    keys = Keys.of([100, 70_000, 5, 8192, 8193, 20_000])
    problem = Problem([invariant_splits(70_000)] * keys.batch, h_q=9, keys=keys, sink=[0.5] * 9)
    run_grids(problem, (None, 1), (1, 1), (4, 1))


@pytest.mark.in_turn
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("splits", [2, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 34, 63, 64, 65, 70, 97, 128, 160, 161, 200])
def test_number_of_splits(dtype: str, splits: int) -> None:
    run_all(Problem([splits], dtype=dtype, seed=splits))


def test_uncut_requests_are_left_alone() -> None:
    run_all(Problem([0, 2, 0, 3, 0]))


@pytest.mark.parametrize("h_q", [1, 7, 8, 9, 16])
def test_heads_and_query_tokens(h_q: int) -> None:
    run_all(Problem([3, 2], s_q=3, h_q=h_q))


@pytest.mark.in_turn
@pytest.mark.parametrize("h_q", [1, 7, 9, 16])
def test_blocks_of_heads(h_q: int) -> None:
    """From 8 heads a CTA to a single one, also where they do not divide h_q."""
    head_blocks = range(ceil_div(h_q, ROWS_PER_BLOCK), h_q + 1, 3)
    many = 40 if h_q < ROWS_PER_BLOCK else 5  # more than 32 splits only where few blocks make it cheap
    run_grids(Problem([3, many], s_q=2, h_q=h_q), (None, 1), (None, NARROW_BLOCKS), head_blocks=[*head_blocks, h_q])


@pytest.mark.parametrize("empty", [{0}, {1}, {69}, {0, 1, 2, 3}, {31, 32, 33}, set(range(1, 70)), set(range(69))])
def test_empty_splits_are_not_read(empty: set[int]) -> None:
    run_all(Problem([70], empty={(split, 0, head) for split in empty for head in range(2)}))


@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
@pytest.mark.parametrize("splits", [2, 40])
def test_all_splits_empty(empty_lse: float, splits: int) -> None:
    problem = Problem([splits], h_q=3, empty_lse=empty_lse, empty={(split, 0, 1) for split in range(splits)})
    run_all(problem)
    assert (problem.out[0, 0, 1] == 0).all()
    assert problem.lse[0, 1, 0] == empty_lse


@pytest.mark.parametrize("split", [0, 33])
def test_nan_lse_reaches_the_output(split: int) -> None:
    problem = Problem([40])
    problem.lse_accum[split, 0, 1] = math.nan
    run_all(problem)
    assert problem.out[0, 0, 1].isnan().all()
    assert problem.lse[0, 1, 0].isnan()
    assert not problem.out[0, 0, 0].isnan().any()


@pytest.mark.parametrize(("splits", "largest"), [(5, 3), (70, 0), (70, 33), (70, 69)])
def test_weights_that_underflow(splits: int, largest: int) -> None:
    """One lse far above the others, wherever it is: no weight overflows, and a row of weight 0 may hold infinities."""
    problem = Problem([splits])
    problem.lse_accum[largest] = 500.0
    problem.lse_accum[1] = -500.0
    problem.accum[1] = math.inf
    run_all(problem)


@pytest.mark.in_turn
@pytest.mark.parametrize("strides", [(2 * D_V * 3, D_V * 3, D_V), (4096, 1536, 513), (2100, 1030, 514), (D_V, 8 * D_V, 2 * D_V)])
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_strides_of_out(strides: tuple[int, int, int], offset: int) -> None:
    run_all(Problem([2, 3], s_q=2, h_q=2, strides=strides, offset=offset))


@pytest.mark.parametrize("length", [0, -5, 1, 8192, 8193, 16_384, 16_385, 40_960, 1 << 30])
def test_fixed_splits_use_the_rows_of_the_length(length: int) -> None:
    """Five rows are kept, and more keys than they hold use all five."""
    run_all(Problem([5, 5], lengths=[length, 20_000]))


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 20))])
def test_fixed_splits_of_two_caches_with_and_without_tables(seed: int) -> None:
    """The keys of both caches together decide, and null tables are not read."""
    keys = Keys.draw(random.Random(seed), 20_000)
    run_all(Problem([invariant_splits(keys.most)] * keys.batch, h_q=1, keys=keys))


@pytest.mark.parametrize("splits", [2, 40])
def test_sinks_scale_out_and_not_lse(splits: int) -> None:
    """Sinks of every size relative to lse, including +-inf, one per head. The last head's splits are all empty."""
    sink = [-math.inf, -80.0, -3.0, 0.0, 2.5, 20.0, 90.0, math.inf, 1e38, -1e38, 0.5]
    empty = {(split, token, len(sink) - 1) for split in range(splits) for token in range(2)}
    plain, problem = (Problem([splits], s_q=2, h_q=len(sink), sink=given, empty=empty) for given in (None, sink))
    for run in (plain, problem):
        run_all(run)
    assert torch.equal(plain.lse, problem.lse)
    assert (problem.out[:, :, 7] == 0).all()
    assert torch.equal(plain.out[:, :, 0], problem.out[:, :, 0])


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.inf])
@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
def test_a_sink_beside_nothing(sink: float, empty_lse: float) -> None:
    problem = Problem([2], h_q=1, sink=[sink], empty_lse=empty_lse, empty={(0, 0, 0), (1, 0, 0)})
    run_all(problem)
    assert (problem.out == 0).all()
    assert (problem.lse == empty_lse).all()


def test_offsets_beyond_2_31_elements() -> None:
    """Request 1 lies 2^33 elements behind the pointer, and request 0 is not cut."""
    problem = Problem([0, 2])
    far = 1 << 33
    args = problem.args(problem.out[1].data_ptr() - 2 * far, problem.lse[1].data_ptr() - 4 * far, (far, 0, D_V, far, 1, 0))
    assert not launch(shipped("combine", "bf16"), (2, 1, 1), args, problem.memory())
    problem.check()


NONSENSE = [0, 1, 5, 6, 7, -1, 3, 1 << 30, -(1 << 31), (1 << 31) - 1]


def findings_with(first: int, after: int, kernel: CompiledKernel | None = None) -> list[simulator.Finding]:
    """Return the findings of a call with 6 rows whose num_splits has these numbers for the second request."""
    problem = Problem([2, 2, 2])
    problem.num_splits = torch.tensor([0, first, after, 6], dtype=torch.int32)
    memory = simulator.GlobalMemory()
    for name in ("num_splits", "accum", "lse_accum", "buffer", "lse"):
        memory.add(name, getattr(problem, name).data_ptr(), nbytes(getattr(problem, name)), writable=name in ("buffer", "lse"))
    return problem.run(kernel, memory=memory)


@pytest.mark.parametrize("first", NONSENSE)
def test_whatever_num_splits_holds_only_rows_that_exist_are_read(first: int) -> None:
    for after in NONSENSE:
        assert not findings_with(first, after)


UNCLIPPED = (
    Bug("rows not clipped from below", r"max\.s32 (.*), 0;", r"max.s32 \1, -2147483648;", together),
    Bug("rows not clipped from above", r"min\.s32 (.*), %r\d+, (%r\d+);", r"min.s32 \1, 2147483647, \2;", together),
)


@pytest.mark.parametrize("bug", UNCLIPPED, ids=lambda bug: bug.name)
def test_unclipped_rows_are_noticed(bug: Bug) -> None:
    def is_noticed(broken: CompiledKernel) -> bool:
        return bool(findings_with(-1, 2, broken) or findings_with(5, 9, broken))

    assert shipped("combine", "bf16").survivors(bug, is_noticed) == []


@pytest.mark.parametrize("schedule", ["random", "adversarial"])
def test_schedules(schedule: str) -> None:
    problem = Problem([40, 2], h_q=9)
    assert not problem.run(policy=simulator.Policy(schedule=schedule, seed=5))
    problem.check()


def test_grid_is_fine_where_rows_are_few() -> None:
    assert grid(1, 1, 128, 132) == (1, 33, NARROW_BLOCKS)
    assert grid(1, 1, 16, 132) == (1, 16, NARROW_BLOCKS)
    assert grid(4, 4, 16, 132) == (16, 2, NARROW_BLOCKS)
    assert grid(4, 1, 128, 132) == (4, 16, COLUMN_BLOCKS)
    assert grid(128, 2, 128, 132) == (16, 16, 1)


def test_blocks_are_few_where_rows_are_many() -> None:
    for batch, s_q, h_q, sm_count in ((128, 1, 128, 132), (100_000, 1, 1, 132), (1, 70_000, 128, 148), (5, 3, 128, 1)):
        x, y, z = grid(batch, s_q, h_q, sm_count)
        assert 1 <= x <= batch * s_q
        assert x * y * z <= max(BLOCKS_PER_SM * sm_count, y)


BUGS = (
    Bug("rows of empty splits read", r"setp\.neu\.f32 (.*), 0f00000000;", r"setp.neu.f32 \1, 0fBF800000;", together),
    Bug("rows of the first empty splits read", r"setp\.neu\.f32 (.*), 0fFF800000;", r"setp.neu.f32 \1, 0f7F800000;", together),
    Bug("half of the splits left out", r"shfl\.sync\.bfly\.b32 (.*), 16, 31, -1;", r"shfl.sync.bfly.b32 \1, 8, 31, -1;", together),
    Bug("second 32 splits skipped", r"add\.s32 (.*), 32;", r"add.s32 \1, 64;", together),
    Bug("sink in base 2", r"0f3FB8AA3B", "0f3F800000", together),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_noticed(bug: Bug) -> None:
    def is_noticed(broken: CompiledKernel) -> bool:
        problem = Problem([70], empty={(1, 0, 0), (3, 0, 0), (50, 0, 0)}, sink=[3.0, 4.0])
        return any(problem.run(broken, column_blocks) or fails(problem.check) for column_blocks in (1, NARROW_BLOCKS))

    assert shipped("combine", "bf16").survivors(bug, is_noticed) == []


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the bytes of the tensors, to compare runs."""
    return [tensor.clone().view(torch.uint8).numpy().tobytes() for tensor in tensors]


def test_batchmates_do_not_change_the_bits() -> None:
    alone = Problem([40], seed=1)
    assert not alone.run()
    together = Problem([3, 40, 2], seed=2)
    together.accum[3:43], together.lse_accum[3:43] = alone.accum, alone.lse_accum
    assert not together.run()
    assert bits([alone.out[0], alone.lse[0]]) == bits([together.out[1], together.lse[1]])
