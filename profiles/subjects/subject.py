"""One benchmark row on a device: operands, the call to time, and the proof that it computes the right answer.

Everything goes through the public API, with outputs and workspace given, so that a timed call allocates nothing. A subject runs
on a GPU or, for tests, on the simulated device. What an op has of its own is in the file of its name beside this one.
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
from ..timing import rotation_sets

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
POISON_BYTE = 0xFF  # NaN in every float type here
MOST_SAMPLES = 5

Results: TypeAlias = Mapping[str, torch.Tensor]  # what a call writes, or what it should have written: out, lse, max_logits

OperandsT = TypeVar("OperandsT")


@dataclass(frozen=True)
class Check:
    """A comparison with the fp32 reference on some requests, tokens or sequences. reason: empty if all passed."""

    reason: str
    out_max_abs: float
    out_cos_diff: float
    lse_max_abs: float
    samples: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether everything compared was within bounds."""
        return not self.reason


class Subject(ABC, Generic[OperandsT]):
    """The operands of a case: several sets of equal shapes, with other values and other places in memory.

    Timed calls share lengths, the plan and the workspace. tolerances: of the results, by name.
    """

    tolerances: Mapping[str, Tolerance]

    def __init__(self, case: Case, device: torch.device, l2_bytes: int) -> None:
        self.case = case
        self.device = device
        self.workspace: torch.Tensor | None = None
        self.prepare()
        self.sets = [self.make_operands(case.seed + index) for index in range(rotation_sets(self.set_bytes, l2_bytes))]

    @property
    def set_bytes(self) -> int:
        """Bytes of one operand set, as far as they pass through L2: the compulsory bytes of the case."""
        return int(self.case.work.bytes)

    @property
    def has_plan(self) -> bool:
        """Whether calls need a plan, which is made and timed apart."""
        return False

    def plan(self) -> Any:
        """Plans the work on the device, anew. Only where has_plan."""
        raise NotImplementedError(f"{self.case.op} has no plan")

    @abstractmethod
    def prepare(self) -> None:
        """Makes what all sets share, workspace and plan included, and sets the tolerances."""

    @abstractmethod
    def make_operands(self, seed: int) -> OperandsT:
        """One set, with NaN in the outputs."""

    @abstractmethod
    def call(self, operands: OperandsT) -> None:
        """The timed call."""

    @abstractmethod
    def results(self, operands: OperandsT) -> Results:
        """What the call writes, by name."""

    @abstractmethod
    def samples(self) -> tuple[int, ...]:
        """The requests, tokens or sequences worth checking, a few."""

    @abstractmethod
    def part(self, results: Results, sample: int) -> Results:
        """Of some results what belongs to a sample, shaped as `expected` gives it."""

    @abstractmethod
    def expected(self, operands: OperandsT, sample: int) -> Results:
        """A sample's results in fp32, by cute_mla.reference."""

    def poison(self) -> None:
        """Fills every output and the workspace with NaN, so that a result left over from before cannot pass."""
        if self.workspace is not None:
            self.workspace.fill_(POISON_BYTE)
        for operands in self.sets:
            for tensor in self.results(operands).values():
                tensor.fill_(math.nan)

    def check_sets(self, written: Iterable[OperandsT], compared: Sequence[OperandsT]) -> Check:
        """Looks for NaN in all outputs of the written sets, and compares samples of some with the reference."""
        return self.check([self.results(operands) for operands in written], [(operands, self.results(operands)) for operands in compared])

    def check(self, written: Iterable[Results], compared: Iterable[tuple[OperandsT, Results]]) -> Check:
        """The same of results that anybody computed. Results without one of the names are compared in the others."""
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
                    if name == "out":
                        out_abs, out_cos = max(out_abs, found.max_abs), max(out_cos, found.cos_diff)
                    else:
                        lse_abs = max(lse_abs, found.max_abs)
        return Check("; ".join(dict.fromkeys(reasons)), out_abs, out_cos, lse_abs, samples)


def spread_samples(count: int) -> tuple[int, ...]:
    """The first, the last and the middle one of so many."""
    return tuple(sorted({0, count // 2, count - 1})) if count else ()
