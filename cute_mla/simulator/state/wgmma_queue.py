"""wgmma work of one warpgroup: products that have been issued, and what they still read and write."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..numerics import wgmma
from .origin import Origin
from .registers import WARP

WARPGROUP = 4 * WARP
MAX_RECENT = 64  # sets of operands of a warpgroup's products that are remembered


@dataclass
class WgmmaChain:
    """Consecutive wgmmas on one accumulator, multiplied as one.

    rows: registers of the accumulator in bank "r". a: descriptors, or copies of the A registers of each step with their
    poison. b: descriptors. serial: its number in the warpgroup, set when it has been waited for.
    """

    form: wgmma.Instruction
    rows: np.ndarray
    read_accumulator: bool
    negate: bool
    a_major: bool
    b_major: bool
    from_registers: bool
    origin: Origin
    a: list[int] = field(default_factory=list)
    a_values: list[np.ndarray] = field(default_factory=list)
    a_poison: list[np.ndarray | None] = field(default_factory=list)
    b: list[int] = field(default_factory=list)
    serial: int = 0

    def extends(self, other: WgmmaChain) -> bool:
        """Return True when other may be appended: the same accumulator, read, and the same form."""
        return (
            other.read_accumulator
            and other.rows is self.rows
            and other.form == self.form
            and (other.negate, other.a_major, other.b_major, other.from_registers)
            == (self.negate, self.a_major, self.b_major, self.from_registers)
            and not (self.form.satfinite or self.form.d == "f16")
        )

    def append(self, other: WgmmaChain) -> None:
        """Add the steps of another chain."""
        self.a += other.a
        self.a_values += other.a_values
        self.a_poison += other.a_poison
        self.b += other.b


@dataclass
class WgmmaQueue:
    """The products of one warpgroup.

    busy, sources: bit masks of registers that unfinished work writes / reads. reading: chains of each committed group and of the open one,
    kept until they are waited for, even if they have been computed. recent: the latest chain on each set of operands that has been waited
    for, oldest first. serial: number of the last of these.
    """

    first_thread: int
    open: list[WgmmaChain] = field(default_factory=list)
    groups: list[list[WgmmaChain]] = field(default_factory=list)
    waiting_masks: list[tuple[int, int]] = field(default_factory=list)  # (busy, sources) of each committed group not yet waited for
    open_masks: tuple[int, int] = (0, 0)
    reading: list[list[WgmmaChain]] = field(default_factory=lambda: [[]])
    busy: int = 0
    sources: int = 0
    recent: dict[object, WgmmaChain] = field(default_factory=dict)
    serial: int = 0

    def issue(self, chain: WgmmaChain, busy: int, sources: int) -> None:
        """Add one wgmma."""
        self.open_masks = (self.open_masks[0] | busy, self.open_masks[1] | sources)
        self._refresh_masks()
        if self.open and self.open[-1].extends(chain):
            self.open[-1].append(chain)
        else:
            self.open.append(chain)
            self.reading[-1].append(chain)

    def commit(self) -> None:
        """Close the open group."""
        self.groups.append(self.open)
        self.open = []
        self.reading.append([])
        self.waiting_masks.append(self.open_masks)
        self.open_masks = (0, 0)

    def take(self, keep: int) -> Iterator[WgmmaChain]:
        """Remove all but the newest `keep` committed groups; yield their chains in order, to be computed."""
        while len(self.groups) > keep:
            yield from self.groups.pop(0)

    def take_open(self) -> list[WgmmaChain]:
        """Remove the chains of the open group, to be computed."""
        chains, self.open = self.open, []
        return chains

    def free(self, remaining: int) -> None:
        """Record a wait: results and sources of all but the newest `remaining` groups are free."""
        done = max(len(self.waiting_masks) - remaining, 0)
        del self.waiting_masks[:done]
        for group in self.reading[:done]:
            for chain in group:
                self._remember(chain)
        del self.reading[:done]
        self._refresh_masks()

    def _remember(self, chain: WgmmaChain) -> None:
        self.serial += 1
        chain.serial = self.serial
        chain.a_values, chain.a_poison = [], []
        key = (tuple(chain.a), tuple(chain.b))
        self.recent.pop(key, None)
        self.recent[key] = chain
        if len(self.recent) > MAX_RECENT:
            del self.recent[next(iter(self.recent))]

    def later_than(self, serial: int) -> Iterator[WgmmaChain]:
        """Yield the recent chains behind a number, newest first."""
        if self.serial > serial:
            for chain in reversed(self.recent.values()):
                if chain.serial <= serial:
                    return
                yield chain

    def unwaited(self) -> Iterator[WgmmaChain]:
        """Yield the chains that nobody has waited for: their operands may still be read."""
        return (chain for group in self.reading for chain in group)

    def _refresh_masks(self) -> None:
        self.busy, self.sources = self.open_masks
        for busy, sources in self.waiting_masks:
            self.busy |= busy
            self.sources |= sources
