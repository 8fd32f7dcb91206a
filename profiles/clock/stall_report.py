"""Instructions of a kernel's main loop that wait, by clocks a block of keys."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod

from cute_mla.aot_build.source_lines import SourceLines
from cute_mla.manifest import KernelEntry

from ..kernel_stats.dynamic_counts import keys_of_block
from .cluster_run import cause_of
from .constants import Constants
from .engine import Setting
from .kernel import KernelClock
from .kernel_times import LONG, SHORT, clock_kernel, is_cold
from .recorded import lines_of

LEAST = 0.5  # clocks a block below which a wait is left out


@dataclass(frozen=True)
class Stall:
    """An instruction that waits. clocks: a block of keys, mean of the role's warps that work. cause: class; noted: what it waits for.

    noted is an opcode whose result or operands a scoreboard guards, or a kind of wait. ptx_line, source: None and "" where unknown.
    """

    role: str
    clocks: float
    cause: str
    noted: str
    address: int
    code: str
    ptx_line: int | None
    source: str


@dataclass(frozen=True)
class StallReport:
    """Waits of a kernel, the longest first. block: predicted clocks of a block of `keys` keys. missing: why lines are unknown."""

    kernel: str
    gpu: str
    keys: int
    block: float
    stalls: tuple[Stall, ...]
    missing: tuple[str, ...]

    @property
    def unit(self) -> str:
        """Return what a block consists of."""
        return "query rows" if self.kernel.startswith("dense_prefill_dkdv") else "keys"


def default_setting(entry: KernelEntry, constants: Constants) -> Setting:
    """Return the circumstances of a full GPU: an equal share of HBM, and keys from there if the kernel reads them once."""
    return Setting(constants.hbm_bytes / constants.sm_count, cold=is_cold(entry))


def stall_report(entry: KernelEntry, constants: Constants, setting: Setting) -> StallReport:
    """Run a kernel over SHORT and over LONG blocks and return what waits in each further block.

    ValueError for a kernel without a loop over keys, UnknownTimeError for machine code that the clock cannot time.
    """
    few, many = (clock_kernel(entry, constants, setting, blocks) for blocks in (SHORT, LONG))
    block = (many.result().end - few.result().end) / (LONG - SHORT)
    lines = lines_of(entry)
    return StallReport(entry.name, constants.gpu, keys_of_block(entry), block, stalls_between(entry, few, many, lines), lines.missing)


def stalls_between(entry: KernelEntry, few: KernelClock, many: KernelClock, lines: SourceLines) -> tuple[Stall, ...]:
    """Return the waits of a further block, by the difference of two runs."""
    first, second = few.result(), many.result()
    issued: Counter[int] = Counter()
    for (warp, _), number in second.issued.items():
        issued[warp] += number
    for (warp, _), number in first.issued.items():
        issued[warp] -= number
    clocks: defaultdict[tuple[str, int, str], float] = defaultdict(float)
    roles = [(role.name, range(role.first_warp, role.first_warp + role.warps)) for role in entry.roles]
    for role, every in roles or [("warps", range(-(-prod(entry.block) // 32)))]:
        warps = [warp for warp in every if issued[warp] > 0]
        for (warp, address, noted), number in second.stalls.items():
            if warp in warps and many.decoder.timed[address].kind != "exit":
                clocks[role, address, noted] += (number - first.stalls[warp, address, noted]) / (LONG - SHORT) / len(warps)
    found = [
        Stall(
            role,
            number,
            cause_of(noted),
            noted,
            address,
            many.decoder.code[address].text,
            lines.ptx.get(address),
            lines.where(address),
        )
        for (role, address, noted), number in clocks.items()
        if number >= LEAST
    ]
    return tuple(sorted(found, key=lambda stall: (-stall.clocks, stall.role, stall.address)))
