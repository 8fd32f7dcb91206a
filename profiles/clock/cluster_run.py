"""Run of one cluster on the clock: its end, how long each unit was busy, and what its warps waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from cute_mla.manifest import KernelEntry
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.current import simulate
from cute_mla.simulator.sass.listing import Listing, read_listing
from cute_mla.simulator.sass.text_cache import disassembly
from cute_mla.simulator.sass.trace import MachineTrace

from .constants import Constants
from .engine import Setting
from .instructions import SCHEDULERS, WARP_PRODUCTS, UnknownTimeError
from .kernel import KernelClock
from .program import WARP

TENSOR, SHARED, L2, HBM, ISSUE = "tensor core", "shared memory", "L2", "HBM", "issue"  # units whose use is reported

# Causes of waits, by the cause that the engine notes: a wait of its own kind, or the opcode whose result or operands a scoreboard guards.
_OWN = ("mbarrier", "products", "tensor core queue", "memory queue", "pipe")
_CAUSES = {
    "issue": ISSUE,
    **dict.fromkeys(("barrier", "cluster barrier", "BAR"), "barrier"),
    **dict.fromkeys(("LDG", "LD", "LDGSTS", "cp.async", "LDGDEPBAR", "ATOMG"), "global loads"),
    **dict.fromkeys(("LDL", "STL"), "local memory"),
    **dict.fromkeys(("LDS", "LDSM", "STS", "STSM", "ATOMS", "STAS"), "shared accesses"),
    **dict.fromkeys(("LDTM", "STTM"), "tensor memory"),
    **dict.fromkeys(("UTMALDG", "UTMAPF", "UTMASTG", "UBLKCP", "UBLKPF"), "copies"),
}
OTHER = "results"  # of instructions with a latency of their own, such as MUFU, SHFL, S2R and LDC


@dataclass(frozen=True)
class ClusterRun:
    """Times of one cluster, in clocks. end: of its last warp.

    busy: of each unit of the first CTA's SM; of "issue", the busiest scheduler. issued: instructions by warp of the first CTA. waits: by
    warp and cause.
    """

    end: int
    busy: Mapping[str, float]
    issued: Mapping[int, int]
    waits: Mapping[tuple[int, str], int]


def cause_of(noted: str) -> str:
    """Return the class of a cause of waits that the engine noted."""
    return noted if noted in _OWN else _CAUSES.get(noted, OTHER)


@lru_cache(maxsize=8)
def _listing(cubin: bytes) -> Listing:
    return read_listing(disassembly(cubin))


def run_call(
    entry: KernelEntry, sm_count: int, constants: Constants, setting: Setting, call: Callable[[], object], cluster: int = 0
) -> ClusterRun:
    """Make a call on a simulated device and return the times of one cluster of one of its kernels (see clock_call)."""
    return cluster_run(clock_call(entry, sm_count, constants, setting, call, cluster))


def clock_call(
    entry: KernelEntry, sm_count: int, constants: Constants, setting: Setting, call: Callable[[], object], cluster: int = 0
) -> KernelClock:
    """Make a call on a simulated device of `sm_count` SMs and time one cluster of one of its kernels, by default the first.

    UnknownTimeError for machine code that the clock cannot time, ValueError if the call does not launch the kernel.
    """
    clocks: list[KernelClock] = []
    listing = _listing(load_artifacts().cubin(entry))

    def attach(kernel: KernelEntry, trace: MachineTrace) -> None:
        if kernel.name == entry.name:
            trace.cluster = cluster
            clocks.append(kernel_clock(listing, prod(entry.cluster), prod(entry.block), constants, setting))
            clocks[-1].attach(trace)

    with simulate(entry.arch, sm_count, code="sass") as device:
        device.trace_machine_code(attach)
        call()
    if not clocks:
        raise ValueError(f"the call does not launch {entry.name}")
    return clocks[-1]


def kernel_clock(listing: Listing, ctas: int, threads: int, constants: Constants, setting: Setting) -> KernelClock:
    """Return a clock for a launch. UnknownTimeError for instructions whose unit has no model."""
    clock = KernelClock(listing, ctas, -(-threads // WARP), constants, setting)
    known = clock.engine.handlers
    missing = sorted({timed.base for timed in clock.decoder.timed.values() if timed.kind and timed.kind not in known})
    if missing:
        raise UnknownTimeError(f"{listing.name}: the clock has no unit for {', '.join(missing)}")
    return clock


def cluster_run(clock: KernelClock) -> ClusterRun:
    """Return the times of a launch that has run."""
    result = clock.result()
    first = clock.engine.sms[0]
    issued: Counter[int] = Counter()
    schedulers: Counter[int] = Counter()
    products: Counter[int] = Counter()  # clocks of products of warps, by scheduler
    for (warp, address), number in result.issued.items():
        issued[warp] += number
        schedulers[warp % SCHEDULERS] += number
        timed = clock.decoder.timed[address]
        if timed.base in WARP_PRODUCTS:
            products[warp % SCHEDULERS] += number * timed.occupancy
    waits: Counter[tuple[int, str]] = Counter()
    for (warp, address, noted), number in result.stalls.items():
        if clock.decoder.timed[address].kind != "exit":  # a warp that has nothing left to do
            waits[warp, cause_of(noted)] += number
    busy = {
        TENSOR: float(result.product_clocks or max(products.values(), default=0)),
        SHARED: result.port_clocks + first.port.fetched,
        L2: first.memory.link.busy,
        HBM: first.memory.hbm.busy,
        ISSUE: float(max(schedulers.values())),
    }
    return ClusterRun(result.end, busy, issued, waits)
