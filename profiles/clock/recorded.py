"""Runs of one cluster that are kept for pictures: spans of warps and units, with the code and the source lines behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from cute_mla.aot_build.source_lines import SourceLines, source_lines
from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator.state.names import Names

from .constants import Constants
from .engine import Setting
from .kernel import KernelClock
from .kernel_times import clock_kernel
from .spans import ISSUE, TENSOR_CORE, TMA, Span, mbarrier_offset, mbarrier_track


@dataclass(frozen=True)
class Recorded:
    """A run of a kernel. title: of the case. names: of its roles and mbarriers. end: its last clock. code: as text, by address."""

    title: str
    gpu: str
    kernel: str
    ctas: int
    warps: int
    names: Names
    end: int
    spans: tuple[Span, ...]
    code: Mapping[int, str]
    lines: SourceLines = field(default_factory=SourceLines)

    def of(self, rank: int, track: str) -> list[Span]:
        """Return the spans of a track, in order."""
        return sorted((span for span in self.spans if (span.rank, span.track) == (rank, track)), key=lambda span: (span.start, span.end))

    def roles(self) -> Iterator[tuple[str, range]]:
        """Yield the roles with their warps. A kernel without roles has one."""
        for name, first, warps in self.names.roles or (("warps", 0, self.warps),):
            yield name, range(first, first + warps)

    def units(self) -> list[str]:
        """Return the tracks of units that did something: the tensor core first, then by name."""
        found = {span.track for span in self.spans if not span.track.isdigit() and mbarrier_offset(span.track) is None}
        return sorted(found, key=lambda track: (track != TENSOR_CORE, track == TMA, track))

    def mbarriers(self) -> list[tuple[str, str]]:
        """Return the tracks of mbarriers with their names, in the order of their places."""
        offsets = {offset for span in self.spans if (offset := mbarrier_offset(span.track)) is not None}
        return [(mbarrier_track(offset), self.names.mbarrier(offset)) for offset in sorted(offsets)]


def record(
    entry: KernelEntry, constants: Constants, setting: Setting, blocks: int, title: str, lines: SourceLines | None = None
) -> Recorded:
    """Run one cluster of a kernel over so many blocks of keys and keep its spans. lines: by default those of the built kernel.

    ValueError for a kernel without a loop over keys, UnknownTimeError for machine code that the clock cannot time.
    """
    clock = clock_kernel(entry, constants, replace(setting, spans=True), blocks)
    barriers = tuple((barrier.name, barrier.offset, barrier.count) for barrier in entry.barriers)
    names = Names(barriers, roles=tuple((role.name, role.first_warp, role.warps) for role in entry.roles))
    return recorded(clock, title, constants.gpu, entry.name, names, lines_of(entry) if lines is None else lines)


def recorded(clock: KernelClock, title: str, gpu: str, kernel: str, names: Names, lines: SourceLines) -> Recorded:
    """Return a launch that has run with spans. StandstillError for one that waits for what never comes."""
    result = clock.result()
    ctas = len(clock.engine.sms)
    code = {address: ins.text for address, ins in clock.decoder.code.items()}
    return Recorded(title, gpu, kernel, ctas, len(clock.engine.warps) // ctas, names, result.end, tuple(result.spans), code, lines)


def lines_of(entry: KernelEntry) -> SourceLines:
    """Return the source lines of a built kernel."""
    artifacts = load_artifacts()
    return source_lines(entry, artifacts.cubin(entry), artifacts.ptx(entry))


def merged(spans: list[Span], key: Mapping[int, object] | None = None) -> Iterator[tuple[Span, int]]:
    """Yield the spans of a warp with neighbours of issue joined, and the number of instructions of each.

    key: joins only instructions whose addresses have equal values there; None joins all.
    """
    current: Span | None = None
    number = 0
    for span in spans:
        same = (
            current is not None
            and span.name == current.name == ISSUE
            and (key is None or key.get(span.address) == key.get(current.address))
        )
        if same and current is not None:
            current, number = current._replace(end=max(current.end, span.end)), number + 1
            continue
        if current is not None:
            yield current, number
        current, number = span, 1
    if current is not None:
        yield current, number
