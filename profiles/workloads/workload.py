"""Base class of workloads: a benchmark row on a device, with operands, the call to time, and the check of its results.

Calls go through the public API with outputs and workspace given, so that a timed call allocates nothing. A workload runs on a GPU or,
in tests, on the simulated device. Each op has a subclass in the module of its name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from ...testing.compare import Tolerance, compare
from ..rows import Case

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BESIDE_OUT = ("lse", "max_logits")  # results with figures of their own; all others count as out
POISON_BYTE = 0xFF  # fills NaN in every float type used here
MOST_SAMPLES = 5
L2_MULTIPLE = 4
LEAST_ROTATION_BYTES = 256 << 20
MOST_SETS = 4096  # beyond, making them and recording a graph would take minutes

Results: TypeAlias = Mapping[str, torch.Tensor]  # outputs of a call by name, written or expected: out, lse, max_logits

OperandsT = TypeVar("OperandsT")


@dataclass(frozen=True)
class Check:
    """Outcome of a comparison with the fp64 reference. samples: compared requests, tokens or sequences. reason: empty if all passed."""

    reason: str
    out_max_abs: float
    out_cos_diff: float
    lse_max_abs: float
    samples: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """True if all samples were within tolerance."""
        return not self.reason


class Workload(ABC, Generic[OperandsT]):
    """A case on a device with several operand sets of equal shapes, which differ in values and addresses.

    Timed calls share lengths, plan and workspace. tolerances: by name of the result. sets: number of operand sets; None: enough that no
    launch finds its own in L2.
    """

    tolerances: Mapping[str, Tolerance]

    def __init__(self, case: Case, device: torch.device, l2_bytes: int, sets: int | None = None) -> None:
        self.case = case
        self.device = device
        self.workspace: torch.Tensor | None = None
        self.prepare()
        self.sets = [self.make_operands(case.seed + index) for index in range(sets or rotation_sets(self.set_bytes, l2_bytes))]

    @property
    def set_bytes(self) -> int:
        """Bytes of one operand set that pass through L2: the compulsory bytes of the case."""
        return int(self.case.work.bytes)

    @property
    def has_plan(self) -> bool:
        """True if calls need a plan, which is made and timed separately."""
        return False

    def plan(self) -> Any:
        """Make a new plan on the device. NotImplementedError unless has_plan."""
        raise NotImplementedError(f"{self.case.op} has no plan")

    @abstractmethod
    def prepare(self) -> None:
        """Set the tolerances, and allocate whatever all sets share, workspace and plan included."""

    @abstractmethod
    def make_operands(self, seed: int) -> OperandsT:
        """Allocate one operand set with random values, from the seed, and NaN in the outputs."""

    @abstractmethod
    def call(self, operands: OperandsT) -> None:
        """Make the timed call."""

    @abstractmethod
    def results(self, operands: OperandsT) -> Results:
        """Return the outputs of the call by name."""

    @abstractmethod
    def samples(self) -> tuple[int, ...]:
        """Return the indices of the few requests, tokens or sequences to check."""

    @abstractmethod
    def part(self, results: Results, sample: int) -> Results:
        """Return the part of the results that belongs to a sample, in the shapes of `expected`."""

    @abstractmethod
    def expected(self, operands: OperandsT, sample: int) -> Results:
        """Return a sample's results, computed by cute_mla.reference."""

    def poison(self) -> None:
        """Fill every output and the workspace with NaN, so that results of an earlier call cannot pass."""
        if self.workspace is not None:
            self.workspace.fill_(POISON_BYTE)
        for operands in self.sets:
            for tensor in self.results(operands).values():
                tensor.fill_(math.nan)

    def check_sets(self, written: Iterable[OperandsT], compared: Sequence[OperandsT]) -> Check:
        """Search all outputs of the written sets for NaN, and compare samples of the compared sets with the reference."""
        return self.check([self.results(operands) for operands in written], [(operands, self.results(operands)) for operands in compared])

    def check(self, written: Iterable[Results], compared: Iterable[tuple[OperandsT, Results]]) -> Check:
        """Check results of any origin: NaN in `written`, samples of `compared` against the reference.

        Results may lack names, such as lse; the names present are compared.
        """
        samples = self.samples()
        reasons, out_abs, out_cos, lse_abs = [], 0.0, 0.0, 0.0
        if any(bool(tensor.isnan().any()) for results in written for tensor in results.values()):
            reasons.append("a result has NaN, or was not written everywhere")
        for operands, results in compared:
            for sample in samples:
                expected = self.expected(operands, sample)
                for name, tensor in self.part(results, sample).items():
                    found = compare(f"{name}[{sample}]", tensor, expected[name], self.tolerances[name])
                    if not found.passed:
                        reasons.append(found.reason)
                    if name in _BESIDE_OUT:
                        lse_abs = max(lse_abs, found.max_abs)
                    else:
                        out_abs, out_cos = max(out_abs, found.max_abs), max(out_cos, found.cos_diff)
        return Check("; ".join(dict.fromkeys(reasons)), out_abs, out_cos, lse_abs, samples)


def rotation_sets(set_bytes: int, l2_bytes: int) -> int:
    """Return how many operand sets to rotate over, at least two, so that no launch finds its own operands in L2.

    All sets together exceed L2_MULTIPLE times the L2 cache, and LEAST_ROTATION_BYTES, unless that takes more than MOST_SETS: then
    sets of less than 12 KB stay in the L2 of an H200.
    """
    rotation_bytes = max(L2_MULTIPLE * l2_bytes, LEAST_ROTATION_BYTES)
    return min(max(-(-rotation_bytes // set_bytes), 2), MOST_SETS)


def spread_samples(count: int) -> tuple[int, ...]:
    """Return the indices of the first, middle and last of `count` items."""
    return tuple(sorted({0, count // 2, count - 1})) if count else ()
