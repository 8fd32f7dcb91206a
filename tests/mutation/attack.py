"""A search for inputs that show a mutation which is taken to change nothing: random calls, compared bit by bit with the shipped kernel."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from cute_mla.manifest import KernelEntry, kernel_name
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import SimulationError
from cute_mla.spec.arch import ARCHS
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations import operation
from cute_mla.testing.suites import suite
from tests.mutation.bench import ShippedBits, call_of
from tests.mutation.places import Places
from tests.mutation.sites import Mutation
from tests.mutation.smoke import CALLERS, ROUND_ROBIN, ops_of
from tests.mutation.verdicts import EQUAL, EXPLAINED, Verdict

MOST_TILES = 16  # of a call: many small calls meet more values than a few large ones
LENGTHS = (0, 1, 2, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 160, 191, 192, 193)
EXCHANGED = 4  # fields of a case that at most get another value


@dataclass(frozen=True)
class Attack:
    """The result of a search.

    calls: how many ran the broken instruction and were compared. shown: the id of the first case that shows it, and how; or empty.
    """

    calls: int
    shown: str


def drawn(verdicts: Sequence[Verdict], number: int, seed: int) -> list[Verdict]:
    """Draw survivors: three quarters of them explained, the others proved equal, as far as there are as many."""
    draw = random.Random(seed)
    explained = [item for item in verdicts if item.verdict == EXPLAINED]
    equal = [item for item in verdicts if item.verdict == EQUAL]
    proofs = min(number // 4, len(equal))
    return draw.sample(explained, min(number - proofs, len(explained))) + draw.sample(equal, proofs)


def calls(kernel: KernelEntry, draw: random.Random) -> Iterator[BaseCase]:
    """Yield cases that may launch a kernel: values of fields from all cases of the full suite, in new combinations, and other lengths."""
    arch = ARCHS[kernel.arch]
    ops = ops_of(kernel)
    pools = {op: [entry.case for entry in suite("full", op, simulated=True) if entry.mode != "skipped"] for op in ops}
    small = {op: [case for case in pool if case.tiles <= MOST_TILES] for op, pool in pools.items()}
    while True:
        op = draw.choice(ops)
        base: BaseCase = draw.choice(small[op])
        names = [field.name for field in fields(base)]
        changes: dict[str, Any] = {}
        for name in draw.sample(names, draw.randint(1, EXCHANGED)):
            changes[name] = getattr(draw.choice(pools[op]), name)
        lengths = changes.get("lengths", getattr(base, "lengths", None))
        if isinstance(lengths, tuple) and all(isinstance(length, int) for length in lengths):
            changes["lengths"] = tuple(draw.choice(LENGTHS) if draw.random() < 0.5 else length for length in lengths)
        changes["seed"] = draw.randrange(1 << 16)
        try:
            case = replace(base, **changes)
            serving = kernel_name(case.op, arch.name, case.problem(arch).config.name)
            if case.tiles <= MOST_TILES and (kernel.op in CALLERS or serving == kernel.name):
                yield case
        except (ValueError, KeyError, TypeError, IndexError, ArithmeticError):
            continue  # values that exclude each other


def attack(kernel: KernelEntry, mutation: Mutation, seconds: float, seed: int) -> Attack:
    """Make calls that run the broken instruction, shipped and broken, for so many seconds of CPU time, until one differs."""
    broken = mutation.apply(load_artifacts().ptx(kernel))
    end, number = time.process_time() + seconds, 0
    for case in calls(kernel, random.Random(f"{seed} {kernel.name} {mutation.kind} {mutation.number}")):
        if time.process_time() > end:
            break
        try:
            tensors = operation(case).make_tensors(case, "cpu")
            places = Places(kernel)
            with places.watch():
                results, findings = call_of(kernel.arch, case, tensors, ROUND_ROBIN)
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError, SimulationError):
            continue
        if findings or mutation.line not in places.roles:
            continue
        number += 1
        outcome = ShippedBits(kernel, case, tensors, results)(broken, ROUND_ROBIN)
        if outcome.noticed:
            return Attack(number, f"{outcome.noticed} {outcome.detail} {case.id}")
    return Attack(number, "")
