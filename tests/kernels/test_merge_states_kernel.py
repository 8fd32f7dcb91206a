"""The shipped merge_states on the simulator, against the formula in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from cute_mla import simulator
from cute_mla.spec.merge_states import LISTED_STATES, grid
from tests.kernels.launching import CompiledKernel, fails, launch, nbytes, shipped
from tests.mutation.planting import Bug, together

pytestmark = pytest.mark.usefixtures("built_for")

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALF_ULP = {"bf16": 2.0**-8, "fp16": 2.0**-11}  # relative to the value, at worst


@dataclass
class Problem:
    """One call.

    states: how many, each [batch, tokens, heads, head_dim] in memory of its own (listed) or in one tensor.
    Rows in `empty`, (state, batch, token, head), have an infinite lse of the given sign and an out of NaN that nobody may read.
    pad: elements between the heads of out. in_place: the result replaces state 0.
    """

    states: int
    batch: int = 1
    tokens: int = 2
    heads: int = 3
    head_dim: int = 512
    dtype: str = "bf16"
    listed: bool = True
    empty: dict[tuple[int, int, int, int], float] = field(default_factory=dict)
    empty_lse: float = math.inf
    pad: int = 0
    in_place: bool = False
    spread: float = 3.0

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.states)
        shape = (self.states, self.batch, self.tokens, self.heads)
        outs = torch.randn(*shape, self.head_dim + self.pad, generator=draw).to(DTYPES[self.dtype])
        lses = torch.randn(*shape, generator=draw) * self.spread
        for row, value in self.empty.items():
            outs[row], lses[row] = math.nan, value
        self.outs = [out.clone()[..., self.pad :] for out in outs] if self.listed else list(outs[..., self.pad :])
        self.lses = [lse.clone() for lse in lses] if self.listed else list(lses)
        self.stack = outs, lses  # what stacked states are views of
        self.expected = self._merged(outs[..., self.pad :].double(), lses.double())
        self.out = self.outs[0] if self.in_place else torch.zeros_like(outs[0])[..., self.pad :]
        self.lse = self.lses[0] if self.in_place else torch.zeros_like(self.lses[0])

    def _merged(self, outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lses = lses.masked_fill(lses.isinf(), -math.inf)
        total = lses.logsumexp(dim=0)
        weights = (lses - total.masked_fill(total.isinf(), 0.0)).exp()
        out = torch.where(weights[..., None] > 0, outs * weights[..., None], 0.0).sum(dim=0)
        return out, total.masked_fill(total == -math.inf, self.empty_lse)

    def memory(self) -> simulator.GlobalMemory:
        """Return the memory that the kernel may touch, without the out of rows that have no weight."""
        memory = simulator.GlobalMemory()
        for state in range(self.states):
            for place in range(self.batch * self.tokens * self.heads):
                row = (place // (self.tokens * self.heads), place // self.heads % self.tokens, place % self.heads)
                own = self.outs[state][row]
                if (state, *row) not in self.empty:
                    memory.add(f"out{(state, *row)}", own.data_ptr(), nbytes(own), writable=self.in_place and state == 0)
                elif self.in_place and state == 0:
                    memory.add(f"out{row}", own.data_ptr(), nbytes(own), initialised=False)
            lse = self.lses[state]
            memory.add(f"lse{state}", lse.data_ptr(), nbytes(lse), writable=self.in_place and state == 0)
        if not self.in_place:
            memory.add("out", self.out.data_ptr(), self.out.untyped_storage().nbytes() - int(self.out.storage_offset()) * 2)
            memory.add("lse", self.lse.data_ptr(), nbytes(self.lse))
        return memory

    def run(self, kernel: CompiledKernel | None = None) -> list[simulator.Finding]:
        """Launch the kernel."""
        kernel = kernel or shipped("merge_states", f"{self.dtype}_d{self.head_dim}")

        def pointers(tensors: list[torch.Tensor]) -> list[torch.Tensor | int]:
            known = tensors if self.listed else tensors[:1]
            return [*known, *[0] * (LISTED_STATES - len(known))]

        def apart(tensors: list[torch.Tensor]) -> int:
            return 0 if self.listed else (tensors[1].data_ptr() - tensors[0].data_ptr()) // tensors[0].element_size()

        strides = [*self.outs[0].stride()[:3], *self.lses[0].stride(), *self.out.stride()[:3], *self.lse.stride()]
        args = [*pointers(self.outs), *pointers(self.lses), self.out, self.lse, apart(self.outs), apart(self.lses)]
        args += [*strides, self.empty_lse, self.tokens, self.heads, self.states]
        return launch(kernel, grid(self.batch, self.tokens, self.heads), args, self.memory())

    def judge(self) -> None:
        """Out and lse against the formula."""
        out, lse = self.expected
        bound = out.abs() * 1.01 * HALF_ULP[self.dtype] + 1e-5
        assert ((self.out.double() - out).abs() <= bound).all()
        finite = lse.isfinite()
        assert torch.equal(self.lse.double()[~finite], lse[~finite])
        assert torch.allclose(self.lse.double()[finite], lse[finite], rtol=1e-6, atol=2e-6)


PROBLEMS = {
    "two": Problem(2),
    "two narrow": Problem(2, head_dim=128, heads=17, dtype="fp16"),
    "one": Problem(1, dtype="fp16"),
    "listed": Problem(8, head_dim=128, batch=2, tokens=3, heads=9),
    "stacked": Problem(5, listed=False),
    "more than a warp has lanes": Problem(70, listed=False, head_dim=128, tokens=1, heads=2),
    "odd rows": Problem(3, pad=1, heads=5),
    "odd narrow rows": Problem(3, pad=3, heads=5, head_dim=128, dtype="fp16"),
    "in place": Problem(3, in_place=True),
    "far apart": Problem(4, spread=80.0, head_dim=128),
    "empty of both kinds": Problem(
        3, empty={(0, 0, 0, 0): math.inf, (1, 0, 0, 1): -math.inf, (0, 0, 1, 2): math.inf, (2, 0, 1, 2): -math.inf}
    ),
    "all empty": Problem(2, empty={(0, 0, 0, 1): math.inf, (1, 0, 0, 1): -math.inf}),
    "all empty, other convention": Problem(2, empty={(0, 0, 0, 1): math.inf, (1, 0, 0, 1): math.inf}, empty_lse=-math.inf, head_dim=128),
    "in place of an empty one": Problem(2, in_place=True, empty={(0, 0, 1, 1): -math.inf}),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees_with_the_formula(name: str) -> None:
    problem = PROBLEMS[name]
    problem.__post_init__()
    assert problem.run() == []
    problem.judge()


def test_nan_of_a_state_shows() -> None:
    problem = Problem(2)
    problem.lses[1][0, 1, 2] = math.nan
    assert problem.run() == []
    assert problem.out[0, 1, 2].isnan().all()
    assert problem.lse[0, 1, 2].isnan()
    assert not problem.out[0, 0].isnan().any()


BUGS = (
    Bug("infinite lse has weight", r"0f7F800000", "0f7F7FFFFF", together),
    Bug("wrong logarithm", r"0f3F317218", "0f3F800000", together),
    Bug("first state twice", r"setp\.(eq|ne)\.(b32|s32)\s+(%p\d+), (%r\d+), 1;", r"setp.\1.\2 \3, \4, 77;", together),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_noticed(bug: Bug) -> None:
    def is_noticed(broken: CompiledKernel) -> bool:
        problem = Problem(3, empty={(0, 0, 0, 0): math.inf, (1, 0, 0, 1): -math.inf})
        return bool(problem.run(broken)) or fails(problem.judge)

    assert shipped("merge_states", "bf16_d512").survivors(bug, is_noticed) == []
