"""The shipped topk_indices on the simulator: rows between bytes that nobody may read, and planted bugs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from cute_mla import reference, simulator
from cute_mla.simulator import TensorMap
from cute_mla.spec.topk_indices import DTYPE, RESIDENT_ROWS, WARPS, WIDE, grid
from tests.kernels.launching import CompiledKernel, launch, nbytes, shipped
from tests.mutation.planting import Bug, alone, each_in, together

pytestmark = pytest.mark.usefixtures("built_for")

POLICIES = tuple(simulator.Policy(schedule=name, seed=1) for name in ("round_robin", "adversarial"))


@dataclass
class Problem:
    """A selection of topk of `columns` numbers in one row, of which `length` count, by a cluster or by one CTA."""

    values: str = "random"
    columns: int = 2500
    length: int = 2480
    topk: int = 300
    cluster: int = WIDE

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(11)
        random = torch.randn(1, self.columns, generator=draw)
        kind = torch.randint(0, 6, (1, self.columns), generator=draw)
        signs = torch.tensor([-0.0, 0.0, float("nan"), -1.0, -0.0, float("-inf")])[kind]
        signs[:, -700::8] = 1.0
        self.logits = {
            "random": random,
            "crowded": torch.where(torch.arange(self.columns) % 250 == 9, 3.0, -2.0 - 0.2 * random.abs().clamp(max=1.2)),
            "few": torch.round(random),
            "signs": signs,
            "equal": torch.ones(1, self.columns),
        }[self.values]
        self.lengths = torch.tensor([self.length], dtype=torch.int32)

    def run(self, policy: simulator.Policy, kernel: CompiledKernel | None = None) -> list[str]:
        """Launch the kernel; return what is wrong: findings, and positions that are not the reference's."""
        kernel = kernel or shipped("topk_indices", f"{DTYPE}_cluster{self.cluster}")
        out = torch.full((1, self.topk), -7, dtype=torch.int32)
        memory = simulator.GlobalMemory()
        memory.add("logits", self.logits.data_ptr(), 4 * self.length, writable=False)  # nothing behind it
        memory.add("lengths", self.lengths.data_ptr(), nbytes(self.lengths), writable=False)
        memory.add("out", out.data_ptr(), nbytes(out), initialised=False)
        args: list[int | float | torch.Tensor | TensorMap] = [self.logits, 0, self.lengths, 0, out]
        args += [self.columns, self.topk, 0, self.columns, self.topk, self.columns, 1, 1, 0, 0]
        findings = launch(kernel, grid(1, self.cluster), args, memory, policy)
        wrong = not torch.equal(out, reference.topk_indices(self.logits, self.lengths, self.topk))
        return [*map(str, findings), *(["other positions"] if wrong else [])]


# crowded: so many numbers share the digit of the bound that it is made narrow, and some lie far above it
PROBLEMS = (Problem("few"), Problem("crowded", topk=20), Problem("signs"), Problem("random"))


@pytest.mark.in_turn
@pytest.mark.parametrize("cluster", [1, WIDE])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.values)
def test_numbers_behind_a_length_are_not_read(problem: Problem, cluster: int) -> None:
    for policy in POLICIES:
        assert replace(problem, cluster=cluster).run(policy) == []


@pytest.mark.parametrize("values", ["random", "equal"])
def test_a_row_beyond_what_a_cluster_keeps(values: str) -> None:
    """Each warp has 32 numbers more than stay in shared memory: they are loaded again, whether its candidates are listed or not."""
    columns = WIDE * WARPS * (RESIDENT_ROWS + 32)
    assert Problem(values, columns, columns, 2048).run(POLICIES[0]) == []


BUGS = (
    Bug("NaN is the greatest", r"selp\.b32(\s+%r\d+, %r\d+), 1,", r"selp.b32\1, -1,", alone(0)),
    Bug("-0 is less than 0", r"add\.f32(\s+%r\d+, %r\d+), 0f00000000;", r"mov.b32\1;", alone(0)),
    Bug("a far distance is negative", r"min\.u32(\s+%r\d+, %r\d+, 2047)", r"min.s32\1", together),
    Bug("a histogram is not cleared", r"st\.shared\.v4\.b32\s+\[%r\d+\+\d+\], \{[^}]*\};", "", each_in(0), count=4),
    Bug("a lane counts those above it, too", r"and\.b32(\s+%r\d+, %r\d+), %r\d+;(\s+popc)", r"mov.b32\1;\2", alone(0, 16, 17), count=24),
    Bug("no barrier of the cluster", r"barrier\.cluster\.arrive;\s+barrier\.cluster\.wait;", "", each_in(0)),
    Bug("no barrier of the CTA", r"bar\.sync\s+0;", "", each_in(0)),
)


@pytest.mark.in_turn
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_noticed(bug: Bug) -> None:
    def is_noticed(broken: CompiledKernel) -> bool:
        return any(problem.run(replace(policy, most_findings=1), broken) for problem in PROBLEMS for policy in POLICIES)

    assert shipped("topk_indices", f"{DTYPE}_cluster{WIDE}").survivors(bug, is_noticed) == []
