"""Places of instructions: the roles that run them and their barriers. They identify a mutation however the text around it changes.

An instruction is known by its PTX line, or its address in machine code.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from cute_mla import simulator
from cute_mla.manifest import KernelEntry
from cute_mla.simulator import Observer
from cute_mla.simulator.engine.counts import NO_ROLE
from cute_mla.simulator.frontend.ptx import Instruction
from cute_mla.simulator.state.origin import instruction_of_caller
from tests.mutation.sites import Mutation

ALL_ROLES = "all"
NOT_RUN = "not run"


class _Listener(Observer):
    """Tells places of the barriers of a launch."""

    def __init__(self, places: Places, names: simulator.Names) -> None:
        self.places = places
        self.names = names

    def barrier(self, w: Any, barrier: Any, action: str, number: int) -> None:
        instruction = instruction_of_caller()
        if instruction is not None:
            self.places.note(line_of(instruction), w.warps, self.names)
            if hasattr(barrier, "name"):
                self.places.rings[line_of(instruction)].add(re.split(r"[\[@]", barrier.name)[0])


def line_of(instruction: Instruction) -> int:
    """Return the PTX line of an instruction, or its address in machine code, whose instructions have no line."""
    return instruction.line or int((instruction.source or "0").split(maxsplit=1)[0], 16)


class Places:
    """The roles and the rings of barriers of each PTX line of a kernel, from runs of it."""

    def __init__(self, kernel: KernelEntry) -> None:
        self.kernel = kernel
        self.roles: dict[int, set[str]] = defaultdict(set)
        self.rings: dict[int, set[str]] = defaultdict(set)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Learn from every launch of the kernel inside."""
        run = simulator.run

        def watched(
            launch: simulator.Launch, memory: simulator.GlobalMemory, policy: simulator.Policy, observer: simulator.Observer | None
        ) -> simulator.Report:
            assert observer is None
            if launch.entry != self.kernel.entry:
                return run(launch, memory, policy, observer)
            report = run(launch, memory, policy, _Listener(self, launch.names))
            for index, warps in report.executed.times:
                for item in report.executed.blocks[index].instructions:
                    self.note(line_of(item.instruction), warps, launch.names)
            return report

        with patch.object(simulator, "run", watched):
            yield

    def note(self, line: int, warps: Iterable[int], names: simulator.Names) -> None:
        """Note that these warps ran a PTX line."""
        self.roles[line] |= {names.role(warp) or NO_ROLE for warp in warps}

    def of(self, line: int) -> str:
        """Return roles and rings of a PTX line; there is no ring where no barrier is."""
        roles, known = self.roles[line], [role.name for role in self.kernel.roles]
        if not roles:
            return NOT_RUN
        everywhere = len(known) > 1 and roles.issuperset(known)
        names = ALL_ROLES if everywhere else "+".join([name for name in [*known, NO_ROLE] if name in roles])
        return f"{names}: {'+'.join(sorted(self.rings[line]))}" if self.rings[line] else names

    def of_all(self, mutations: Iterable[Mutation]) -> dict[Mutation, str]:
        """Return the place of each of the mutations of a kernel: roles, ring, and a number among those of its kind with the same."""
        places, seen = {}, Counter[tuple[str, str]]()
        for mutation in mutations:
            place = self.of(mutation.line)
            places[mutation] = f"{place} #{seen[mutation.kind, place]}"
            seen[mutation.kind, place] += 1
        return places


def structure(kernel: KernelEntry, ptx: str, mutations: Sequence[Mutation]) -> tuple[object, ...]:
    """Return the structure of a kernel: op, roles, barriers, and every instruction that is broken, in order.

    Mutations of kernels with equal structures are equivalent.
    """
    broken = tuple((mutation.kind, ptx[mutation.start : mutation.stop].split(maxsplit=1)[0]) for mutation in mutations)
    return kernel.op, tuple(kernel.roles), tuple(kernel.barriers), tuple(kernel.named_barriers), kernel.cluster, broken
