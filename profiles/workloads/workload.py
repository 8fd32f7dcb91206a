"""Workloads: a benchmark row on a device, with operands, the call to time, and the check of its results.

Calls go through the public API with outputs and workspace given, so that a timed call allocates nothing. A workload runs on a GPU or,
in tests, on the simulated device. Call, reference and bounds are those of the op's record (testing/operations); the operands are drawn by
calls.py. combine, which has no call of its own, has a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from cute_mla.testing.cases.tensors import UNTOUCHED, make_untouched
from cute_mla.testing.compare import LSE, Tolerance, compare
from cute_mla.testing.operations import OPERATIONS

from ..rows import Case

_FP32_RESULTS = ("lse", "max_logits")  # results with figures of their own; all others count as out
POISON_BYTE = 0xFF  # fills NaN in every float type used here
MOST_SAMPLES = 5
L2_MULTIPLE = 4
LEAST_ROTATION_BYTES = 256 << 20
MOST_SETS = 4096  # beyond, making them and recording a graph would take minutes

Results: TypeAlias = Mapping[str, torch.Tensor]  # outputs of a call by name, written or expected: out, lse, max_logits


@dataclass(frozen=True)
class Check:
    """Outcome of a comparison with the fp64 reference. samples: compared requests; reason: empty if all passed."""

    reason: str
    out_max_abs: float
    out_cos_diff: float
    lse_max_abs: float
    samples: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """True if all samples were within tolerance."""
        return not self.reason


class Workload:
    """A row on a device with several operand sets of equal shapes, which differ in values and addresses.

    draw(seed): one set of operands on the device, results included. Timed calls share plan and workspace. sets: number of operand sets;
    None: enough that no launch finds its own in L2.
    """

    def __init__(
        self, case: Case, call_case: Any, draw: Callable[[int], Any], device: torch.device, l2_bytes: int, sets: int | None = None
    ) -> None:
        self.case, self.call_case, self.device = case, call_case, device
        self.workspace: torch.Tensor | None = None
        self.shared: dict[str, Any] = {}
        self.in_place: tuple[str, ...] = ()  # arguments that calls overwrite
        self.draw = draw
        self.prepare()
        self.sets = [draw(case.seed + index) for index in range(sets or rotation_sets(self.set_bytes, l2_bytes))]
        self.arguments = {id(operands): self.arguments_of(operands) for operands in self.sets}

    @property
    def set_bytes(self) -> int:
        """Bytes of one operand set that pass through L2: the compulsory bytes of the case."""
        return int(self.case.work.bytes)

    def prepare(self) -> None:
        """Set the tolerances, by name of the result. A row's norm and lse have no closer bound than FlashMLA's, for other libraries."""
        self.op = OPERATIONS[self.case.op]
        self.in_place = self.op.in_place
        self.tolerances: dict[str, Tolerance] = {
            name: LSE if name in _FP32_RESULTS else replace(bound, row_tol=float("inf"))
            for name, bound in self.op.bounds(self.call_case).items()
        }

    def arguments_of(self, operands: Any) -> dict[str, Any]:
        """Return the arguments of the timed call of a set; the first one allocates the workspace, and makes the plan, of all."""
        if self.workspace is None:
            nbytes = self.op.workspace_bytes(self.call_case, operands)
            self.workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)
        case = replace(self.call_case, metadata="object") if self.shared else self.call_case  # one plan serves all sets
        arguments = self.op.arguments(case, operands, self.workspace)
        if not self.shared and self.has_plan:
            self.shared = {name: arguments[name] for name in ("tile_scheduler_metadata", "num_splits")}
        return {**arguments, **self.shared}

    @property
    def has_plan(self) -> bool:
        """True if calls need a plan, which is made and timed separately."""
        return self.op.plan is not None

    def plan(self) -> Any:
        """Make a new plan on the device. NotImplementedError unless has_plan."""
        if self.op.plan is None:
            raise NotImplementedError(f"{self.case.op} has no plan")
        return self.op.plan(self.call_case, self.sets[0])

    def call(self, operands: Any) -> None:
        """Make the timed call."""
        self.op.function(**self.arguments[id(operands)])

    def results(self, operands: Any) -> Results:
        """Return the outputs of the call by name."""
        buffers = operands.output_buffers
        if buffers:
            return {name: buffers[name].tensor for name in self.tolerances}
        return dict(zip(self.tolerances, self.op.results_of(self.call_case, self.arguments[id(operands)], None), strict=True))

    def samples(self) -> tuple[int, ...]:
        """Return the requests to check; the first one alone for ops that write in place, of which the whole call is compared."""
        lengths = getattr(self.case.shape, "lengths", None)
        if self.in_place:
            return (0,)
        return spread_samples(self.op.requests(self.call_case)) if lengths is None else sample_requests(lengths)

    def expected(self, operands: Any, sample: int) -> tuple[Results, Callable[[Results], Results]]:
        """Return a sample's results, computed by cute_mla.reference, and the function that takes its part of the results of a call."""
        if self.in_place:
            return self._named(self.op.reference(self.call_case, operands)), lambda results: results
        found, part = self.op.sample(self.call_case, operands, sample)

        def own(results: Results) -> Results:
            some = next(iter(results.values()))  # in the place of results that another library does not return
            parts = self._named(part(tuple(results.get(name, some) for name in self.tolerances)))
            return {name: parts[name] for name in results}

        return self._named(found), own

    def _named(self, results: Sequence[torch.Tensor]) -> Results:
        return dict(zip(self.tolerances, results, strict=True))

    def poison(self) -> None:
        """Fill every output and the workspace with NaN, so that results of an earlier call cannot pass, and undo what calls overwrote."""
        if self.workspace is not None:
            self.workspace.fill_(POISON_BYTE)
        for operands in self.sets:
            for buffer in operands.output_buffers.values():
                if buffer.storage.element_size() == 1:
                    buffer.storage.view(torch.uint8).fill_(POISON_BYTE)
                else:
                    make_untouched(buffer.storage)
            arguments = self.arguments[id(operands)]
            for name in self.in_place:
                if arguments.get(name) is not None:
                    arguments[name].copy_(getattr(operands, name))

    def check_sets(self, written: Iterable[Any], compared: Sequence[Any]) -> Check:
        """Search all outputs of the written sets for NaN, and compare samples of the compared sets with the reference."""
        return self.check([self.results(operands) for operands in written], [(operands, self.results(operands)) for operands in compared])

    def check(self, written: Iterable[Results], compared: Iterable[tuple[Any, Results]]) -> Check:
        """Check results of any origin: NaN in `written`, samples of `compared` against the reference.

        Results may lack names, such as lse; the names present are compared.
        """
        samples = self.samples()
        reasons, out_abs, out_cos, lse_abs = [], 0.0, 0.0, 0.0
        if any(_has_unwritten(tensor) for results in written for tensor in results.values()):
            reasons.append("a result has NaN, or was not written everywhere")
        for operands, results in compared:
            for sample in samples:
                expected, part = self.expected(operands, sample)
                for name, tensor in part(results).items():
                    found = compare(f"{name}[{sample}]", tensor, expected[name], self.tolerances[name])
                    if not found.passed:
                        reasons.append(found.reason)
                    if name in _FP32_RESULTS:
                        lse_abs = max(lse_abs, found.max_abs)
                    else:
                        out_abs, out_cos = max(out_abs, found.max_abs), max(out_cos, found.cos_diff)
        return Check("; ".join(dict.fromkeys(reasons)), out_abs, out_cos, lse_abs, samples)


def _has_unwritten(tensor: torch.Tensor) -> bool:
    """Return whether a result has NaN, or integers as make_untouched leaves them. Bytes of a cache show neither."""
    if tensor.dtype == torch.int16:
        return False
    if tensor.is_floating_point():
        return bool(tensor.float().isnan().any() if tensor.element_size() == 1 else tensor.isnan().any())
    return bool((tensor == UNTOUCHED).any())


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


def sample_requests(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return at most MOST_SAMPLES requests: first, last, longest, shortest, middle."""
    if not lengths:
        return ()
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    candidates = (0, len(lengths) - 1, by_length[-1], by_length[0], len(lengths) // 2)
    return tuple(sorted(set(candidates)))[:MOST_SAMPLES]
