"""Time of a row on a GPU, from the clocks of one cluster and the work that the plan gives to each CTA. Pure arithmetic.

kernel  = fixed part + blocks and seams of the longest CTA, or the bytes over the rate of memory if that is longer
call    = launch + kernel + the combine after it
stream  = waves of CTAs, or bytes over the rate of memory, for a kernel without a loop over keys
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ..launches.launch import Combine, Launch
from ..launches.partition import CtaWork
from .cluster_run import HBM
from .constants import Constants
from .kernel_times import KernelTimes

FIXED, LATENCY = "fixed", "latency"
_BUSY = 0.9  # share of its clocks from which a unit binds; below, the kernel waits for its own steps


@dataclass(frozen=True)
class RowTime:
    """Predicted time of a call. us: the whole call. ghz: clock of the SMs. terms: microseconds by cause; they add up to us.

    binds: the cause of most of the time: a unit, "HBM", "latency" (no unit is busy) or "fixed".
    """

    us: float
    ghz: float
    terms: Mapping[str, float]
    binds: str


def clock_ghz(constants: Constants, use: float) -> float:
    """Return the clock of the SMs while the tensor cores of the GPU work at a share of their rate.

    It falls linearly from boost_ghz at boost_use through middle_ghz to loaded_ghz at loaded_use.
    """
    points = (
        (constants.boost_use, constants.boost_ghz),
        (constants.middle_use, constants.middle_ghz),
        (constants.loaded_use, constants.loaded_ghz),
    )
    if use <= points[0][0]:
        return points[0][1]
    for (low, above), (high, below) in pairwise(points):
        if use <= high:
            return above + (below - above) * (use - low) / (high - low)
    return points[-1][1]


def hbm_share(constants: Constants, launch: Launch, cluster: int) -> float:
    """Return the bytes a clock that each SM gets from HBM.

    Only the first of several clusters that share keys reads them from there, at most as fast as an SM takes bytes from L2.
    """
    sharing = max(launch.row_ctas // cluster, 1)
    return min(constants.hbm_bytes * sharing / max(launch.ctas, 1), float(constants.l2_bytes))


def longest(launch: Launch, block: float, seam: float) -> CtaWork:
    """Return the work of the CTA that ends last."""
    return max(launch.cta_work, key=lambda work: work.blocks * block + work.pieces * seam, default=CtaWork(0, 0))


def memory_us(constants: Constants, nbytes: float) -> float:
    """Return the microseconds of bytes at the rate of HBM."""
    return nbytes / (constants.hbm_bytes * constants.boost_ghz * 1e3)


def tensor_use(launch: Launch, constants: Constants, clocks: float) -> float:
    """Return the share of the rate of all tensor cores of the GPU that the products of a launch take in so many clocks.

    By arithmetic: a product that waits for its operands takes no power for it.
    """
    blocks = sum(work.blocks for work in launch.cta_work) * launch.ctas / max(len(launch.cta_work), 1)
    return blocks * sum(launch.flops.values()) / constants.product_flops / constants.sm_count / clocks


def row_time(launch: Launch, times: KernelTimes, seam: float, constants: Constants, combine: float | None) -> RowTime:
    """Return the time of a launch over keys. seam: clocks between two pieces. combine: clocks of one CTA of the combine after it."""
    work = longest(launch, times.block, seam)
    seams = max(work.pieces - 1, 0) * seam
    clocks = times.fixed + work.blocks * times.block + seams
    ghz = clock_ghz(constants, tensor_use(launch, constants, clocks))
    own = clocks / ghz / 1e3
    memory = memory_us(constants, launch.bytes)
    terms = {
        "launch": constants.launch_us,
        "fixed part": times.fixed / ghz / 1e3,
        "blocks": work.blocks * times.block / ghz / 1e3,
        "seams": seams / ghz / 1e3,
        "memory beyond them": max(memory - (own - times.fixed / ghz / 1e3), 0.0),
        "combine": 0.0
        if launch.combine is None or combine is None
        else constants.dependent_us + stream_us(launch.combine, combine, constants),
    }
    terms = {name: term * launch.rounds for name, term in terms.items()}
    terms["launch"] = constants.launch_us + (launch.rounds - 1) * constants.dependent_us
    us = sum(terms.values())
    return RowTime(us, ghz, terms, _binds(terms, us, times))


def in_sequence(first: RowTime, second: RowTime, constants: Constants) -> RowTime:
    """Return the time of a call of two launches, the second of which waits for the first. ghz, binds: of the longer one."""
    terms = {name: us + second.terms[name] for name, us in first.terms.items()}
    terms["launch"] = constants.launch_us + constants.dependent_us
    longer = max(first, second, key=lambda time: time.us)
    return RowTime(sum(terms.values()), longer.ghz, terms, longer.binds)


def _binds(terms: Mapping[str, float], us: float, times: KernelTimes) -> str:
    streamed = terms["blocks"] + terms["seams"] + terms["memory beyond them"]
    if streamed < us / 2:
        return FIXED
    if terms["memory beyond them"] > 0:
        return HBM
    return binding_unit(times)


def binding_unit(times: KernelTimes) -> str:
    """Return the busiest unit of a block, or "latency" if none is busy all the time."""
    unit = max(times.use, key=lambda name: times.use[name])
    return unit if times.use[unit] >= _BUSY else LATENCY


def waves(combine: Combine, constants: Constants) -> int:
    """Return how many CTAs of a streaming kernel run on an SM one after the other."""
    return -(-combine.ctas // (combine.ctas_per_sm * constants.sm_count))


def stream_us(combine: Combine, cta_clocks: float, constants: Constants) -> float:
    """Return the microseconds of a kernel without a loop over keys: waves of its busiest CTA; at least the time of all bytes."""
    turns = waves(combine, constants)
    clocks = turns * cta_clocks + (turns - 1) * constants.cta_start_clocks
    memory = memory_us(constants, combine.bytes) if combine.cold else 0.0
    return max(clocks, memory * constants.boost_ghz * 1e3 + constants.hbm_latency * combine.cold) / constants.boost_ghz / 1e3


def stream_time(combine: Combine, cta_clocks: float, constants: Constants) -> RowTime:
    """Return the time of a call of a kernel without a loop over keys."""
    terms = {"launch": constants.launch_us, "CTAs": stream_us(combine, cta_clocks, constants)}
    us = sum(terms.values())
    is_memory = memory_us(constants, combine.bytes) > 0.9 * terms["CTAs"]
    return RowTime(us, constants.boost_ghz, terms, FIXED if terms["launch"] > us / 2 else HBM if is_memory else LATENCY)


def stream_setting_share(combine: Combine, constants: Constants) -> float:
    """Return the bytes a clock that one CTA of a streaming kernel gets from HBM."""
    resident = min(combine.ctas, combine.ctas_per_sm * constants.sm_count)
    return min(constants.hbm_bytes / max(resident, 1), float(constants.l2_bytes))
